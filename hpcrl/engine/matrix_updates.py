"""Whole matrices for optimizers that need them, while ranks hold ranges of elements of their parts.

Each matrix of a pipeline stage has an owner among the ranks that hold parts of it; owners are balanced by cost. The
ranges go to the owners in one all-to-all, each owner assembles and updates its matrices, and a second all-to-all
returns the ranges. Each rank computes the same plan without communication.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from hpcrl.batch.packing import balanced_assignment
from hpcrl.model.build import copy_boxes, paste_boxes
from hpcrl.model.params import Shard, shards
from hpcrl.model.shape import ModelShape
from hpcrl.runtime import platform

if TYPE_CHECKING:
    from hpcrl.algorithms.optimizers.optimizer import Optimizer
    from hpcrl.runtime.groups import RoleGroups
    from hpcrl.runtime.layout import Layout

Function = Callable[[Tensor], Tensor]
Key = tuple[str, int]  # a matrix, and the world rank that holds a range of it


class Place(NamedTuple):
    """Where a parameter is in a bucket that replicas divide evenly; in elements."""

    start: int
    bucket: int  # size of the bucket

    def ranges(self, numel: int, replicas: int) -> Iterator[tuple[int, int, int]]:
        """Yield replicas, and the first and behind the last element of the parameter that each updates."""
        each = self.bucket // replicas
        for replica in range(self.start // each, -(-(self.start + numel) // each)):
            first = replica * each - self.start
            yield replica, max(0, first), min(numel, first + each)


class Range(NamedTuple):
    """Elements [start, stop) of a rank's part of a matrix, in row-major order."""

    rank: int
    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start


class Matrix(NamedTuple):
    """A matrix, its owner, and its parts: each with the ranges that together are the part. Of equal parts, only the
    first one is sent to the owner."""

    name: str
    owner: int
    parts: tuple[tuple[Shard, tuple[Range, ...]], ...]

    @property
    def sent(self) -> Sequence[tuple[Shard, tuple[Range, ...]]]:
        return self.parts[:1] if self.parts[0][0].tp_replicated else self.parts


class Move(NamedTuple):
    """A range that goes from one rank to another."""

    key: Key
    sender: int
    receiver: int
    size: int


def matrices_of(
    shape: ModelShape,
    layout: Layout,
    stage: int,
    places: Mapping[tuple[int, str], Place],
    cost: Callable[[Shard], float],
    *,
    is_expert: bool,
) -> list[Matrix]:
    """Return the trained matrices of a pipeline stage, of its experts or all others, in the same order on every rank.

    Args:
        places: where parameters are in buckets, by chunk and local name; equal on all ranks of the stage.
        cost: returns the work of updating a matrix.
    """
    parts: dict[str, list[tuple[Shard, tuple[Range, ...]]]] = {}
    dims = ("edp",) if is_expert else ("dp", "cp")
    for replicas in map(sorted, layout.groups(*dims)):
        if layout.coord(replicas[0]).pp != stage:
            continue
        for shard in shards(shape, layout, replicas[0], part="experts" if is_expert else "dense"):
            place = places.get((shard.chunk, shard.local_name))
            if shard.is_matrix and place is not None:
                own_ranges = place.ranges(math.prod(shard.local_shape), len(replicas))
                ranges = tuple(Range(replicas[replica], start, stop) for replica, start, stop in own_ranges)
                parts.setdefault(shard.name, []).append((shard, ranges))
    return [Matrix(name, owner, tuple(parts[name])) for name, owner in _owners(parts, layout, dims, cost)]


def _owners(
    parts: Mapping[str, list[tuple[Shard, tuple[Range, ...]]]],
    layout: Layout,
    dims: tuple[str, ...],
    cost: Callable[[Shard], float],
) -> Iterator[tuple[str, int]]:
    """Yield the matrices and their owners. Matrices of the same ranks are balanced together."""
    replicas_of = {rank: group for group in layout.groups(*dims) for rank in group}
    together: dict[tuple[int, ...], list[str]] = {}
    for name, of_name in parts.items():
        ranks = {rank for _, ranges in of_name for rank in replicas_of[ranges[0].rank]}
        together.setdefault(tuple(sorted(ranks)), []).append(name)
    for holders, names in together.items():
        costs = np.array([cost(parts[name][0][0]) for name in names]).astype(np.int64)
        owners = balanced_assignment(costs, len(holders)).tolist()
        yield from ((name, holders[owner]) for name, owner in zip(names, owners, strict=True))


def replace_projections(shard: Shard, matrix: Tensor, function: Function) -> None:
    """Put function(projection) in the place of each projection that the matrix (rows, cols), whole, holds."""
    periods, rows = shard.projection_rows(matrix.size(0))
    for piece in matrix.view(periods, -1, matrix.size(1)).split(list(rows.values()), dim=1):
        piece.copy_(function(piece.reshape(-1, matrix.size(1))).reshape(piece.shape))


