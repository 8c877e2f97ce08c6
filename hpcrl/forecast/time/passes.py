"""Seconds of forward and training passes: of a micro-batch on a pipeline stage, and of all micro-batches.

Operators are what PyTorch runs, views included: each takes a host's time, whatever it computes. Counted with
`hpcrl.machine.measure_rank.CountOperators` on megatron-core's layers and on the native engine;
tests/forecast/time/test_operators.py counts again. Blocks have the operators of layers.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, Literal, NamedTuple

from hpcrl.forecast.time.cost import NOTHING, Cost, Group, Network, Units, group_of
from hpcrl.model.blocks.block import Layer, matrices
from hpcrl.model.blocks.micro_batch import FP32, Computation, Matrix, MicroBatch, seen_pairs
from hpcrl.model.params import FP8_ELEMENTS, SCALAR_HEADS, Head, chunk_layers
from hpcrl.model.shape import Lora, ModelShape
from hpcrl.runtime.layout import ROW_MULTIPLE, Layout


class Operators(NamedTuple):
    """Numbers of operators when a model runs in one way: forward only, training, or in the engine.

    `run` names the field of `hpcrl.model.blocks.micro_batch.Launches` with a block's number of operators. The host
    takes `launches` times `device.launch` for each operator. A layer has `tensor_parallel` additional operators under
    tensor parallelism, `context_parallel` under context parallelism, and `adapter` for each pair of LoRA's matrices.
    A micro-batch has `batch` operators before its first layer, and `split` more under context parallelism. `lm` and
    `scalar` are the operators of a head and of the loss or the values. Each sequence of a micro-batch takes as long as
    `sequence` operators.
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
        """Return the number of operators of a layer, from the computations of its blocks."""
        count = sum(times * getattr(each, self.run) for block in blocks for each, times in block.launches)
        count += self.tensor_parallel * (layout.tp > 1) + self.context_parallel * (layout.cp > 1)
        return count + self.adapter * num_adapters / 2

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
    stages = []
    for stage in range(pp):
        chunks = (chunk_layers(shape.num_layers, stage, pp, chunk, vpp) for chunk in range(vpp))
        counts = Counter(shape.layers[number] for chunk in chunks for number in chunk)
        stages.append(Stage(tuple(counts.items()), stage == 0, stage == pp - 1))
    return tuple(stages)


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


BACKWARD_ATTENTION = 2.5  # five products for the forward pass's two (Dao 2023, FlashAttention-2, arXiv:2307.08691)


class Recompute(NamedTuple):
    """The fields of `model.recompute`."""

    granularity: str
    method: str
    num_layers: int
    modules: tuple[str, ...]


class Micro(NamedTuple):
    """A micro-batch on one rank.

    Context-parallel ranks divide its `tokens`, and its `pairs` of tokens of which one attends to the other. `length` is
    the mean length of its sequences. The head computes outputs for `outputs` tokens.
    """

    tokens: float
    pairs: float
    length: float
    outputs: float


