"""The parameters of a model, and the rectangle of each one that a rank holds. No torch, no ranks, only numbers.

Names and shapes are those of megatron-core's GPTModel with the local layer spec, written with *global* layer numbers.
Building, checkpoints and refit all read this table.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from hpcrl.model.blocks.block import Box, Layer, Projection, Size, Weight, unsupported
from hpcrl.model.blocks.norms import norm_weight
from hpcrl.model.shape import ATTENTION_PROJECTIONS, Lora, ModelShape, is_adapter
from hpcrl.model.vision import tower_tensors
from hpcrl.runtime.exits import InputError
from hpcrl.runtime.layout import Coord, ExpertCoord, Layout

Head = Literal["lm", "value", "reward"]
ONE_RANK = Layout((0,))

EMBEDDING = "embedding.word_embeddings.weight"
OUTPUT_LAYER = "output_layer.weight"
TOWER = "vision."  # prefix of the vision tower's parameters
# Different names, because a critic's head must not be loaded as a reward model's.
SCALAR_HEADS: dict[Head, str] = {"value": "value_head.weight", "reward": "reward_head.weight"}

# With fp8, products of weights of which a rank has fewer elements stay in the model's dtype. Measured on one H200 at
# width 1,536, in TFLOP/s in fp8 and in bf16: qkv (3.1 M elements) 137 and 629, proj (2.4 M) 179 and 483, fc1 (27.5 M)
# 1,021 and 763, fc2 (13.8 M) 753 and 661. Nothing between 3.1 M and 13.8 M was measured.
FP8_ELEMENTS = 2**23


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

    @property
    def is_large(self) -> bool:
        """Whether its products gain by 8-bit numbers. Models with experts have none."""
        return self.is_matrix and math.prod(self.local_shape) >= FP8_ELEMENTS


# Matrices of attention, of feed-forward layers and of experts.
_MLP = r"mlp\.(shared_experts\.|experts\.local_experts\.\d+\.)?linear_fc[12]"
_QUANTIZED = re.compile(rf"decoder\.layers\.\d+\.(self_attention\.linear_(qkv|proj)|{_MLP})\.weight")


def quantized_names(shape: ModelShape, quantization: str | None) -> frozenset[str]:
    """Return the weights that an engine has in 8 bits.

    Args:
        quantization: `rollout.quantization`.
    """
    if quantization is None:
        return frozenset()
    return frozenset(shard.name for shard in shards(shape, engine_layout(shape, 1)) if _QUANTIZED.fullmatch(shard.name))


def engine_layout(shape: ModelShape, tp: int) -> Layout:
    """The layout of a generation engine's weights: split by tensor parallelism only, each expert too."""
    return Layout(tuple(range(tp)), tp=tp, etp=tp if shape.routed is not None else 1)


def role_layout(shape: ModelShape, role: str, **grid: Any) -> Layout:
    """Return the layout of a role's ranks. Raises InputError if it does not fit the role's model. In rollout, expert
    tensor parallelism equals tensor parallelism."""
    if role == "rollout" and shape.routed is not None:
        grid["etp"] = grid["tp"]
    layout = Layout(**grid)
    check_layout(shape, layout, f"placement.{role}")
    for stage in range(layout.pp if shape.routed is not None else 0):
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
    if layout.cp > 1 and (block := unsupported(shape.layers, "context_parallel")):
        raise InputError(f"{role}.cp={layout.cp}: {block} has no context parallelism; use cp=1")
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
            f"model.target_modules={','.join(sorted(of_experts))}: adapters of experts that are in one tensor of "
            f"`transformers` are not supported; use only {', '.join(ATTENTION_PROJECTIONS)}"
        )
    kinds = set()
    for stage in range(layout.pp):
        of_stage = shards(shape, layout, layout.rank_of(pp=stage), lora=lora)
        kinds.add(frozenset(shard.is_expert for shard in of_stage if is_adapter(shard.name)))
    if len(kinds) > 1:
        raise InputError(
            f"model.target_modules={','.join(lora.targets)} with placement.actor.pp={layout.pp} makes some pipeline "
            "stages with adapters of experts only; add a projection of attention, or use pp=1"
        )


def check_fp8(shape: ModelShape, fp8: str | None) -> None:
    """Raise InputError for blocks without 8-bit products.

    Args:
        fp8: `model.transformer_engine.fp8`.
    """
    if fp8 is not None and (block := unsupported(shape.layers, "fp8")):
        raise InputError(f"model.transformer_engine.fp8={fp8} with {block} is not supported; set fp8 to null")


def has_fp8_products(shape: ModelShape, fp8: str | None, tp: int) -> bool:
    """Whether a weight is large enough for 8-bit products.

    Args:
        fp8: `model.transformer_engine.fp8`.
    """
    return fp8 is not None and any(shard.is_large for shard in shards(shape, engine_layout(shape, tp)))


