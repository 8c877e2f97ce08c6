"""Transfers between ranks that share no memory: moves cut to a bounded size, and packed MPI messages."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from hpcrl.engine.refit.planner import Move
from hpcrl.kernels.fp8_matrix import Fp8Matrix
from hpcrl.runtime.accelerator import host_bytes
from hpcrl.runtime.mpi import wait_for_ranks

if TYPE_CHECKING:
    from mpi4py import MPI


Moves: TypeAlias = dict[int, list[Move]]  # by the rank of the other end


class Part(NamedTuple):
    """A move, or a piece of one, and the byte of the buffer where its values start."""

    move: Move
    offset: int


@dataclass
class Page:
    """What a sender packs into its window at once, and the ranks that read from it."""

    parts: list[Part] = field(default_factory=list)
    readers: set[int] = field(default_factory=set)
    nbytes: int = 0


def messages(moves: Iterable[Move], limit: int) -> list[list[Part]]:
    """Split `moves`, in order, into buffers of at most `limit` bytes. Sender and receiver split them alike."""
    cut: list[list[Part]] = [[]]
    used = 0
    for move in moves:
        for piece in pieces(move, limit):
            if used + piece.nbytes > limit and cut[-1]:
                cut.append([])
                used = 0
            cut[-1].append(Part(piece, used))
            used += piece.nbytes
    return cut if cut[-1] else []


def size(parts: Sequence[Part]) -> int:
    """Return the bytes of a buffer that holds `parts`."""
    return parts[-1].offset + parts[-1].move.nbytes if parts else 0


def pages(sends: Moves, limit: int) -> tuple[list[Page], dict[int, dict[int, list[Part]]]]:
    """Return pages of at most `limit` bytes, and reader -> page -> the parts that it copies from the page.

    A rectangle is in one page only, also if several ranks read it.
    """
    published: list[Page] = []
    places: dict[tuple[str, int, int, int, int], list[tuple[int, int]]] = {}
    read: dict[int, dict[int, list[Part]]] = {reader: {} for reader in sends}
    for reader, move in ((reader, move) for reader, moves in sends.items() for move in moves):
        rectangle, cut = (move.name, move.src_row, move.src_col, move.rows, move.cols), list(pieces(move, limit))
        if rectangle not in places:
            places[rectangle] = [_publish(piece, published, limit) for piece in cut]
        for piece, (page, offset) in zip(cut, places[rectangle], strict=True):
            published[page].readers.add(reader)
            read[reader].setdefault(page, []).append(Part(piece, offset))
    return published, read


def pieces(move: Move, limit: int) -> Iterator[Move]:
    """Split `move` by rows into pieces of at most `limit` bytes, and by columns if one row is larger than that."""
    if move.nbytes <= limit:
        yield move
        return
    itemsize = move.nbytes // (move.rows * move.cols)
    rows = max(1, limit // (move.cols * itemsize))
    cols = min(move.cols, max(1, limit // itemsize))
    for row in range(0, move.rows, rows):
        for col in range(0, move.cols, cols):
            height, width = min(rows, move.rows - row), min(cols, move.cols - col)
            yield move._replace(
                src_row=move.src_row + row,
                src_col=move.src_col + col,
                dst_row=move.dst_row + row,
                dst_col=move.dst_col + col,
                rows=height,
                cols=width,
                nbytes=itemsize * height * width,
            )


def _publish(piece: Move, published: list[Page], limit: int) -> tuple[int, int]:
    """Append `piece` to the last page, or to a new one if it does not fit. Return the page's number and the offset."""
    if not published or published[-1].nbytes + piece.nbytes > limit:
        published.append(Page())
    page = published[-1]
    page.parts.append(Part(piece, page.nbytes))
    page.nbytes += piece.nbytes
    return len(published) - 1, page.parts[-1].offset


Weights = Mapping[str, Tensor]
Buffers = Mapping[str, Tensor | Fp8Matrix]  # an engine's weights

CPU = torch.device("cpu")


def source_part(weights: Weights, move: Move) -> Tensor:
    """Return the (rows, cols) view of the sender's local tensor; a 1-D tensor is viewed as (n, 1)."""
    return _rectangle(weights[move.name], move.src_row, move.src_col, move)


def destination_part(weights: Buffers, move: Move) -> Tensor | Fp8Matrix:
    """Return the (rows, cols) view of the receiver's local tensor."""
    weight = weights[move.dst_name]
    if isinstance(weight, Fp8Matrix):
        return weight.part(move.dst_row, move.rows, move.dst_col, move.cols)
    return _rectangle(weight, move.dst_row, move.dst_col, move)