@dataclass(eq=False)
class MatrixUpdates:
    """The matrices of which this rank updates ranges: see `hpcrl.algorithms.optimizers.optimizer.WholeMatrices`.

    places: see `matrices_of`. weights: this rank's ranges of matrices, by the names of the matrices, (n,) fp32.
    """

    chosen: Optimizer
    shape: ModelShape
    groups: RoleGroups
    places: Mapping[tuple[int, str], Place]
    weights: Mapping[str, Tensor]
    is_expert: bool = field(kw_only=True)

    def __post_init__(self) -> None:
        self._names: dict[object, str] = {weight: name for name, weight in self.weights.items()}

    def __contains__(self, weight: object) -> bool:
        return weight in self._names

    def apply(self, function: Function, ranges: MutableMapping[Tensor, Tensor]) -> dict[Tensor, Tensor]:
        """Collective over the ranks of the stage."""
        sent = {}
        while ranges:
            weight, tensor = ranges.popitem()
            sent[self._names[weight], self.groups.rank] = tensor
        received = self._swap(self._to_owners, sent)
        results: dict[Key, Tensor] = {}
        for matrix in self._plan:
            if matrix.owner == self.groups.rank:
                results |= self._update(matrix, received, function)
        returned = self._swap(self._from_owners, results)
        return {self.weights[name]: tensor for (name, _), tensor in returned.items()}

    def _update(self, matrix: Matrix, received: dict[Key, Tensor], function: Function) -> dict[Key, Tensor]:
        """Return the ranges of an updated matrix, and drop those that it was assembled from."""
        first = matrix.parts[0][0]
        whole = torch.empty(first.global_shape, device=platform.device())
        for shard, ranges in matrix.sent:
            part = torch.cat([received.pop((matrix.name, each.rank)) for each in ranges])
            paste_boxes(part.view(shard.local_shape), whole, shard)
            del part
        replace_projections(first, whole, function)
        results = {}
        for shard, ranges in matrix.parts:
            part = whole.new_empty(shard.local_shape)
            copy_boxes(whole, part, shard)
            for each in ranges:
                results[matrix.name, each.rank] = part.view(-1)[each.start : each.stop]
        return results

    def _swap(self, moves: Sequence[Move], tensors: dict[Key, Tensor]) -> dict[Key, Tensor]:
        """Exchange ranges in one all-to-all; return those that this rank receives.

        Args:
            moves: moves of this rank, in an order that all ranks have.
            tensors: this rank's ranges; those that are sent are removed from it.
        """
        group, rank = self.groups.pgc.tp_dp_cp, self.groups.rank
        members = dist.get_process_group_ranks(group)
        sends = sorted((move for move in moves if move.sender == rank), key=lambda move: move.receiver)
        receives = sorted((move for move in moves if move.receiver == rank), key=lambda move: move.sender)
        empty = torch.empty(0, device=platform.device())
        flat = torch.cat([empty, *(tensors.pop(move.key).view(-1) for move in sends)])
        received = flat
        if len(members) > 1:
            received = flat.new_empty(sum(move.size for move in receives))
            sizes = [[0] * len(members) for _ in range(2)]
            place = {member: number for number, member in enumerate(members)}
            for move in sends:
                sizes[0][place[move.receiver]] += move.size
            for move in receives:
                sizes[1][place[move.sender]] += move.size
            dist.all_to_all_single(received, flat, sizes[1], sizes[0], group=group)
        parts = received.split([move.size for move in receives])
        return {move.key: part for move, part in zip(receives, parts, strict=True)}

    @cached_property
    def _plan(self) -> list[Matrix]:
        groups = self.groups
        return matrices_of(
            self.shape, groups.layout, groups.coord.pp, self.places, self._cost, is_expert=self.is_expert
        )

    def _cost(self, shard: Shard) -> float:
        rows, cols = shard.global_shape
        periods, each = shard.projection_rows(rows)
        return rows * cols + sum(self.chosen.operations(periods * own, cols) for own in each.values())

    @cached_property
    def _to_owners(self) -> list[Move]:
        return list(self._moves(returned=False))

    @cached_property
    def _from_owners(self) -> list[Move]:
        return list(self._moves(returned=True))

    def _moves(self, *, returned: bool) -> Iterator[Move]:
        """Yield this rank's ranges that go to the owners of their matrices, or those that are returned."""
        for matrix in self._plan:
            for each in (each for _, ranges in (matrix.parts if returned else matrix.sent) for each in ranges):
                ends = (matrix.owner, each.rank) if returned else (each.rank, matrix.owner)
                if self.groups.rank in ends:
                    yield Move((matrix.name, each.rank), *ends, each.size)
