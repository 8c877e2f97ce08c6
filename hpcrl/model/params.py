"""The parameters of a model, and the rectangle of each one that a rank holds. No torch, no ranks, only numbers.

Names and shapes are those of megatron-core's GPTModel with the local layer spec, written with *global* layer numbers.
Building, checkpoints and refit all read this table.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from hpcrl.model.blocks.block import Layer, Projection, Size, Weight, unsupported
from hpcrl.model.blocks.norms import norm_weight
from hpcrl.model.shape import ATTENTION_PROJECTIONS, Lora, ModelShape, is_adapter
from hpcrl.model.vision import tower_tensors
from hpcrl.runtime.exits import InputError
from hpcrl.runtime.layout import Layout

Head = Literal["lm", "value", "reward"]
ONE_RANK = Layout((0,))

EMBEDDING = "embedding.word_embeddings.weight"
OUTPUT_LAYER = "output_layer.weight"
TOWER = "vision."  # prefix of the vision tower's parameters
# Different names, because a critic's head must not be loaded as a reward model's.
SCALAR_HEADS: dict[Head, str] = {"value": "value_head.weight", "reward": "reward_head.weight"}


class Box(NamedTuple):
    """A rectangle of a global 2-D tensor (a 1-D tensor counts as (n, 1)) and where it starts in the local tensor."""

    global_rows: tuple[int, int]
    global_cols: tuple[int, int]
    local_row: int
    local_col: int


class Shard(NamedTuple):
    """One rank's part of one parameter; the boxes tile the local tensor.

    `name` is global (layers and experts counted over the whole model), `local_name` is that of the module in pipeline
    chunk `chunk`. An expert's `tp_replicated` refers to expert tensor parallelism.
    """

    name: str
    local_name: str
    global_shape: Size
    local_shape: Size
    boxes: tuple[Box, ...]
    tp_replicated: bool
    chunk: int = 0
    is_expert: bool = False
    is_frozen: bool = False  # has no gradient and no optimizer
    projections: tuple[Projection, ...] = ()  # this and `initial`: see `hpcrl.model.blocks.block.Weight`
    initial: float | None = None

    def projection_rows(self, rows: int) -> tuple[int, dict[str, int]]:
        """Return how `rows` rows of the tensor, a rank's or all, hold its projections: the number of periods, and the
        rows of each projection in a period. A tensor without projections is one."""
        if not self.projections:
            return 1, {"": rows}
        period = sum(projection.rows for projection in self.projections)
        whole = self.global_shape[0] // period
        if whole > 1:  # the ranks divide the periods
            return rows // period, {it.name: it.rows for it in self.projections}
        return 1, {it.name: it.rows * rows // period for it in self.projections}

    @property
    def is_matrix(self) -> bool:
        """Whether it is a matrix of a layer: a projection, of an expert too, or a router."""
        return len(self.global_shape) == 2 and self.name.startswith("decoder.layers.") and not is_adapter(self.name)


def engine_layout(shape: ModelShape, tp: int) -> Layout:
    """The layout of a generation engine's weights: split by tensor parallelism only, each expert too."""
    return Layout(tuple(range(tp)), tp=tp, etp=tp if shape.num_experts else 1)


def role_layout(shape: ModelShape, role: str, **grid: Any) -> Layout:
    """Return the layout of a role's ranks. Raises InputError if it does not fit the role's model. In rollout, expert
    tensor parallelism equals tensor parallelism."""
    if role == "rollout" and shape.num_experts:
        grid["etp"] = grid["tp"]
    layout = Layout(**grid)
    check_layout(shape, layout, f"placement.{role}")
    for stage in range(layout.pp if shape.num_experts else 0):
        chunks = [chunk_layers(shape.num_layers, stage, layout.pp, chunk, layout.vpp) for chunk in range(layout.vpp)]
        if not any(shape.layers[layer].num_experts for layers in chunks for layer in layers):
            raise InputError(
                f"placement.{role}.pp={layout.pp} makes a pipeline stage with dense layers only, whose optimizer would "
                "differ from those of stages with experts; use a smaller pp"
            )
    return layout