def _check_experts(shape: ModelShape, ep_size: int, etp_size: int, role: str) -> None:
    if shape.routed is None:
        if max(ep_size, etp_size) > 1:
            raise InputError(
                f"{role}.ep={ep_size} and {role}.etp={etp_size} split experts, but the model has none; use 1"
            )
        return
    mixture = shape.layers[shape.routed.layers[0]].mlp
    for key, size, what, whole in (
        ("ep", ep_size, "num_experts", mixture.count_of_experts),
        ("etp", etp_size, "moe_ffn_hidden_size", mixture.inner_width // max(mixture.choices, 1)),
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

    Tied embeddings are also held by the last chunk of the last stage.

    Args:
        part: only what the dense grid (tp, pp) splits, or only the experts, which the expert grid (etp, ep, pp) splits.
    """
    check_layout(shape, layout)
    coords = layout.coord(rank), layout.expert_coord(rank)
    chunks = [_Chunk(shape, layout, *coords, number, head, lora) for number in range(layout.vpp)]
    return [shard for chunk in chunks for shard in chunk.shards(part)]


def shard_of(
    weight: Weight, rank: int, ranks: int, name: str, local_name: str, chunk: int = 0, is_expert: bool = False
) -> Shard:
    """Return the part of a weight that one of `ranks` ranks has."""
    size, boxes, is_whole = weight.local_size(ranks), weight.boxes(rank, ranks), weight.cut == "whole"
    flags = is_whole, chunk, is_expert, weight.is_frozen
    return Shard(name, local_name, weight.size, size, boxes, *flags, weight.projections, weight.initial)


@dataclass(frozen=True)
class _Chunk:
    """Consecutive layers on one rank, with the embedding before the model's first layer and the head after its last."""

    shape: ModelShape
    layout: Layout
    coord: Coord
    expert: ExpertCoord
    number: int
    head: Head
    lora: Lora | None

    def shards(self, part: str) -> Iterator[Shard]:
        layout, has_dense = self.layout, part != "experts"
        layers = chunk_layers(self.shape.num_layers, self.coord.pp, layout.pp, self.number, layout.vpp)
        if self._is_first and has_dense:
            yield from self._of(self._embedding)
        for local, layer in enumerate(layers):
            of_layer, prefixes = self.shape.layers[layer], (f"decoder.layers.{layer}.", f"decoder.layers.{local}.")
            for weight in of_layer.weights if has_dense else ():
                yield from self._of(weight, *prefixes)
            if part != "dense":
                yield from self._experts(of_layer, *prefixes)
        if has_dense and (self.coord.pp, self.number) == (layout.pp - 1, layout.vpp - 1):
            yield from self._head()
        if self._is_first and has_dense:
            yield from self._tower()

    @property
    def _is_first(self) -> bool:
        return (self.coord.pp, self.number) == (0, 0)

    @property
    def _embedding(self) -> Weight:
        return Weight(EMBEDDING, (self.shape.padded_vocab_size, self.shape.hidden_size), "rows")

    def _tower(self) -> Iterator[Shard]:
        """The vision tower, whole on every rank; its ranks divide the pictures."""
        vision = self.shape.vision
        if vision is None:
            return
        for name, size in tower_tensors(vision).items():
            yield from self._of(Weight(f"{TOWER}{name}", size, is_frozen=not vision.is_trained(name)))

    def _experts(self, layer: Layer, prefix: str, local: str) -> Iterator[Shard]:
        each = layer.num_experts // self.layout.ep
        for number in range(each):
            names = [f"mlp.experts.local_experts.{n}." for n in (self.expert.ep * each + number, number)]
            for weight in layer.expert_weights:
                yield from self._of(weight, f"{prefix}{names[0]}", f"{local}{names[1]}", is_expert=True)

    def _of(self, weight: Weight, prefix: str = "", local: str = "", *, is_expert: bool = False) -> Iterator[Shard]:
        """Yield a rank's part of a weight, then those of the adapters of its projections."""
        place = (self.expert.etp, self.layout.etp) if is_expert else (self.coord.tp, self.layout.tp)
        for each in (weight, *weight.adapters(self.lora)):
            yield shard_of(each, *place, f"{prefix}{each.name}", f"{local}{each.name}", self.number, is_expert)

    def _head(self) -> Iterator[Shard]:
        hidden, output = self.shape.hidden_size, self._embedding
        yield from self._of(norm_weight("decoder.final_layernorm", hidden, self.shape.layers[-1].norms.zero_centered))
        if self.head in SCALAR_HEADS:
            output = Weight(SCALAR_HEADS[self.head], (1, hidden))
        elif not self.shape.tie_word_embeddings:
            output = replace(output, name=OUTPUT_LAYER)
        elif self._is_first:
            return
        yield from (shard._replace(local_name=OUTPUT_LAYER) for shard in self._of(output))
