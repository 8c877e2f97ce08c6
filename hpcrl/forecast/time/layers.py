"""What a rank holds, multiplies and launches of each layer, of the head, and of a pipeline stage. From the shards.

Operators are what PyTorch runs, views included: each takes a host's time, whatever it computes. Counted with
`hpcrl.machine.measure_rank.CountOperators` on megatron-core's layers and on the native engine;
tests/forecast/time/test_operators.py counts again. Tokens are divided unevenly over experts, and over the ranks that
hold them.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from statistics import NormalDist
from typing import NamedTuple

from hpcrl.config.schema import Config
from hpcrl.forecast.memory.memory import with_keys
from hpcrl.model.params import SCALAR_HEADS, Head, chunk_layers, shards
from hpcrl.model.shape import Lora, ModelShape, is_adapter
from hpcrl.runtime.layout import Layout


class Operators(NamedTuple):
    """Numbers of operators of a kind of pass. launches: time of one, as a multiple of `device.launch`.

    layer: of a dense layer; mixture: of one with experts, plus `expert` for each expert of the rank. tensor_parallel,
    context_parallel: additional ones of a layer; adapter: additional ones for each pair of LoRA's matrices. batch: of a
    micro-batch before its first layer; split: additional ones with context parallelism. lm, scalar: of a head.
    sequence: additional ones for each sequence of a micro-batch.
    """

    launches: float
    layer: float
    mixture: float
    expert: float
    qk_norm: float
    tensor_parallel: float
    context_parallel: float
    adapter: float
    batch: float
    split: float
    lm: float
    scalar: float
    sequence: float

    def of_layer(self, layout: Layout, num_experts: float, adapters: int = 0, *, qk_norm: bool = False) -> float:
        """num_experts: of the rank; 0: a dense layer. adapters: matrices, two for each pair."""
        found = self.mixture + self.expert * num_experts if num_experts else self.layer
        found += self.tensor_parallel * (layout.tp > 1) + self.context_parallel * (layout.cp > 1)
        return found + self.adapter * adapters / 2 + self.qk_norm * qk_norm

    def of_batch(self, layout: Layout) -> float:
        return self.batch + self.split * (layout.cp > 1)

    def of_head(self, head: Head) -> float:
        return self.lm if head == "lm" else self.scalar


# Measured on a Xeon, with so few tokens that nothing else counts: an operator of a plain layer takes 4 to 6 us, of
# megatron-core's modules 15 to 19 us without gradients and 15 to 26 us with them, of the native engine 7 us and 0.1 ms
# per sequence and step.
FORWARD = Operators(3.5, 82, 135, 9.75, 10, 6, 30, 8, 75, 70, 39, 10, 0)  # without gradients
TRAINING = Operators(4.2, 211, 305, 30, 56, 20, 65, 24, 83, 70, 100, 56, 0)  # forward and backward, with gradients
ENGINE = Operators(1.6, 55, 64, 8, 8, 5, 0, 0, 0, 0, 70, 0, 15)  # of the native engine; lm: with sampling
GRAPH = Operators(1.0, 13, 19, 0, 1, 2, 0, 0, 0, 0, 18, 0, 0)  # kernels of an engine's decode step in a CUDA graph


class Matrix(NamedTuple):
    """A weight that multiplies rows of `inner` numbers into rows of `outer`."""

    inner: int
    outer: int


@dataclass(frozen=True)
class Layer:
    """A rank's part of a layer. experts: the matrices of one expert, of which the rank has `num_experts`. adapters:
    those of dense matrices; low-rank products of experts are small beside them. parameters, expert_parameters: numbers
    of all weights; in_matrices: of those in matrices, besides experts. trained: of adapters."""

    attention: tuple[Matrix, ...]
    mlp: tuple[Matrix, ...]
    experts: tuple[Matrix, ...]
    adapters: tuple[Matrix, ...]
    num_experts: int
    parameters: int
    expert_parameters: int
    trained: int
    in_matrices: int


@lru_cache(maxsize=512)
def layer_of(shape: ModelShape, tp: int, ep: int, etp: int, is_moe: bool, lora: Lora | None = None) -> Layer:
    one = replace(shape, num_layers=1, vision=None, dense_layers=(0,) if shape.num_experts and not is_moe else ())
    layout = Layout(tuple(range(math.lcm(tp, ep * etp))), tp=tp, ep=ep, etp=etp)
    found = [shard for shard in shards(one, layout, 0, lora=lora) if ".layers.0." in shard.name]
    attention, mlp, adapters = [], [], []
    of_experts: list[list[Matrix]] = []
    parameters = expert_parameters = trained = in_matrices = 0
    for shard in found:
        numel = math.prod(shard.local_shape)
        trained += numel * is_adapter(shard.name)
        in_matrices += numel * (shard.is_matrix and not shard.is_expert)
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
        in_matrices,
    )


class Projections(NamedTuple):
    """Matrices of one size, (rows, cols) as the Hugging Face file has them, that a layer has `number` of."""

    rows: int
    cols: int
    number: int
    is_expert: bool


@lru_cache(maxsize=512)
def projections_of(shape: ModelShape, is_moe: bool) -> tuple[Projections, ...]:
    """The matrices of a whole layer."""
    one = replace(shape, num_layers=1, vision=None, dense_layers=(0,) if shape.num_experts and not is_moe else ())
    found: Counter[tuple[int, int, bool]] = Counter()
    for shard in shards(one):
        if shard.is_matrix:
            rows, cols = shard.global_shape
            blocks, each = shard.projection_rows(rows)
            found.update((blocks * own, cols, shard.is_expert) for own in each.values())
    return tuple(Projections(rows, cols, number, is_expert) for (rows, cols, is_expert), number in found.items())


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
    """Numbers of weights of a rank: all, of them those of experts, and those that training changes; in_matrices: of
    dense layers' matrices among them, while all trained weights of experts are in matrices."""

    dense: int
    experts: int
    trained_dense: int
    trained_experts: int
    in_matrices: int = 0

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
    experts = trained = in_matrices = 0
    for count, is_moe in ((stage.dense, False), (stage.moe, True)):
        if count:
            layer = layer_of(shape, tp, ep, etp, is_moe, lora)
            dense += count * layer.parameters
            experts += count * layer.expert_parameters
            trained += count * layer.trained
            in_matrices += count * layer.in_matrices
    if lora is not None:
        return Numbers(dense, experts, trained, 0)
    return Numbers(dense, experts, dense, experts, in_matrices)