def check_layout(shape: ModelShape, layout: Layout, role: str = "model") -> None:
    """Raise InputError if a size does not fit the model; the message names `role`."""
    tp_size, pp_size, vpp_size = layout.tp, layout.pp, layout.vpp
    divided = {what: size for block in shape.kinds for what, size in block.divided().items()}
    divided["padded_vocab_size"] = shape.padded_vocab_size
    for what, size in divided.items():
        if size % tp_size:
            fitting = [n for n in range(1, tp_size) if not any(other % n for other in divided.values())]
            raise InputError(f"{role}.tp={tp_size} does not divide {what}={size}; use one of {fitting}")
    if pp_size > shape.num_layers:
        raise InputError(
            f"{role}.pp={pp_size} is more than num_layers={shape.num_layers}; use at most {shape.num_layers}"
        )
    if vpp_size > 1 and pp_size == 1:
        raise InputError(
            f"{role}.vpp={vpp_size} splits pipeline stages into chunks, but {role}.pp=1 has none; use vpp=1"
        )
    if vpp_size * pp_size > shape.num_layers:
        raise InputError(
            f"{role}.vpp*pp={vpp_size}*{pp_size} is more than num_layers={shape.num_layers}; "
            f"use a vpp of at most {shape.num_layers // pp_size}"
        )
    if shape.vision is not None:
        first, needed = len(chunk_layers(shape.num_layers, 0, pp_size, 0, vpp_size)), shape.vision.num_deepstack
        if first < needed:
            raise InputError(
                f"{role}.pp*vpp={pp_size * vpp_size} puts {first} layers into the first chunk, and pictures are added "
                f"after the first {needed} layers; use a smaller pp or vpp"
            )
    _check_experts(shape, layout.ep, layout.etp, role)


def check_adapters(shape: ModelShape, layout: Layout, lora: Lora) -> None:
    """Raise InputError for blocks without adapters, for experts whose adapters PEFT cannot express, and if only some
    pipeline stages have adapters outside of experts, because the stages' optimizers would differ."""
    if block := unsupported(shape.layers, "adapters"):
        raise InputError(f"model.lora_rank={lora.rank} with {block} is not supported; use 0")
    if shape.has_stacked_experts and (of_experts := set(lora.targets) - set(ATTENTION_PROJECTIONS)):
        raise InputError(
            f"model.target_modules={','.join(sorted(of_experts))}: adapters of experts that the files have in one "
            f"tensor are not supported; use only {', '.join(ATTENTION_PROJECTIONS)}"
        )
    kinds = set()
    for stage in range(layout.pp):
        found = shards(shape, layout, layout.rank_of(pp=stage), lora=lora)
        kinds.add(frozenset(shard.is_expert for shard in found if is_adapter(shard.name)))
    if len(kinds) > 1:
        raise InputError(
            f"model.target_modules={','.join(lora.targets)} with placement.actor.pp={layout.pp} makes some pipeline "
            "stages with adapters of experts only; add a projection of attention, or use pp=1"
        )


def _check_experts(shape: ModelShape, ep_size: int, etp_size: int, role: str) -> None:
    if not shape.num_experts:
        if max(ep_size, etp_size) > 1:
            raise InputError(
                f"{role}.ep={ep_size} and {role}.etp={etp_size} split experts, but the model has none; use 1"
            )
        return
    for key, size, what, whole in (
        ("ep", ep_size, "num_experts", shape.num_experts),
        ("etp", etp_size, "moe_ffn_hidden_size", shape.moe_ffn_hidden_size),
    ):
        if whole % size:
            fitting = [n for n in range(1, size) if whole % n == 0]
            raise InputError(f"{role}.{key}={size} does not divide {what}={whole}; use one of {fitting}")