def pack(parts: Sequence[Part], source: Weights, buffer: Tensor, dtype: torch.dtype) -> None:
    """Copy the values of `parts`, rounded to `dtype`, into `buffer` (bytes,) uint8."""
    for part in parts:
        copy(source_part(source, part.move), _in_buffer(part, buffer, dtype))


def unpack(parts: Sequence[Part], buffer: Tensor, destination: Buffers, dtype: torch.dtype) -> None:
    """Copy the values of `parts` from `buffer` (bytes,) uint8 to the destination."""
    for part in parts:
        copy(_in_buffer(part, buffer, dtype), destination_part(destination, part.move))


def copy(source: Tensor, destination: Tensor | Fp8Matrix) -> None:
    """Same as `destination.copy_(source)`.

    Contiguous host tensors are copied by memcpy: for sizes beyond the caches it does not read the destination first,
    which torch's own loop does.
    """
    if isinstance(destination, Fp8Matrix):
        destination.copy_(source)
        return
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


EAGER_TESTS = 20  # few: a transfer takes milliseconds, and polling for it would take a core from another rank


class RequestLoop:
    """Outstanding MPI requests, each with an action that runs on completion and may add further requests.

    Each pair of ranks so proceeds at its own speed.
    """

    def __init__(self) -> None:
        self._requests: list[MPI.Request] = []
        self._actions: list[Callable[[], None] | None] = []

    def add(self, request: MPI.Request, then: Callable[[], None] | None = None) -> None:
        self._requests.append(request)
        self._actions.append(then)

    def run(self, meanwhile: Iterator[None]) -> None:
        """Run until no request is left and `meanwhile` is exhausted; `meanwhile` advances while no request has
        completed.

        Waits with back-off. Raises MPI.Exception if an operation failed.
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


class MessageTransport:
    """Packed MPI messages, through one buffer per peer and direction, allocated once and kept.

    `comm` is used by nothing else while a refit runs; `sends` and `receives` are by its ranks. `max_bytes` bounds a
    message and is the same on every rank.
    """

    def __init__(self, comm: MPI.Intracomm, sends: Moves, receives: Moves, dtype: torch.dtype, max_bytes: int) -> None:
        self._comm, self._dtype = comm, dtype
        self._sends = {peer: messages(moves, max_bytes) for peer, moves in sends.items()}
        self._receives = {peer: messages(moves, max_bytes) for peer, moves in receives.items()}
        self._outboxes = {peer: _box(buffers) for peer, buffers in self._sends.items()}
        self._inboxes = {peer: _box(buffers) for peer, buffers in self._receives.items()}
        self.nbytes = sum(box.nbytes for box in (*self._outboxes.values(), *self._inboxes.values()))

    def start(self, loop: RequestLoop, source: Weights, destination: Buffers) -> None:
        """Start one refit; `loop` completes it."""
        for peer, buffers in self._receives.items():
            self._receive(loop, peer, iter(buffers), destination)
        for peer, buffers in self._sends.items():
            self._send(loop, peer, iter(buffers), source)

    def close(self) -> None:
        self._outboxes, self._inboxes = {}, {}

    def _send(self, loop: RequestLoop, peer: int, outgoing: Iterator[list[Part]], source: Weights) -> None:
        parts = next(outgoing, None)
        if parts is None:
            return
        box = self._outboxes[peer][: size(parts)]
        pack(parts, source, box, self._dtype)
        loop.add(self._comm.Isend(_bytes(box), peer, DATA), lambda: self._send(loop, peer, outgoing, source))

    def _receive(self, loop: RequestLoop, peer: int, incoming: Iterator[list[Part]], destination: Buffers) -> None:
        parts = next(incoming, None)
        if parts is None:
            return
        box = self._inboxes[peer][: size(parts)]

        def take() -> None:
            unpack(parts, box, destination, self._dtype)
            self._receive(loop, peer, incoming, destination)

        loop.add(self._comm.Irecv(_bytes(box), peer, DATA), take)


def _box(buffers: list[list[Part]]) -> Tensor:
    return torch.empty(max(size(parts) for parts in buffers), dtype=torch.uint8)


def _bytes(box: Tensor) -> memoryview:
    """Return the bytes of `box`; MPI and numpy have no bf16."""
    return box.numpy().data
