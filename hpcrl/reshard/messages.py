"""Moves between ranks that share no memory: packed messages over MPI, to and from all peers at once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hpcrl.reshard.buckets import Part, messages, size
from hpcrl.reshard.events import Events
from hpcrl.reshard.planner import Move
from hpcrl.reshard.rectangles import Weights, pack, unpack

if TYPE_CHECKING:
    from mpi4py import MPI

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
