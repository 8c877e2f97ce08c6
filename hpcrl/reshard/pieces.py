"""What each place of the destination needs, cut where the source is cut: rectangles, and who holds them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

from hpcrl.grid.layout import Layout
from hpcrl.model.hf.files import plan_files
from hpcrl.model.hf.peft import peft_shards
from hpcrl.model.lora import Lora
from hpcrl.model.params import Box, Head, Shard, rank_shards
from hpcrl.model.shape import ModelShape
from hpcrl.reshard.tensorrt_llm_layout import tensorrt_llm_shards


class Cell(NamedTuple):
    """Ranks that hold the same shards: all replicas of one place in a layout's dense or expert grid.

    `dst_names` are the names by which the ranks' modules know the shards.
    """

    ranks: tuple[int, ...]
    shards: list[Shard]
    dst_names: list[str]


class Piece(NamedTuple):
    """A rectangle that a destination cell needs, the `number`-th of it, and the source cells that hold it.

    All holders have the same values, but where they lie in the local tensor depends on the cell: `origins` has one
    (row, col) per holder.
    """

    number: int
    name: str
    dst_name: str
    holders: tuple[int, ...]
    origins: tuple[tuple[int, int], ...]
    dst_row: int
    dst_col: int
    rows: int
    cols: int


class _Held(NamedTuple):
    """A rectangle of a global tensor, (first, end) of rows and columns, and where it starts at each holder."""

    rows: tuple[int, int]
    cols: tuple[int, int]
    holders: tuple[int, ...]
    origins: tuple[tuple[int, int], ...]


def megatron_cells(shape: ModelShape, layout: Layout, head: Head, lora: Lora | None = None) -> list[Cell]:
    """The cells of the dense grid (tp fastest, then pp), then those of the expert grid (etp, ep, pp)."""
    dense, experts = layout.groups("cp", "dp"), layout.groups("edp") if shape.num_experts else []
    return [
        *(_named_globally(r, rank_shards(shape, layout, r[0], head=head, part="dense", lora=lora)) for r in dense),
        *(_named_globally(r, rank_shards(shape, layout, r[0], part="experts", lora=lora)) for r in experts),
    ]


def tensorrt_llm_cells(shape: ModelShape, layout: Layout) -> list[Cell]:
    cells = []
    for tp, ranks in enumerate(layout.groups("cp", "dp")):
        its = tensorrt_llm_shards(shape, tp_rank=tp, tp_size=layout.tp)
        cells.append(Cell(ranks, its, [shard.local_name for shard in its]))
    return cells


def hugging_face_cells(shape: ModelShape, layout: Layout, itemsize: int) -> list[Cell]:
    """Whole tensors, in the files that each rank of `layout` writes."""
    cells = []
    files = plan_files(shape, itemsize, layout.size)
    for place, rank in enumerate(layout.ranks):
        its = [shard for file in files if file.writer == place for shard in file.shards]
        cells.append(Cell((rank,), its, [shard.local_name for shard in its]))
    return cells


def peft_cells(shape: ModelShape, layout: Layout, lora: Lora) -> list[Cell]:
    """All adapters, whole, on each rank."""
    its = peft_shards(shape, lora)
    return [Cell(layout.ranks, its, [shard.local_name for shard in its])]


def _named_globally(ranks: tuple[int, ...], its: list[Shard]) -> Cell:
    return Cell(ranks, its, [shard.name for shard in its])


def cut(source: list[Cell], destination: list[Cell]) -> list[list[Piece]]:
    """Per destination cell its pieces, in the order of its shards. What no source cell holds is in no piece."""
    held = _held(source)
    return [list(_pieces(cell, held)) for cell in destination]


def _pieces(cell: Cell, held: dict[str, list[_Held]]) -> Iterator[Piece]:
    number = 0
    for shard, dst_name in zip(cell.shards, cell.dst_names, strict=True):
        for wanted in shard.boxes:
            for have in held.get(shard.name, ()):
                top, bottom = _overlap(wanted.global_rows, have.rows)
                left, right = _overlap(wanted.global_cols, have.cols)
                if top >= bottom or left >= right:
                    continue
                down, along = top - have.rows[0], left - have.cols[0]
                yield Piece(
                    number,
                    shard.name,
                    dst_name,
                    have.holders,
                    tuple((row + down, col + along) for row, col in have.origins),
                    wanted.local_row + top - wanted.global_rows[0],
                    wanted.local_col + left - wanted.global_cols[0],
                    bottom - top,
                    right - left,
                )
                number += 1


def _held(source: list[Cell]) -> dict[str, list[_Held]]:
    """Every rectangle that a source cell has, by parameter; cells with the same one are its holders."""
    found: dict[str, dict[tuple[tuple[int, int], tuple[int, int]], list[tuple[int, Box]]]] = defaultdict(dict)
    for number, cell in enumerate(source):
        for shard in cell.shards:
            for box in shard.boxes:
                found[shard.name].setdefault((box.global_rows, box.global_cols), []).append((number, box))
    return {
        name: [
            _Held(
                rows,
                cols,
                tuple(number for number, _ in boxes),
                tuple((box.local_row, box.local_col) for _, box in boxes),
            )
            for (rows, cols), boxes in extents.items()
        ]
        for name, extents in found.items()
    }


def _overlap(one: tuple[int, int], other: tuple[int, int]) -> tuple[int, int]:
    return max(one[0], other[0]), min(one[1], other[1])