def stage_layers(num_layers: int, pp_rank: int, pp_size: int) -> range:
    """Return the global numbers of a pipeline stage's layers; the first stages hold the remainder."""
    each, more = divmod(num_layers, pp_size)
    start = pp_rank * each + min(pp_rank, more)
    return range(start, start + each + (pp_rank < more))


def chunk_layers(num_layers: int, pp_rank: int, pp_size: int, chunk: int, vpp_size: int) -> range:
    """Return the global numbers of the layers of one chunk of a stage.

    Megatron's interleaved schedule assigns chunks to stages in turn: chunk c of stage p is the (c * pp_size + p)-th
    piece of the model.
    """
    return stage_layers(num_layers, chunk * pp_size + pp_rank, vpp_size * pp_size)


def shards(
    shape: ModelShape,
    layout: Layout = ONE_RANK,
    rank: int = 0,
    *,
    head: Head = "lm",
    part: Literal["all", "dense", "experts"] = "all",
    lora: Lora | None = None,
) -> list[Shard]:
    """Return the parameters of world rank `rank`, chunk by chunk, in the order of the model; adapters follow their
    matrix. By default the whole model.

    Tied embeddings are also held by the last chunk of the last stage. `part`: only what the dense grid (tp, pp) splits,
    or only the experts, which the expert grid (etp, ep, pp) splits.
    """
    check_layout(shape, layout)
    coord, expert = layout.coord(rank), layout.expert_coord(rank)
    return [
        shard
        for chunk in range(layout.vpp)
        for shard in _Chunk(
            shape,
            first=(coord.pp, chunk) == (0, 0),
            last=(coord.pp, chunk) == (layout.pp - 1, layout.vpp - 1),
            layers=chunk_layers(shape.num_layers, coord.pp, layout.pp, chunk, layout.vpp),
            dense=_Split(coord.tp, layout.tp, chunk),
            experts=_Split(expert.etp, layout.etp, chunk, is_expert=True),
            ep_rank=expert.ep,
            ep_size=layout.ep,
            head=head,
            lora=lora,
        ).shards(part)
    ]


@dataclass(frozen=True)
class _Split:
    """How tensor parallelism, dense or of experts, splits a parameter: the part of one of its ranks."""

    rank: int
    size: int
    chunk: int
    is_expert: bool = False

    def whole(self, name: str, shape: Size, local_name: str | None = None) -> Shard:
        box = Box((0, shape[0]), (0, math.prod(shape[1:])), 0, 0)
        return self._shard(name, local_name, shape, shape, box, replicated=True)

    def rows(self, name: str, shape: Size, local_name: str | None = None) -> Shard:
        rows, *cols = shape[0] // self.size, *shape[1:]
        box = Box((self.rank * rows, (self.rank + 1) * rows), (0, cols[0] if cols else 1), 0, 0)
        return self._shard(name, local_name, shape, (rows, *cols), box)

    def cols(self, name: str, shape: Size, local_name: str | None = None) -> Shard:
        rows, cols = shape[0], shape[1] // self.size
        box = Box((0, rows), (self.rank * cols, (self.rank + 1) * cols), 0, 0)
        return self._shard(name, local_name, shape, (rows, cols), box)

    def gated(self, name: str, shape: Size, local_name: str | None = None) -> Shard:
        """Globally [gate; up], locally [gate shard; up shard]."""
        ffn, cols = shape[0] // 2, shape[1]
        rows = ffn // self.size
        start = self.rank * rows
        gate = Box((start, start + rows), (0, cols), 0, 0)
        up = Box((ffn + start, ffn + start + rows), (0, cols), rows, 0)
        return self._shard(name, local_name, shape, (2 * rows, cols), gate, up)

    def _shard(
        self, name: str, local_name: str | None, shape: Size, local_shape: Size, *boxes: Box, replicated: bool = False
    ) -> Shard:
        return Shard(name, local_name or name, shape, local_shape, boxes, replicated, self.chunk, self.is_expert)


