"""Plan of a refit: which rectangles of which weights each rank sends to which, from two layouts. No torch, no
communication.

Every rank computes the same plan. A piece that the destination rank already holds is a local copy. Every other byte of
the destination is received exactly once: from a rank of the same node if one holds it, else from the holder with the
least to send.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Literal, NamedTuple

from hpcrl.engine.refit.pieces import (
    EngineShards,
    ShardGroup,
    engine_shard_groups,
    hugging_face_shard_groups,
    megatron_shard_groups,
    peft_shard_groups,
)
from hpcrl.engine.refit.routes import Routes, Transfer
from hpcrl.model.params import Head, check_layout
from hpcrl.model.shape import Lora, ModelShape
from hpcrl.runtime.exits import InputError
from hpcrl.runtime.layout import Layout

Format = Literal["megatron", "hugging_face", "peft"]


class Move(NamedTuple):
    """A rows x cols rectangle, by its first row and column in both local tensors.

    `name` is the parameter's global name, which the source uses; `dst_name` is the destination's: the same in
    Megatron's format, the engine's own in another.
    """

    name: str
    src_rank: int
    dst_rank: int
    src_row: int
    src_col: int
    dst_row: int
    dst_col: int
    rows: int
    cols: int
    nbytes: int
    dst_name: str

    @property
    def is_local(self) -> bool:
        return self.src_rank == self.dst_rank


@dataclass(frozen=True)
class Plan:
    """The moves of all ranks or of one, in an order that senders and receivers share."""

    moves: tuple[Move, ...]

    def sends(self, rank: int) -> dict[int, list[Move]]:
        """Return destination rank -> moves."""
        return _grouped((m.dst_rank, m) for m in self.moves if m.src_rank == rank and not m.is_local)

    def receives(self, rank: int) -> dict[int, list[Move]]:
        """Return source rank -> moves."""
        return _grouped((m.src_rank, m) for m in self.moves if m.dst_rank == rank and not m.is_local)

    def copies(self, rank: int) -> list[Move]:
        return [m for m in self.moves if m.is_local and m.dst_rank == rank]

    def traffic(self, rank: int) -> RankTraffic:
        sent, received = (
            sum(move.nbytes for moves in by_peer.values() for move in moves)
            for by_peer in (self.sends(rank), self.receives(rank))
        )
        return RankTraffic(sent, received, sum(move.nbytes for move in self.copies(rank)))


class RankTraffic(NamedTuple):
    """Bytes that one rank sends, receives and copies in one refit."""

    sent: int
    received: int
    copied: int


class SharedSlice(NamedTuple):
    """A parameter whose local tensor is the same on both sides of a rank; bytes in the destination's dtype."""

    name: str
    dst_name: str
    nbytes: int


