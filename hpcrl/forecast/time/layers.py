"""What a rank launches of each layer and of the head, and the weights of a pipeline stage.

Operators are what PyTorch runs, views included: each takes a host's time, whatever it computes. Counted with
`hpcrl.machine.measure_rank.CountOperators` on megatron-core's layers and on the native engine;
tests/forecast/time/test_operators.py counts again. Blocks have the operators of layers.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Literal, NamedTuple

from hpcrl.config.schema import Config
from hpcrl.forecast.memory.memory import with_keys
from hpcrl.model.blocks.block import Layer
from hpcrl.model.blocks.micro_batch import Computation
from hpcrl.model.params import SCALAR_HEADS, Head, chunk_layers
from hpcrl.model.shape import Lora, ModelShape
from hpcrl.runtime.layout import Layout


class Operators(NamedTuple):
    """The operators of one way to run a model.

    `run` is the field of `hpcrl.model.blocks.micro_batch.Launches` that counts. One of these operators takes `launches`
    times as long as the operator of a plain layer, which takes `device.launch`. Under tensor parallelism a layer has
    `tensor_parallel` operators more, under context parallelism `context_parallel`, and `adapter` for each pair of
    LoRA's matrices. A micro-batch has `batch` operators before its first layer, and `split` more with context
    parallelism. `lm` and `scalar` are those of a head and of what is computed from its outputs. Each sequence of a
    micro-batch takes the time of `sequence` operators.
    """

    run: Literal["forward", "training", "engine", "graph"]
    launches: float
    tensor_parallel: float
    context_parallel: float
    adapter: float
    batch: float
    split: float
    lm: float
    scalar: float
    sequence: float

    def of_layer(self, blocks: Iterable[Computation], layout: Layout, num_adapters: int = 0) -> float:
        """Return those of a layer, by the computations of its blocks. It has so many matrices of adapters."""
        found = 0.0
        for each, times in (launched for block in blocks for launched in block.launches):
            found += times * getattr(each, self.run)
        found += self.tensor_parallel * (layout.tp > 1) + self.context_parallel * (layout.cp > 1)
        return found + self.adapter * num_adapters / 2

    def of_batch(self, layout: Layout) -> float:
        return self.batch + self.split * (layout.cp > 1)

    def of_head(self, head: Head) -> float:
        return self.lm if head == "lm" else self.scalar


# Measured on a Xeon, with so few tokens that nothing else counts: an operator of a plain layer takes 4 to 6 us, of
# megatron-core's modules 15 to 19 us without gradients and 15 to 26 us with them, of the native engine 7 us and 0.1 ms
# per sequence and step.
FORWARD = Operators("forward", 3.5, 6, 30, 8, 75, 70, 39, 10, 0)
TRAINING = Operators("training", 4.2, 20, 65, 24, 83, 70, 100, 56, 0)
ENGINE = Operators("engine", 1.6, 5, 0, 0, 0, 0, 70, 0, 15)  # lm: with sampling
GRAPH = Operators("graph", 1.0, 2, 0, 0, 0, 0, 18, 0, 0)


class Projections(NamedTuple):
    """Matrices of one size, (rows, cols) as the Hugging Face file has them, that a layer has `number` of."""

    rows: int
    cols: int
    number: int
    is_expert: bool


@lru_cache(maxsize=512)
def projections_of(layer: Layer) -> tuple[Projections, ...]:
    """The matrices of a whole layer."""
    found: Counter[tuple[int, int, bool]] = Counter()
    for is_expert, weights in ((False, layer.weights), (True, layer.expert_weights)):
        for weight in (weight for weight in weights if len(weight.size) == 2):
            rows, cols = weight.size
            each = [weight.periods * projection.rows for projection in weight.projections] or [rows]
            for own in each:
                found[own, cols, is_expert] += layer.num_experts if is_expert else 1
    return tuple(Projections(rows, cols, number, is_expert) for (rows, cols, is_expert), number in found.items())


class Stage(NamedTuple):
    """A pipeline stage: how many layers of each kind it has, and whether it has the embedding, and the head."""

    layers: tuple[tuple[Layer, int], ...]
    is_first: bool
    is_last: bool

    @property
    def num_layers(self) -> int:
        return sum(count for _, count in self.layers)


@lru_cache(maxsize=512)
def stages_of(shape: ModelShape, pp: int = 1, vpp: int = 1) -> tuple[Stage, ...]:
    """Return the stages of a pipeline; of an interleaved one, with the layers of all chunks of a stage."""
    found = []
    for stage in range(pp):
        chunks = (chunk_layers(shape.num_layers, stage, pp, chunk, vpp) for chunk in range(vpp))
        counts = Counter(shape.layers[number] for chunk in chunks for number in chunk)
        found.append(Stage(tuple(counts.items()), stage == 0, stage == pp - 1))
    return tuple(found)


class Numbers(NamedTuple):
    """Numbers of weights of a rank, outside of experts and in experts, and how many of them are trained. `in_matrices`
    of those outside of experts are in matrices of layers, as all trained weights of experts are."""

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
    """Return the weights of a stage's rank, without a vision tower and the final norm."""
    vocabulary = shape.padded_vocab_size // tp * shape.hidden_size
    dense = vocabulary * stage.is_first
    if stage.is_last:
        is_shared = shape.tie_word_embeddings and stage.is_first
        dense += shape.hidden_size if head in SCALAR_HEADS else 0 if is_shared else vocabulary
    experts = trained = in_matrices = 0
    layout = Layout(tuple(range(math.lcm(tp, ep * etp))), tp=tp, ep=ep, etp=etp)
    for layer, count in stage.layers:
        for part in layer.parts(layout, lora):
            dense += count * part.numel * (not part.is_expert)
            experts += count * part.numel * part.is_expert
            trained += count * part.numel * part.is_adapter
            in_matrices += count * part.numel * (len(part.size) == 2 and not part.is_expert)
    if lora is not None:
        return Numbers(dense, experts, trained, 0)
    return Numbers(dense, experts, dense, experts, in_matrices)


LOAD_METRIC = "actor/moe_load_imbalance/mean"


def with_measured_load(config: Config, row: Mapping[str, float]) -> Config:
    """Return the config with the load imbalance of a step's metrics, to a tenth, or unchanged if they have none."""
    imbalance = row.get(LOAD_METRIC)
    if imbalance is None or not math.isfinite(imbalance):
        return config
    return with_keys(config, {"model.moe.load_imbalance": max(1.0, round(imbalance, 1))})
