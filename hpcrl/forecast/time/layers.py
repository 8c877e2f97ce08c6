"""What a rank holds and multiplies of each layer, of a model's head, and of a pipeline stage. From the shards."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

from hpcrl.model.params import SCALAR_HEADS, Head, chunk_layers, shards
from hpcrl.model.shape import Lora, ModelShape, is_adapter
from hpcrl.runtime.layout import Layout


class Matrix(NamedTuple):
    """A weight that multiplies rows of `inner` numbers into rows of `outer`."""

    inner: int
    outer: int


@dataclass(frozen=True)
class Layer:
    """A rank's part of a layer. experts: the matrices of one expert, of which the rank has `num_experts`. adapters:
    those of dense matrices; low-rank products of experts are small beside them. parameters, expert_parameters: numbers
    of all weights. trained: of adapters."""

    attention: tuple[Matrix, ...]
    mlp: tuple[Matrix, ...]
    experts: tuple[Matrix, ...]
    adapters: tuple[Matrix, ...]
    num_experts: int
    parameters: int
    expert_parameters: int
    trained: int


@lru_cache(maxsize=512)
def layer_of(shape: ModelShape, tp: int, ep: int, etp: int, is_moe: bool, lora: Lora | None = None) -> Layer:
    one = replace(shape, num_layers=1, vision=None, dense_layers=(0,) if shape.num_experts and not is_moe else ())
    layout = Layout(tuple(range(math.lcm(tp, ep * etp))), tp=tp, ep=ep, etp=etp)
    found = [shard for shard in shards(one, layout, 0, lora=lora) if ".layers.0." in shard.name]
    attention, mlp, adapters = [], [], []
    of_experts: list[list[Matrix]] = []
    parameters = expert_parameters = trained = 0
    for shard in found:
        numel = math.prod(shard.local_shape)
        trained += numel * is_adapter(shard.name)
        if shard.is_expert:
            expert_parameters += numel
        else:
            parameters += numel
        if len(shard.local_shape) != 2:
            continue
        matrix = Matrix(shard.local_shape[1], shard.local_shape[0])
        if is_adapter(shard.name):
            if not shard.is_expert:
                adapters.append(matrix)
        elif shard.is_expert:
            if shard.name.endswith("linear_fc1.weight"):
                of_experts.append([])
            of_experts[-1].append(matrix)
        elif ".self_attention." in shard.name:
            attention.append(matrix)
        else:
            mlp.append(matrix)
    return Layer(
        tuple(attention),
        tuple(mlp),
        tuple(of_experts[0]) if of_experts else (),
        tuple(adapters),
        len(of_experts),
        parameters,
        expert_parameters,
        trained,
    )


class Stage(NamedTuple):
    """A pipeline stage: its layers without and with experts, whether it has the embedding, and the head."""

    dense: int
    moe: int
    is_first: bool
    is_last: bool


@lru_cache(maxsize=512)
def stages_of(num_layers: int, moe_layers: tuple[int, ...], pp: int, vpp: int) -> tuple[Stage, ...]:
    """The stages of a pipeline; of an interleaved one, with the layers of all chunks of a stage."""
    experts, found = set(moe_layers), []
    for stage in range(pp):
        layers = [layer for chunk in range(vpp) for layer in chunk_layers(num_layers, stage, pp, chunk, vpp)]
        moe = sum(layer in experts for layer in layers)
        found.append(Stage(len(layers) - moe, moe, stage == 0, stage == pp - 1))
    return tuple(found)


class Numbers(NamedTuple):
    """Numbers of weights of a rank: all, of them those of experts, and those that training changes."""

    dense: int
    experts: int
    trained_dense: int
    trained_experts: int

    @property
    def all(self) -> int:
        return self.dense + self.experts

    @property
    def trained(self) -> int:
        return self.trained_dense + self.trained_experts


@lru_cache(maxsize=512)
def numbers_of(
    shape: ModelShape, stage: Stage, tp: int, ep: int, etp: int, head: Head = "lm", lora: Lora | None = None
) -> Numbers:
    """The weights of a stage's rank; a vision tower and the final norm are left out."""
    vocabulary = shape.padded_vocab_size // tp * shape.hidden_size
    dense = vocabulary * stage.is_first
    if stage.is_last:
        is_shared = shape.tie_word_embeddings and stage.is_first
        dense += shape.hidden_size if head in SCALAR_HEADS else 0 if is_shared else vocabulary
    experts = trained = 0
    for count, is_moe in ((stage.dense, False), (stage.moe, True)):
        if count:
            layer = layer_of(shape, tp, ep, etp, is_moe, lora)
            dense += count * layer.parameters
            experts += count * layer.expert_parameters
            trained += count * layer.trained
    return Numbers(dense, experts, dense, experts) if lora is None else Numbers(dense, experts, trained, 0)
