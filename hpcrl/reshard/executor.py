"""Carrying out a refit plan: local copies, and packed messages between pairs of ranks."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from hpcrl.launch.waiting import wait_all
from hpcrl.reshard.planner import Move, Plan

if TYPE_CHECKING:
    from mpi4py import MPI

Bucket = list[Move]

TAG = 7301
DEFAULT_BUCKET_BYTES = 16 * 2**20


class RefitReport(NamedTuple):
    """Wall time in seconds and bytes of this rank, in the destination's dtype."""

    seconds: float
    bytes_sent: int
    bytes_received: int
    bytes_copied: int


@dataclass(frozen=True)
class _Message:
    """One bucket for or from one peer, with its host memory (bytes,) uint8."""

    peer: int
    bucket: Bucket
    memory: Tensor

    def rectangles(self, dtype: torch.dtype) -> list[tuple[Move, Tensor]]:
        """Each move and its (rows, cols) part of the memory."""
        values, start, parts = self.memory.view(dtype), 0, []
        for move in self.bucket:
            size = move.rows * move.cols
            parts.append((move, values[start : start + size].view(move.rows, move.cols)))
            start += size
        return parts


class Refit:
    """Copies weights from their training layout into the buffers of an engine, as often as wanted.

    `plan` holds at least the moves of `rank`; ranks of the plan are ranks of `comm`, which nobody else may use while a
    refit runs. Memory beyond both sets of tensors is one bucket per peer and direction; a bucket is at most
    `bucket_bytes`, or one row of a tensor where that is longer.
    """

    def __init__(
        self,
        plan: Plan,
        comm: MPI.Comm,
        rank: int,
        dtype: torch.dtype,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    ) -> None:
        if dtype.itemsize != plan.itemsize:
            raise ValueError(f"the plan counts {plan.itemsize} bytes per element, but {dtype} has {dtype.itemsize}")
        self._comm = comm
        self._dtype = dtype
        self._copies = plan.copies(rank)
        self._sends = {peer: _buckets(moves, bucket_bytes) for peer, moves in plan.sends(rank).items()}
        self._receives = {peer: _buckets(moves, bucket_bytes) for peer, moves in plan.receives(rank).items()}
        self._totals = tuple(
            totals.get(rank, 0) for totals in (plan.bytes_sent, plan.bytes_received, plan.bytes_copied)
        )

    @torch.no_grad()
    def run(self, source: Mapping[str, Tensor], destination: Mapping[str, Tensor]) -> RefitReport:
        """Fills `destination` from all ranks' `source`; both map global parameter names to this rank's local tensors.

        A rank outside one of the layouts passes an empty mapping there. Values are rounded to the destination's dtype
        before they are sent. Every rank of the plan calls this.
        """
        start = time.perf_counter()
        self._check(destination)
        # The n-th buckets of a pair meet in the n-th round on both sides, so rounds cannot wait in a circle.
        rounds = max((len(buckets) for buckets in (*self._sends.values(), *self._receives.values())), default=0)
        memory = {direction: _memory(peers) for direction, peers in (("in", self._receives), ("out", self._sends))}
        for turn in range(rounds):
            incoming = self._messages(self._receives, memory["in"], turn)
            outgoing = self._messages(self._sends, memory["out"], turn)
            requests = [self._comm.Irecv(_buffer(message.memory), message.peer, TAG) for message in incoming]
            for message in outgoing:
                for move, part in message.rectangles(self._dtype):
                    part.copy_(_rectangle(source[move.name], move.src_row, move.src_col, move))
                requests.append(self._comm.Isend(_buffer(message.memory), message.peer, TAG))
            if turn == 0:
                self._copy(source, destination)
            wait_all(requests)
            for message in incoming:
                for move, part in message.rectangles(self._dtype):
                    _rectangle(destination[move.name], move.dst_row, move.dst_col, move).copy_(part)
        if rounds == 0:
            self._copy(source, destination)
        return RefitReport(time.perf_counter() - start, *self._totals)

    def _check(self, destination: Mapping[str, Tensor]) -> None:
        for name, tensor in destination.items():
            if tensor.dtype != self._dtype:
                raise ValueError(f"{name} of the engine is {tensor.dtype}, but the refit was planned for {self._dtype}")

    def _messages(self, buckets: dict[int, list[Bucket]], memory: dict[int, Tensor], turn: int) -> list[_Message]:
        return [
            _Message(peer, its[turn], memory[peer][: _nbytes(its[turn])])
            for peer, its in buckets.items()
            if turn < len(its)
        ]

    def _copy(self, source: Mapping[str, Tensor], destination: Mapping[str, Tensor]) -> None:
        for move in self._copies:
            target = _rectangle(destination[move.name], move.dst_row, move.dst_col, move)
            target.copy_(_rectangle(source[move.name], move.src_row, move.src_col, move))


def _buckets(moves: list[Move], limit: int) -> list[Bucket]:
    """`moves` in order, cut by rows where one is too large; both ends of a pair cut alike."""
    buckets: list[Bucket] = [[]]
    free = limit
    for move in moves:
        for part in _split(move, limit):
            if part.nbytes > free and buckets[-1]:
                buckets.append([])
                free = limit
            buckets[-1].append(part)
            free -= part.nbytes
    return buckets


def _split(move: Move, limit: int) -> list[Move]:
    if move.nbytes <= limit:
        return [move]
    row_bytes = move.nbytes // move.rows
    step = max(1, limit // row_bytes)
    return [
        move._replace(
            src_row=move.src_row + first,
            dst_row=move.dst_row + first,
            rows=min(step, move.rows - first),
            nbytes=min(step, move.rows - first) * row_bytes,
        )
        for first in range(0, move.rows, step)
    ]


def _nbytes(bucket: Bucket) -> int:
    return sum(move.nbytes for move in bucket)


def _memory(peers: dict[int, list[Bucket]]) -> dict[int, Tensor]:
    return {
        peer: torch.empty(max(_nbytes(bucket) for bucket in buckets), dtype=torch.uint8)
        for peer, buckets in peers.items()
    }


def _buffer(memory: Tensor) -> memoryview:
    """Bytes, because MPI and numpy have no bf16."""
    return memory.numpy().data


def _rectangle(tensor: Tensor, row: int, col: int, move: Move) -> Tensor:
    """The (rows, cols) view of a local tensor, a 1-D one taken as (n, 1)."""
    return tensor.view(tensor.size(0), -1)[row : row + move.rows, col : col + move.cols]
