"""Transfers between ranks that share no memory: packed MPI messages, many under way at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from hpcrl.reshard.buckets import Part, messages, size
from hpcrl.reshard.planner import Move
from hpcrl.runtime.accelerator import host_bytes
from hpcrl.runtime.mpi import wait_for_ranks

if TYPE_CHECKING:
    from mpi4py import MPI


Weights = Mapping[str, Tensor]

CPU = torch.device("cpu")


def source_part(weights: Weights, move: Move) -> Tensor:
    """The (rows, cols) view of the sender's local tensor, a 1-D one taken as (n, 1)."""
    return _rectangle(weights[move.name], move.src_row, move.src_col, move)


def destination_part(weights: Weights, move: Move) -> Tensor:
    """The (rows, cols) view of the receiver's local tensor."""
    return _rectangle(weights[move.dst_name], move.dst_row, move.dst_col, move)


def pack(parts: Sequence[Part], source: Weights, buffer: Tensor, dtype: torch.dtype) -> None:
    """Values of `parts`, rounded to `dtype`, into `buffer` (bytes,) uint8."""
    for part in parts:
        copy(source_part(source, part.move), _in_buffer(part, buffer, dtype))


def unpack(parts: Sequence[Part], buffer: Tensor, destination: Weights, dtype: torch.dtype) -> None:
    """Values of `parts` from `buffer` (bytes,) uint8 to where they belong."""
    for part in parts:
        copy(_in_buffer(part, buffer, dtype), destination_part(destination, part.move))


def copy(source: Tensor, destination: Tensor) -> None:
    """As `destination.copy_(source)`. What is contiguous goes through memcpy, which does not read what it overwrites
    where the machine's caches are small against the size; torch's own loop always does."""
    plain = source.is_contiguous() and destination.is_contiguous() and source.dtype == destination.dtype
    if plain and source.device == destination.device == CPU:
        np.copyto(host_bytes(destination), host_bytes(source))
    else:
        destination.copy_(source)


def _in_buffer(part: Part, buffer: Tensor, dtype: torch.dtype) -> Tensor:
    move = part.move
    return buffer[part.offset : part.offset + move.nbytes].view(dtype).view(move.rows, move.cols)


def _rectangle(tensor: Tensor, row: int, col: int, move: Move) -> Tensor:
    return tensor.view(tensor.size(0), -1)[row : row + move.rows, col : col + move.cols]


EAGER_TESTS = 20  # what is waited for takes milliseconds, of a core that this rank would otherwise keep


class Events:
    """What is to be done may start further requests, so that each pair of ranks goes at its own pace."""

    def __init__(self) -> None:
        self._requests: list[MPI.Request] = []
        self._actions: list[Callable[[], None] | None] = []

    def add(self, request: MPI.Request, then: Callable[[], None] | None = None) -> None:
        self._requests.append(request)
        self._actions.append(then)

    def run(self, meanwhile: Iterator[None]) -> None:
        """Until no request is left and `meanwhile` is exhausted, which is advanced while there is nothing to react to.

        Waits with back-off. Raises MPI.Exception when an operation failed.
        """
        busy = True
        while self._requests:
            if self._react():
                continue
            if busy:
                busy = next(meanwhile, self) is not self
            else:
                wait_for_ranks(self._react, EAGER_TESTS)
        for _ in meanwhile:
            pass

    def _react(self) -> bool:
        from mpi4py import MPI

        index, done = MPI.Request.Testany(self._requests)
        if not done:
            return False
        del self._requests[index]
        action = self._actions.pop(index)
        if action is not None:
            action()
        return True


DATA = 4  # tag


class Messages:
    """One buffer per peer and direction, allocated once and kept.

    `comm` is nobody else's while a refit runs; `place` maps world ranks to its ranks. `max_bytes` bounds a message, and
    is the same on every rank.
    """

    def __init__(
        self,
        comm: MPI.Intracomm,
        place: dict[int, int],
        sends: dict[int, list[Move]],
        receives: dict[int, list[Move]],
        dtype: torch.dtype,
        max_bytes: int,
    ) -> None:
        self._comm, self._dtype = comm, dtype
        self._sends = {place[peer]: messages(moves, max_bytes) for peer, moves in sends.items()}
        self._receives = {place[peer]: messages(moves, max_bytes) for peer, moves in receives.items()}
        self._outboxes = {peer: _box(its) for peer, its in self._sends.items()}
        self._inboxes = {peer: _box(its) for peer, its in self._receives.items()}
        self.nbytes = sum(box.nbytes for box in (*self._outboxes.values(), *self._inboxes.values()))

    def start(self, events: Events, source: Weights, destination: Weights) -> None:
        """Begin one refit; `events` carries it on."""
        for peer, theirs in self._receives.items():
            self._receive(events, peer, iter(theirs), destination)
        for peer, its in self._sends.items():
            self._send(events, peer, iter(its), source)

    def close(self) -> None:
        self._outboxes, self._inboxes = {}, {}

    def _send(self, events: Events, peer: int, its: Iterator[list[Part]], source: Weights) -> None:
        parts = next(its, None)
        if parts is None:
            return
        box = self._outboxes[peer][: size(parts)]
        pack(parts, source, box, self._dtype)
        events.add(self._comm.Isend(_bytes(box), peer, DATA), lambda: self._send(events, peer, its, source))

    def _receive(self, events: Events, peer: int, theirs: Iterator[list[Part]], destination: Weights) -> None:
        parts = next(theirs, None)
        if parts is None:
            return
        box = self._inboxes[peer][: size(parts)]

        def take() -> None:
            unpack(parts, box, destination, self._dtype)
            self._receive(events, peer, theirs, destination)

        events.add(self._comm.Irecv(_bytes(box), peer, DATA), take)


def _box(its: list[list[Part]]) -> Tensor:
    return torch.empty(max(size(parts) for parts in its), dtype=torch.uint8)


def _bytes(box: Tensor) -> memoryview:
    """Bytes, because MPI and numpy have no bf16."""
    return box.numpy().data
