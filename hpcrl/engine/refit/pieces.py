"""What each rank of a layout holds, and what the destination needs of it: rectangles and their holders."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import NamedTuple, TypeAlias

from hpcrl.model.blocks.block import Box
from hpcrl.model.hf_export import peft_shards, plan_files
from hpcrl.model.params import Head, Shard, shards
from hpcrl.model.shape import Lora, ModelShape
from hpcrl.runtime.layout import Layout

# (shape, rank, ranks) -> what one of the ranks of a replica of a rollout engine has. `name` and boxes of a shard are
# megatron's, `local_name` is the engine's.
EngineShards: TypeAlias = Callable[[ModelShape, int, int], list[Shard]]
Extent: TypeAlias = tuple[tuple[int, int], tuple[int, int]]  # rows and columns of a global tensor, (first, end)


class ShardGroup(NamedTuple):
    """Ranks with the same shards: all replicas of one place in a layout's dense or expert grid.

    `local_name` of a shard is its destination's name: in Megatron's format the global one.
    """

    ranks: tuple[int, ...]
    shards: list[Shard]


class Piece(NamedTuple):
    """A rectangle that a destination group needs, the `number`-th of it, and the source groups that hold it.

    All holders have the same values, at different places of their local tensors: `origins` has one (row, col) per
    holder.
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


def megatron_shard_groups(shape: ModelShape, layout: Layout, head: Head, lora: Lora | None = None) -> list[ShardGroup]:
    """Return the groups of the dense grid (tp fastest, then pp), then those of the expert grid (etp, ep, pp)."""
    dense, experts = layout.groups("cp", "dp"), layout.groups("edp") if shape.routed is not None else []
    return [
        *(_named_globally(r, shards(shape, layout, r[0], head=head, part="dense", lora=lora)) for r in dense),
        *(_named_globally(r, shards(shape, layout, r[0], part="experts", lora=lora)) for r in experts),
    ]


def engine_shard_groups(shape: ModelShape, layout: Layout, shards_of: EngineShards) -> list[ShardGroup]:
    """Return the groups of a rollout engine, which splits its weights by tensor parallelism."""
    return [ShardGroup(ranks, shards_of(shape, tp, layout.tp)) for tp, ranks in enumerate(layout.groups("cp", "dp"))]


def hugging_face_shard_groups(shape: ModelShape, layout: Layout, itemsize: int) -> list[ShardGroup]:
    """Return whole tensors, in the files that each rank of `layout` writes."""
    files = plan_files(shape, itemsize, layout.size)
    return [
        ShardGroup((rank,), [shard for file in files if file.writer == place for shard in file.shards])
        for place, rank in enumerate(layout.ranks)
    ]


def peft_shard_groups(shape: ModelShape, layout: Layout, lora: Lora) -> list[ShardGroup]:
    """Return all adapters, whole, on each rank."""
    return [ShardGroup(layout.ranks, peft_shards(shape, lora))]


def _named_globally(ranks: tuple[int, ...], shards: list[Shard]) -> ShardGroup:
    return ShardGroup(ranks, [shard._replace(local_name=shard.name) for shard in shards])


def cut(source: list[ShardGroup], destination: list[ShardGroup]) -> list[list[Piece]]:
    """Return each destination group's pieces, in the order of its shards. What no source group holds is in no piece."""
    held = _source_rectangles(source)
    return [list(_pieces(group, held)) for group in destination]


def _pieces(group: ShardGroup, held: dict[str, dict[Extent, list[tuple[int, Box]]]]) -> Iterator[Piece]:
    number = 0
    for shard in group.shards:
        for box in shard.boxes:
            for (rows, cols), holders in held.get(shard.name, {}).items():
                part = box.within(rows, cols)
                if part is None:
                    continue
                (top, bottom), (left, right), local_row, local_col = part
                down, along = top - rows[0], left - cols[0]
                yield Piece(
                    number,
                    shard.name,
                    shard.local_name,
                    tuple(holder for holder, _ in holders),
                    tuple((source.local_row + down, source.local_col + along) for _, source in holders),
                    local_row,
                    local_col,
                    bottom - top,
                    right - left,
                )
                number += 1


def _source_rectangles(source: list[ShardGroup]) -> dict[str, dict[Extent, list[tuple[int, Box]]]]:
    """Return every rectangle of the source by parameter and extent, with the groups that have it and their boxes."""
    found: dict[str, dict[Extent, list[tuple[int, Box]]]] = defaultdict(dict)
    for number, group in enumerate(source):
        for shard in group.shards:
            for box in shard.boxes:
                found[shard.name].setdefault((box.global_rows, box.global_cols), []).append((number, box))
    return found