@dataclass(frozen=True)
class PassModel:
    """A role's model as its passes see it.

    `units` is the device, `large_units` the device for products of large weights in layers, which may be 8-bit: those
    with `large_elements` on a rank.
    `sequence_parallel`, `lora` and `load_imbalance` are those of `MicroBatch`, `row_multiple` that of `RoleModel`.
    `recomputes_head` says whether the backward pass computes logits again. `operators` are those of a pass without
    gradients.
    """

    shape: ModelShape
    layout: Layout
    head: Head
    units: Units
    large_units: Units
    network: Network
    ranks_per_node: int
    sequence_parallel: bool = True
    lora: Lora | None = None
    recompute: Recompute | None = None
    recomputes_head: bool = True
    operators: Operators = FORWARD
    load_imbalance: float = 1.0
    row_multiple: int = ROW_MULTIPLE
    large_elements: int = FP8_ELEMENTS

    @cached_property
    def stages(self) -> tuple[Stage, ...]:
        return stages_of(self.shape, self.layout.pp, self.layout.vpp)

    @cached_property
    def numbers(self) -> tuple[Numbers, ...]:
        """The weights of a rank of each stage."""
        layout = self.layout
        fixed = layout.tp, layout.ep, layout.etp, self.head, self.lora
        return tuple(numbers_of(self.shape, stage, *fixed) for stage in self.stages)

    @cached_property
    def tp_group(self) -> Group:
        return group_of(self.layout, self.ranks_per_node, "tp")

    def forward(self, micro: Micro) -> list[Cost]:
        """Return the cost of a pass without gradients on each stage."""
        return self._of_stages(micro, trains=False)

    def training(self, micro: Micro) -> list[Cost]:
        """Return the cost of a forward and a backward pass on each stage, with what is recomputed."""
        return self._of_stages(micro, trains=True)

    def batch(self, micro: Micro) -> MicroBatch:
        """Return a micro-batch as blocks see it."""
        tokens: Any = micro.tokens  # a mean
        on_gpu = self.units.is_ahead or self.units.replays
        fixed = self.units.itemsize, self.sequence_parallel, self.lora, on_gpu
        return MicroBatch(self.layout, tokens, *fixed, load_imbalance=self.load_imbalance)

    def _of_stages(self, micro: Micro, *, trains: bool) -> list[Cost]:
        kinds = {layer: None for stage in self.stages for layer, _ in stage.layers}
        layers = {layer: LayerCost(self, micro, layer) for layer in kinds}
        each = {layer: it.training() if trains else it.forward() for layer, it in layers.items()}
        again = {layer: it.again() for layer, it in layers.items()} if trains and self.recompute else {}
        costs = {}
        for stage in {*self.stages}:  # equal ones are computed once
            cost = _of_stage(stage, each)
            if again:
                cost = cost + _of_stage(stage, again) * self._share_again(stage)
            cost = cost + self._ends(stage, micro, trains=trains)
            costs[stage] = self._launched(cost, stage, layers, micro, trains=trains)
        return [costs[stage] for stage in self.stages]

    def _launched(
        self, cost: Cost, stage: Stage, layers: Mapping[Layer, LayerCost], micro: Micro, *, trains: bool
    ) -> Cost:
        """Return the cost with the host's time for all operators of a micro-batch, in place of those that it has. A
        GPU's host is ahead of it, so that only what takes longer than the GPU's work counts."""
        operators = TRAINING if trains else self.operators
        count = operators.of_batch(self.layout) + operators.of_head(self.head) * stage.is_last
        count += operators.sequence * micro.tokens / micro.length
        for layer, number in stage.layers:
            it = layers[layer]
            each = operators.of_layer(it.computations, self.layout, len(it.adapters))
            if trains and self.recompute is not None and self.recompute.granularity == "full":
                each += FORWARD.of_layer(it.computations, self.layout) * self._share_again(stage)
            count += number * each
        launches = count * operators.launches * self.units.launch
        if self.units.is_ahead:
            launches = max(0.0, launches - (cost.seconds - cost.launches))
        return cost._replace(launches=launches)

    def send(self, micro: Micro) -> float:
        """Return the seconds in which a stage sends a micro-batch's activations to the next one, or gradients back."""
        nbytes = self.batch(micro).hidden(self.shape.hidden_size)
        return self.network.send(nbytes, group_of(self.layout, self.ranks_per_node, "pp"))

    def _share_again(self, stage: Stage) -> float:
        """Return the share of a stage's layers that are recomputed."""
        again = self.recompute
        if again is None or again.granularity != "full" or again.method != "block":
            return 1.0
        return min(1.0, again.num_layers * self.layout.vpp / max(1, stage.num_layers))

    def _ends(self, stage: Stage, micro: Micro, *, trains: bool) -> Cost:
        """Return the cost of the embedding and the head, if the stage has them."""
        shape, units, cost = self.shape, self.units, NOTHING
        nbytes, passes = micro.tokens * (shape.hidden_size * units.itemsize), 2 if trains else 1
        if stage.is_first:
            gathers = passes * (1 if self.batch(micro).shares_tokens else 2)
            gathered = Cost(communication=gathers * self.network.all_gather(nbytes, self.tp_group))
            cost = cost + units.moved(2.0 * passes * nbytes) + gathered
        if stage.is_last:
            cost = cost + self._head(micro, trains=trains)
        return cost

    def _head(self, micro: Micro, *, trains: bool) -> Cost:
        """Return the cost of the head's products.

        Logits cost memory, too, and three reductions of one number per token (Shoeybi et al. 2019, section 3). A head
        that computes logits in parts computes them twice in training.
        """
        shape, units = self.shape, self.units
        if self.head != "lm":
            return units.product(micro.outputs, shape.hidden_size, 1) * (3.0 if trains else 1.0)
        columns = shape.padded_vocab_size / self.layout.tp
        times = (3.0 + self.recomputes_head if self.lora is None else 2.0 + self.recomputes_head) if trains else 1.0
        logits = micro.outputs * columns * FP32
        cost = units.product(micro.outputs, shape.hidden_size, columns) * times
        cost = cost + units.moved(logits * (5.0 if trains else 2.0))
        reduced = 3.0 * self.network.all_reduce(micro.outputs * FP32, self.tp_group)
        hidden = micro.outputs * shape.hidden_size * self.units.itemsize
        reduced += self.network.all_reduce(hidden, self.tp_group) * trains
        return cost + Cost(communication=reduced)