@dataclass(frozen=True)
class Resharding:
    """The input of a plan: a model, the layout of its weights, and the layout they go to.

    `itemsize` is the bytes of the destination's dtype. `nodes` is the node of each world rank (None: all ranks share
    one). `lora`: the adapters of the source; only the format "peft" takes them, and it takes nothing else.
    `engine_shards`: the layout of a rollout engine, in place of a format. Raises InputError if a layout does not fit
    the model.
    """

    shape: ModelShape
    source: Layout
    destination: Layout
    itemsize: int
    nodes: tuple[int, ...] | None = None
    head: Head = "lm"
    destination_format: Format = "megatron"
    lora: Lora | None = None
    engine_shards: EngineShards | None = None

    def __post_init__(self) -> None:
        check_layout(self.shape, self.source, "placement.actor")
        if self.engine_shards is not None:
            if self.head != "lm":
                raise InputError(f"the rollout engine has a language-model head, found head={self.head}")
            if self.destination.pp > 1:
                raise InputError(
                    f"the rollout engine has no pipeline, found placement.rollout.pp={self.destination.pp}; use 1"
                )
            self.engine_shards(self.shape, 0, self.destination.tp)
        elif self.destination_format == "megatron":
            check_layout(self.shape, self.destination, "placement.rollout")

    def plan(self) -> Plan:
        """Return the moves of all ranks."""
        ranks = self.destination.ranks
        return self._plan([*self._routes.transfers(), *(copy for rank in ranks for copy in self._routes.copies(rank))])

    def plan_for_rank(self, rank: int) -> Plan:
        """Return the moves that `rank` sends, receives or copies: its part of `plan()`, in the same order."""
        return self._plan([*self._routes.transfers_of(rank), *self._routes.copies(rank)])

    def traffic(self) -> dict[int, RankTraffic]:
        """Return what each rank of the two layouts sends, receives and copies, without making the moves. A rank
        receives what it must under any plan: what it needs less what it holds."""
        sent, routes = self._routes.sent(), self._routes
        ranks = sorted({*self.source.ranks, *self.destination.ranks})
        return {rank: RankTraffic(sent.get(rank, 0), routes.missing(rank), routes.held(rank)) for rank in ranks}

    def cross_node_bytes(self) -> int:
        """Return the bytes that leave a node, over all ranks: those without a copy on the destination's node."""
        return self._routes.cross_node_bytes()

    def shared(self, rank: int) -> tuple[SharedSlice, ...]:
        """Return the parameters of which `rank` has the same slice in the same order on both sides."""
        return self._shared.get(rank, ())

    @cached_property
    def source_groups(self) -> list[ShardGroup]:
        """The shards of the source's ranks."""
        return megatron_shard_groups(self.shape, self.source, self.head, self.lora)

    @cached_property
    def destination_groups(self) -> list[ShardGroup]:
        """The shards of the destination's ranks, in its format."""
        if self.engine_shards is not None:
            return engine_shard_groups(self.shape, self.destination, self.engine_shards)
        if self.destination_format == "hugging_face":
            return hugging_face_shard_groups(self.shape, self.destination, self.itemsize)
        if self.destination_format == "peft":
            assert self.lora is not None
            return peft_shard_groups(self.shape, self.destination, self.lora)
        return megatron_shard_groups(self.shape, self.destination, self.head)

    @cached_property
    def _shared(self) -> dict[int, tuple[SharedSlice, ...]]:
        source, destination = _places(self.source_groups), _places(self.destination_groups)
        shared_by = cache(self._shared_by)
        return {rank: shared_by(source[rank], destination[rank]) for rank in source.keys() & destination.keys()}

    def _shared_by(self, source: tuple[int, ...], destination: tuple[int, ...]) -> tuple[SharedSlice, ...]:
        """Return what ranks share that are in these groups."""
        sources = {shard.name: shard for number in source for shard in self.source_groups[number].shards}
        return tuple(
            SharedSlice(shard.name, shard.local_name, math.prod(shard.local_shape) * self.itemsize)
            for number in destination
            for shard in self.destination_groups[number].shards
            if (other := sources.get(shard.name))
            and (other.local_shape, other.boxes) == (shard.local_shape, shard.boxes)
        )

    @cached_property
    def _routes(self) -> Routes:
        return Routes(self.source_groups, self.destination_groups, self.nodes, self.itemsize)

    def _plan(self, transfers: list[Transfer]) -> Plan:
        transfers.sort(key=lambda t: (t.target.rank, t.target.group, t.piece.number, t.first))
        return Plan(tuple(map(self._move, transfers)))

    def _move(self, transfer: Transfer) -> Move:
        source, (row, col), target, piece, first, end = transfer
        return Move(
            piece.name,
            source,
            target.rank,
            row + first,
            col,
            piece.dst_row + first,
            piece.dst_col,
            end - first,
            piece.cols,
            (end - first) * piece.cols * self.itemsize,
            piece.dst_name,
        )


def _places(groups: list[ShardGroup]) -> dict[int, tuple[int, ...]]:
    """Return the numbers of each rank's groups."""
    places: dict[int, tuple[int, ...]] = defaultdict(tuple)
    for number, group in enumerate(groups):
        for rank in group.ranks:
            places[rank] += (number,)
    return dict(places)


def _grouped(pairs: Iterable[tuple[int, Move]]) -> dict[int, list[Move]]:
    grouped: dict[int, list[Move]] = defaultdict(list)
    for rank, move in pairs:
        grouped[rank].append(move)
    return dict(sorted(grouped.items()))