LOAD_METRIC = "actor/moe_load_imbalance/mean"


def with_measured_load(config: Config, row: Mapping[str, float]) -> Config:
    """The config with `model.moe.load_imbalance` of a step's metrics, to a tenth; as it is if they have none."""
    imbalance = row.get(LOAD_METRIC)
    if imbalance is None or not math.isfinite(imbalance):
        return config
    return with_keys(config, {"model.moe.load_imbalance": max(1.0, round(imbalance, 1))})


def fullest_rank(ranks: int, num_experts: int, imbalance: float) -> float:
    """Tokens of the expert-parallel rank with most, as a multiple of the mean. imbalance: of the expert with most.

    Experts' loads are taken to be independent and normal, so that the largest of n is m(n) standard deviations above
    the mean, with m(n) the normal quantile at (n - 3/8) / (n + 1/4) (Blom 1958). The mean of a rank's k experts has a
    standard deviation that is smaller by the square root of k.
    """
    if ranks < 2 or imbalance <= 1.0:
        return 1.0
    narrower = _largest(ranks) / _largest(num_experts) / math.sqrt(num_experts / ranks)
    return min(float(ranks), 1.0 + (imbalance - 1.0) * narrower)


def _largest(count: int) -> float:
    return NormalDist().inv_cdf((count - 0.375) / (count + 0.25))


def most_of(ranks: int, balls: float) -> float:
    """Largest share of a rank as a multiple of the mean, of `balls` that are thrown at random:
    1 + sqrt(2 ln(n) (n - 1) / balls) (Raab and Steger 1998, theorem 1, the case of many balls)."""
    if ranks < 2 or balls <= 0:
        return 1.0
    return min(float(ranks), 1.0 + math.sqrt(2.0 * math.log(ranks) * (ranks - 1) / balls))