@dataclass(frozen=True)
class LayerCost:
    """The cost of a layer for a micro-batch: sums over its blocks."""

    model: PassModel
    micro: Micro
    layer: Layer

    @cached_property
    def batch(self) -> MicroBatch:
        return self.model.batch(self.micro)

    @cached_property
    def computations(self) -> tuple[Computation, ...]:
        return tuple(block.computation(self.batch) for block in self.layer.blocks)

    @cached_property
    def adapters(self) -> tuple[Matrix, ...]:
        """The matrices of adapters. Those of experts are small beside the others."""
        return matrices(self.layer.parts(self.batch.layout, self.batch.lora), are_adapters=True)

    def forward(self) -> Cost:
        """Return the cost of a pass without gradients."""
        elementwise, (attention, mlp) = self._elementwise(), self.computations
        first = sum(self._low_rank(), self._products(attention)) + self._core(attention)
        communication = self._reductions() + sum(map(self._exchanged, self.computations))
        return first + self._products(mlp) + self._core(mlp) + elementwise + Cost(communication=communication)

    def training(self) -> Cost:
        """Return the cost of a forward and a backward pass.

        A backward pass has two products per product, of frozen weights one. Sequence parallelism gathers a layer's
        input again for the gradient of the weights: three gathers for two (Korthikanti et al. 2022, arXiv:2205.05198,
        section 4.2.2). Gradients are added to those of other micro-batches.
        """
        is_frozen, computations = self.batch.lora is not None, self.computations
        cost = sum(map(self._products, computations), NOTHING) * (2.0 if is_frozen else 3.0)
        cost = cost + sum(self._low_rank(), NOTHING) * 3.0
        core = sum(map(self._core, computations), NOTHING) * (1 + BACKWARD_ATTENTION)
        numel = 0 if is_frozen else sum(part.numel for part in self.layer.parts(self.batch.layout))
        cost = cost + core + self._elementwise() * 3.0 + self.model.units.moved(2.0 * FP32 * numel)
        reductions = self._reductions() * (2.5 if self.batch.shares_tokens else 2.0)
        exchanged = sum(self._exchanged(it, trains=True) for it in computations)
        return cost + Cost(communication=reductions + exchanged)

    def again(self) -> Cost:
        """Return the cost of what the backward pass computes again: all of the layer, or blocks (Chen et al. 2016,
        arXiv:1604.06174; Korthikanti et al. 2022, section 5). Of "core_attn" only attention itself is recomputed."""
        again, cost = self.model.recompute, NOTHING
        if again is None:
            return cost
        if again.granularity == "full":
            return self.forward()
        for block, it in zip(self.layer.blocks, self.computations, strict=True):
            if block.recomputed in again.modules:
                cost = cost + self._core(it)
                if block.recomputed != "core_attn":
                    cost = cost + self._products(it) + Cost(communication=self._exchanged(it))
        return cost

    def _products(self, block: Computation) -> Cost:
        """Return the cost of products on a rank with the mean number of rows, which waits for the one with most."""
        units, large, cost = self.model.units, self.model.large_units, NOTHING
        for it in block.products:
            rows, most = it.rows * it.uneven, NOTHING
            for matrix in it.matrices:
                is_large = math.prod(matrix) >= self.model.large_elements
                most = most + (large if is_large else units).product(rows, *matrix, groups=it.groups)
            if it.uneven > 1.0:
                waiting = Cost(waiting=(it.uneven - 1.0) / it.uneven * most.seconds)
                most = most * (1.0 / it.uneven) + waiting
            cost = cost + (most + units.moved(it.moved) if it.moved else most)
        return cost

    def _low_rank(self) -> Iterator[Cost]:
        return (self.model.units.product(self.batch.tokens, *matrix) for matrix in self.adapters)

    def _core(self, block: Computation) -> Cost:
        """Return the cost of attention between tokens."""
        micro, width = self.micro, block.pair_width
        if not width:
            return NOTHING
        share = 1.0 if block.sees is None else seen_pairs(micro.length, block.sees) / seen_pairs(micro.length, None)
        return self.model.units.attention(micro.pairs * share, micro.length, width)

    def _elementwise(self) -> Cost:
        """Return the cost of the norms (read, write) and residual sums (two reads, a write) of both halves, and of the
        blocks."""
        of_blocks = self.batch.tokens * sum(it.elementwise for it in self.computations)
        halves = len(self.layer.norms.halves)
        numbers = self.batch.local * 5 * halves * self.model.shape.hidden_size + of_blocks
        return self.model.units.moved(numbers * self.batch.itemsize)

    def _reductions(self) -> float:
        """Return the seconds of all-reduces, or of as many pairs of a gather and a reduce-scatter (Shoeybi et al. 2019,
        arXiv:1909.08053, section 3; Korthikanti et al. 2022, section 4.2)."""
        batch, network, group = self.batch, self.model.network, self.model.tp_group
        nbytes = batch.tokens * self.model.shape.hidden_size * batch.itemsize
        each = 2.0 * network.all_gather(nbytes, group) if batch.shares_tokens else network.all_reduce(nbytes, group)
        return each * sum(it.reductions for it in self.computations)

    def _exchanged(self, block: Computation, *, trains: bool = False) -> float:
        """Return the seconds of the other collectives."""
        model, seconds = self.model, 0.0
        for each in block.exchanges:
            group = group_of(model.layout, model.ranks_per_node, *each.dims)
            seconds += getattr(model.network, each.kind)(each.nbytes, group) * (each.times if trains else 1)
        return seconds


def _of_stage(stage: Stage, each: Mapping[Layer, Cost]) -> Cost:
    return sum((each[layer] * count for layer, count in stage.layers), NOTHING)


def pipelined(stages: Sequence[Cost], count: int, vpp: int = 1, send: float = 0.0, sends: int = 1) -> Cost:
    """Return the cost of `count` micro-batches in a pipeline, by the cost of one on each stage.

    The slowest stage computes all of them. Before its first and after its last one it waits for the other stages: for
    their time, divided by vpp if the schedule is interleaved. With p equal stages that is (p - 1) / (vpp m) of the time
    of m micro-batches (Narayanan et al. 2021, arXiv:2104.04473, section 2.2). A message to the next stage takes `send`
    seconds. A stage waits for `sends` messages per micro-batch and chunk.
    """
    slowest = max(stages, key=lambda stage: stage.seconds)
    if len(stages) == 1:
        return slowest * count
    others = sum(stage.seconds for stage in stages) - slowest.seconds
    messages = sends * send * (count * vpp + len(stages) - 2)
    return slowest * count + Cost(bubble=others / vpp, communication=messages)