@dataclass(frozen=True)
class _Chunk:
    """Consecutive layers on one rank, with the embedding before the model's first layer and the head after its last."""

    shape: ModelShape
    layers: range
    first: bool
    last: bool
    dense: _Split
    experts: _Split
    ep_rank: int
    ep_size: int
    head: Head
    lora: Lora | None

    def shards(self, part: str) -> Iterator[Shard]:
        has_dense = part != "experts"
        if self.first and has_dense:
            yield self.dense.rows(EMBEDDING, self._vocabulary)
        for local, layer in enumerate(self.layers):
            prefixes = f"decoder.layers.{layer}.", f"decoder.layers.{local}."
            of_layer = self.shape.layers[layer]
            if has_dense:
                yield from self._layer(of_layer, *prefixes)
            if part != "dense":
                yield from self._experts(of_layer, *prefixes)
        if self.last and has_dense:
            yield from self._head()
        if self.first and has_dense:
            yield from self._tower()

    @property
    def _vocabulary(self) -> tuple[int, int]:
        return self.shape.padded_vocab_size, self.shape.hidden_size

    def _tower(self) -> Iterator[Shard]:
        """The vision tower, whole on every rank; its ranks divide the pictures."""
        vision = self.shape.vision
        if vision is None:
            return
        for name, size in tower_tensors(vision).items():
            yield self.dense.whole(f"{TOWER}{name}", size)._replace(is_frozen=not vision.is_trained(name))

    def _layer(self, layer: Layer, prefix: str, local: str) -> Iterator[Shard]:
        """All parameters of a layer except its experts."""
        for weight in layer.weights:
            yield from self._of_weight(self.dense, weight, prefix, local)

    def _experts(self, layer: Layer, prefix: str, local: str) -> Iterator[Shard]:
        each = layer.num_experts // self.ep_size
        for number in range(each):
            names = [f"mlp.experts.local_experts.{n}." for n in (self.ep_rank * each + number, number)]
            for weight in layer.expert_weights:
                yield from self._of_weight(self.experts, weight, f"{prefix}{names[0]}", f"{local}{names[1]}")

    def _of_weight(self, split: _Split, weight: Weight, prefix: str, local: str) -> Iterator[Shard]:
        """Yield a weight, then A (r, in) and B (out, r) of the adapters of its projections, split as it is."""
        shard: Shard = getattr(split, weight.cut)(f"{prefix}{weight.name}", weight.size, f"{local}{weight.name}")
        yield shard._replace(is_frozen=weight.is_frozen, projections=weight.projections, initial=weight.initial)
        if self.lora is None or len(weight.size) != 2:
            return
        rank, by_columns = self.lora.rank, weight.cut == "cols"
        parent = weight.name.removesuffix("weight").rpartition("linear_")[0]
        for projection in weight.projections:
            if projection.name in self.lora.targets:
                for cut, factor, size in (
                    (split.cols if by_columns else split.whole, "lora_A", (rank, weight.size[1])),
                    (split.whole if by_columns else split.rows, "lora_B", (weight.periods * projection.rows, rank)),
                ):
                    name = f"{parent}{projection.name}.{factor}"
                    yield cut(f"{prefix}{name}", size, f"{local}{name}")

    def _head(self) -> Iterator[Shard]:
        shape = self.shape
        norm = norm_weight("final_layernorm", shape.hidden_size, shape.layers[-1].norms.zero_centered)
        yield from self._of_weight(self.dense, norm, "decoder.", "decoder.")
        if self.head in SCALAR_HEADS:
            yield self.dense.whole(SCALAR_HEADS[self.head], (1, shape.hidden_size), OUTPUT_LAYER)
        elif not shape.tie_word_embeddings:
            yield self.dense.rows(OUTPUT_LAYER, self._vocabulary)
        elif not self.first:
            yield self.dense.rows(EMBEDDING, self._vocabulary, OUTPUT_LAYER)
