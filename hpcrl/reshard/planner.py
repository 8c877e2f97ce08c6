"""Which rectangles of which weights go from which rank to which, from two layouts alone: no torch, no communication.

Every rank computes the same plan for itself. A piece that the destination rank already holds is a local copy; every
other byte of the destination is received exactly once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from hpcrl.grid.layout import Layout
from hpcrl.model.params import Box, Head, Shard, shards
from hpcrl.model.shape import ModelShape

Cell = tuple[int, int]  # (tp, pp): what a rank holds depends on nothing else


class Move(NamedTuple):
    """A rows x cols rectangle of parameter `name`, by its first row and column in both local tensors."""

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

    @property
    def is_local(self) -> bool:
        return self.src_rank == self.dst_rank


class Piece(NamedTuple):
    """A rectangle that a destination cell needs and `holders` have. All ranks of those cells hold the same values, but
    where it lies in the local tensor depends on the cell: `origins` has one (row, col) per holder."""

    name: str
    holders: tuple[Cell, ...]
    origins: tuple[tuple[int, int], ...]
    dst_row: int
    dst_col: int
    rows: int
    cols: int


@dataclass(frozen=True)
class Plan:
    """The moves of some ranks (all, or one) in an order that senders and receivers share."""

    moves: tuple[Move, ...]
    itemsize: int

    def sends(self, rank: int) -> dict[int, list[Move]]:
        """Destination rank -> moves."""
        return _grouped((m.dst_rank, m) for m in self.moves if m.src_rank == rank and not m.is_local)

    def receives(self, rank: int) -> dict[int, list[Move]]:
        """Source rank -> moves."""
        return _grouped((m.src_rank, m) for m in self.moves if m.dst_rank == rank and not m.is_local)

    def copies(self, rank: int) -> list[Move]:
        return [m for m in self.moves if m.is_local and m.dst_rank == rank]

    @cached_property
    def bytes_sent(self) -> dict[int, int]:
        """By rank; ranks without any are absent."""
        return _totals((m.src_rank, m.nbytes) for m in self.moves if not m.is_local)

    @cached_property
    def bytes_received(self) -> dict[int, int]:
        return _totals((m.dst_rank, m.nbytes) for m in self.moves if not m.is_local)

    @cached_property
    def bytes_copied(self) -> dict[int, int]:
        return _totals((m.dst_rank, m.nbytes) for m in self.moves if m.is_local)


@dataclass(frozen=True)
class Resharding:
    """The question that a plan answers: a model, where its weights are, where they are to go.

    `itemsize` is in bytes, of the destination's dtype. Ranks r and s share a node when r // ranks_per_node is equal;
    None: all ranks share one.
    """

    shape: ModelShape
    source: Layout
    destination: Layout
    itemsize: int
    ranks_per_node: int | None = None
    head: Head = "lm"

    def __post_init__(self) -> None:
        for side, layout in (("source", self.source), ("destination", self.destination)):
            if layout.vpp != 1:
                raise ValueError(f"the {side} layout has vpp={layout.vpp}; resharding knows vpp=1 only")

    def plan(self) -> Plan:
        """All moves of all ranks."""
        return Plan(tuple(self._moves()), self.itemsize)

    def plan_for_rank(self, rank: int) -> Plan:
        """The moves that `rank` sends, receives or copies: that part of `plan()`, in the same order."""
        return Plan(tuple(self._moves(only=rank)), self.itemsize)

    def lower_bound(self, rank: int) -> int:
        """Bytes that `rank` must receive whatever the plan: what it needs less what it holds."""
        if rank not in self.destination:
            return 0
        mine = self._cell(self.source, rank) if rank in self.source else None
        missing = (p for p in self._pieces[self._cell(self.destination, rank)] if mine not in p.holders)
        return sum(piece.rows * piece.cols * self.itemsize for piece in missing)

    def _moves(self, only: int | None = None) -> Iterator[Move]:
        """Ranks with a holder on their node choose first, so that the others see what those have loaded."""
        load: dict[int, int] = defaultdict(int)
        for near in (True, False):
            for dst_rank in self.destination.ranks:
                for piece in self._pieces[self._cell(self.destination, dst_rank)]:
                    candidates, is_near = self._candidates(piece.holders, dst_rank)
                    if is_near != near:
                        continue
                    nbytes = piece.rows * piece.cols * self.itemsize
                    src_rank = candidates[0] if len(candidates) == 1 else min(candidates, key=lambda r: (load[r], r))
                    if src_rank != dst_rank:
                        load[src_rank] += nbytes
                    if only is not None and only not in (src_rank, dst_rank):
                        continue
                    src_row, src_col = piece.origins[piece.holders.index(self._cell(self.source, src_rank))]
                    yield Move(
                        piece.name,
                        src_rank,
                        dst_rank,
                        src_row,
                        src_col,
                        piece.dst_row,
                        piece.dst_col,
                        piece.rows,
                        piece.cols,
                        nbytes,
                    )

    def _candidates(self, holders: tuple[Cell, ...], dst_rank: int) -> tuple[tuple[int, ...], bool]:
        """Ranks that may send to `dst_rank`, and whether they share its node: itself, or its node's, or all."""
        key = (holders, dst_rank)
        if key not in self._chosen:
            ranks = self._ranks(holders)
            near = tuple(rank for rank in ranks if self._node(rank) == self._node(dst_rank))
            self._chosen[key] = ((dst_rank,), True) if dst_rank in near else (near or ranks, bool(near))
        return self._chosen[key]

    @cached_property
    def _chosen(self) -> dict[tuple[tuple[Cell, ...], int], tuple[tuple[int, ...], bool]]:
        return {}

    def _ranks(self, cells: Iterable[Cell]) -> tuple[int, ...]:
        """All replicas' ranks of the given source cells."""
        layout = self.source
        return tuple(
            layout.rank_of(tp=tp, pp=pp, cp=cp, dp=dp)
            for tp, pp in cells
            for dp in range(layout.dp)
            for cp in range(layout.cp)
        )

    def _node(self, rank: int) -> int:
        return 0 if self.ranks_per_node is None else rank // self.ranks_per_node

    @staticmethod
    def _cell(layout: Layout, rank: int) -> Cell:
        coord = layout.coord(rank)
        return coord.tp, coord.pp

    def _table(self, layout: Layout) -> dict[Cell, list[Shard]]:
        return {
            (tp, pp): shards(self.shape, tp_rank=tp, tp_size=layout.tp, pp_rank=pp, pp_size=layout.pp, head=self.head)
            for pp in range(layout.pp)
            for tp in range(layout.tp)
        }

    @cached_property
    def _pieces(self) -> dict[Cell, list[Piece]]:
        """What each destination cell needs, cut at the source's boundaries, in the order of the model."""
        held: dict[str, dict[Box, list[tuple[Cell, Box]]]] = defaultdict(lambda: defaultdict(list))
        for cell, table in self._table(self.source).items():
            for shard in table:
                for box in shard.boxes:
                    extent = Box(box.global_rows, box.global_cols, 0, 0)
                    held[shard.name][extent].append((cell, box))
        return {
            cell: [
                piece
                for shard in table
                for wanted in shard.boxes
                for holders in held[shard.name].values()
                for piece in _intersection(shard.name, wanted, holders)
            ]
            for cell, table in self._table(self.destination).items()
        }


def _intersection(name: str, wanted: Box, holders: list[tuple[Cell, Box]]) -> Iterator[Piece]:
    """The part of `wanted` that `holders`, who all hold the same rectangle, have: one piece or none."""
    held = holders[0][1]
    top, bottom = _overlap(wanted.global_rows, held.global_rows)
    left, right = _overlap(wanted.global_cols, held.global_cols)
    if top >= bottom or left >= right:
        return
    yield Piece(
        name,
        tuple(cell for cell, _ in holders),
        tuple(
            (box.local_row + top - box.global_rows[0], box.local_col + left - box.global_cols[0]) for _, box in holders
        ),
        wanted.local_row + top - wanted.global_rows[0],
        wanted.local_col + left - wanted.global_cols[0],
        bottom - top,
        right - left,
    )


def _overlap(one: tuple[int, int], other: tuple[int, int]) -> tuple[int, int]:
    return max(one[0], other[0]), min(one[1], other[1])


def _grouped(pairs: Iterable[tuple[int, Move]]) -> dict[int, list[Move]]:
    grouped: dict[int, list[Move]] = defaultdict(list)
    for rank, move in pairs:
        grouped[rank].append(move)
    return dict(sorted(grouped.items()))


def _totals(pairs: Iterable[tuple[int, int]]) -> dict[int, int]:
    totals: dict[int, int] = defaultdict(int)
    for rank, nbytes in pairs:
        totals[rank] += nbytes
    return dict(totals)
