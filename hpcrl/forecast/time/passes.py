"""Seconds of forward and training passes: of a micro-batch on a pipeline stage, and of all micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

from hpcrl.forecast.memory.activations import INT64
from hpcrl.forecast.memory.state import FP32
from hpcrl.forecast.time.collectives import Group, Network, group_of
from hpcrl.forecast.time.cost import NOTHING, Cost, Units
from hpcrl.forecast.time.layers import (
    FORWARD,
    TRAINING,
    Layer,
    Matrix,
    Numbers,
    Operators,
    Stage,
    fullest_rank,
    layer_of,
    most_of,
    numbers_of,
    stages_of,
)
from hpcrl.model.params import Head
from hpcrl.model.shape import Lora, ModelShape
from hpcrl.runtime.layout import Layout

BACKWARD_ATTENTION = 2.5  # five products for the forward pass's two (Dao 2023, FlashAttention-2, arXiv:2307.08691)


class Recompute(NamedTuple):
    """The fields of `model.recompute`."""

    granularity: str
    method: str
    num_layers: int
    modules: tuple[str, ...]


class Micro(NamedTuple):
    """A micro-batch on one rank. tokens: after division over context-parallel ranks. pairs: of tokens of which one
    attends to the other, divided likewise. length: mean tokens of its sequences. outputs: tokens that the head is
    wanted of."""

    tokens: float
    pairs: float
    length: float
    outputs: float


@dataclass(frozen=True)
class PassModel:
    """A role's model as its passes see it. sequence_parallel, recompute, lora: as in `hpcrl.forecast.memory`.
    recomputes_head: whether logits are computed again in the backward pass. operators: of a pass without gradients.
    load_imbalance: tokens of the expert with most, as a multiple of the mean."""

    shape: ModelShape
    layout: Layout
    head: Head
    units: Units
    head_units: Units
    network: Network
    ranks_per_node: int
    sequence_parallel: bool = True
    lora: Lora | None = None
    recompute: Recompute | None = None
    recomputes_head: bool = True
    operators: Operators = FORWARD
    load_imbalance: float = 1.0

    @cached_property
    def stages(self) -> tuple[Stage, ...]:
        return stages_of(self.shape.num_layers, self.shape.moe_layers, self.layout.pp, self.layout.vpp)

    @cached_property
    def numbers(self) -> tuple[Numbers, ...]:
        """Numbers of weights of a rank of each stage."""
        layout = self.layout
        return _numbers(self.shape, self.stages, layout.tp, layout.ep, layout.etp, self.head, self.lora)

    @cached_property
    def _tp(self) -> Group:
        return group_of(self.layout, self.ranks_per_node, "tp")

    def layer(self, is_moe: bool) -> Layer:
        layout = self.layout
        return layer_of(self.shape, layout.tp, layout.ep, layout.etp, is_moe, self.lora)

    def forward(self, micro: Micro) -> list[Cost]:
        """Of each stage, of a pass without gradients."""
        each = {is_moe: self._forward_layer(is_moe, micro) for is_moe in (False, True) if self._has(is_moe)}

        def cost(stage: Stage) -> Cost:
            found = self._of_stage(stage, each) + self._ends(stage, micro, trains=False)
            return self._launched(found, stage, micro, self.operators)

        return self._of_stages(cost)

    def training(self, micro: Micro) -> list[Cost]:
        """Of each stage, of a forward and a backward pass, with what it computes again."""
        each = {is_moe: self._training_layer(is_moe, micro) for is_moe in (False, True) if self._has(is_moe)}
        again = {is_moe: self._again(is_moe, micro) for is_moe in each}

        def cost(stage: Stage) -> Cost:
            found = self._of_stage(stage, each) + self._of_stage(stage, again) * self._share_again(stage)
            return self._launched(found + self._ends(stage, micro, trains=True), stage, micro, TRAINING)

        return self._of_stages(cost)

    def _of_stages(self, cost: Callable[[Stage], Cost]) -> list[Cost]:
        """Of each stage; those that are alike are computed once."""
        costs = {stage: cost(stage) for stage in {*self.stages}}
        return [costs[stage] for stage in self.stages]

    def _launched(self, cost: Cost, stage: Stage, micro: Micro, operators: Operators) -> Cost:
        """With the host's time for all operators of a micro-batch, in place of those that `cost` has. A GPU's host is
        ahead of it, so that only what takes longer than the GPU's work counts."""
        count = operators.of_batch(self.layout) + operators.of_head(self.head) * stage.is_last
        count += operators.sequence * micro.tokens / micro.length
        for layers, is_moe in ((stage.dense, False), (stage.moe, True)):
            if layers:
                found = self.layer(is_moe)
                experts = min(found.num_experts, micro.tokens * self.shape.moe_topk)  # that have tokens
                qk_norm = self.shape.qk_norm
                each = operators.of_layer(self.layout, experts, len(found.adapters), qk_norm=qk_norm)
                if operators is TRAINING and self.recompute is not None and self.recompute.granularity == "full":
                    each += FORWARD.of_layer(self.layout, experts, qk_norm=qk_norm) * self._share_again(stage)
                count += layers * each
        launches = count * operators.launches * self.units.launch
        if self.units.is_ahead:
            launches = max(0.0, launches - (cost.seconds - cost.launches))
        return cost._replace(launches=launches)

    def backward_share(self) -> float:
        """Of a training pass, the backward pass's share of the time, about."""
        return 0.5 if self.lora is not None else 2 / 3

    def send(self, micro: Micro) -> float:
        """Seconds in which a stage sends a micro-batch's activations to the next one, or gradients back."""
        local = micro.tokens / (self.layout.tp if self._shares_tokens else 1)
        nbytes = local * self.shape.hidden_size * self.units.itemsize
        return self.network.send(nbytes, group_of(self.layout, self.ranks_per_node, "pp"))

    def _has(self, is_moe: bool) -> bool:
        return any(stage.moe if is_moe else stage.dense for stage in self.stages)

    def _of_stage(self, stage: Stage, each: dict[bool, Cost]) -> Cost:
        return each.get(False, NOTHING) * stage.dense + each.get(True, NOTHING) * stage.moe

    @property
    def _shares_tokens(self) -> bool:
        return self.sequence_parallel and self.layout.tp > 1

    def _forward_layer(self, is_moe: bool, micro: Micro) -> Cost:
        layer = self.layer(is_moe)
        found = self._products((*layer.attention, *layer.adapters), micro.tokens) + self._attention(micro)
        found = found + self._mlp(layer, micro) + self._elementwise(is_moe, micro)
        exchanged = self._exchanged_keys(micro) + self._exchanged_tokens(is_moe, micro)
        return found + Cost(communication=self._reductions(is_moe, micro) + exchanged)

    def _training_layer(self, is_moe: bool, micro: Micro) -> Cost:
        """A backward pass has two products per product, of frozen weights one. Sequence parallelism gathers a layer's
        input again for the gradient of the weights: three gathers for two (Korthikanti et al. 2022, arXiv:2205.05198,
        section 4.2.2)."""
        layer = self.layer(is_moe)
        frozen = 2.0 if self.lora is not None else 3.0
        products = self._products(layer.attention, micro.tokens) + self._mlp(layer, micro)
        found = products * frozen + self._products(layer.adapters, micro.tokens) * 3.0
        found = found + self._attention(micro) * (1 + BACKWARD_ATTENTION) + self._elementwise(is_moe, micro) * 3.0
        reductions = self._reductions(is_moe, micro) * (2.5 if self._shares_tokens else 2.0)
        summed = 0 if self.lora is not None else layer.parameters + layer.expert_parameters
        found = found + self.units.moved(2.0 * FP32 * summed)  # gradients are added to those of other micro-batches
        exchanged = 2.0 * self._exchanged_keys(micro) + self._exchanged_tokens(is_moe, micro, passes=2)
        return found + Cost(communication=reductions + exchanged)

    def _again(self, is_moe: bool, micro: Micro) -> Cost:
        """What the backward pass computes again of a layer: all of it, or parts (Chen et al. 2016, arXiv:1604.06174;
        Korthikanti et al. 2022, section 5)."""
        again = self.recompute
        if again is None:
            return NOTHING
        if again.granularity == "full":
            return self._forward_layer(is_moe, micro)
        found = self._attention(micro) if "core_attn" in again.modules else NOTHING
        if ("moe" if is_moe else "mlp") in again.modules:
            found = found + self._mlp(self.layer(is_moe), micro)
            found = found + Cost(communication=self._exchanged_tokens(is_moe, micro))
        return found

    def _share_again(self, stage: Stage) -> float:
        """Of a stage's layers, those that compute something again."""
        again = self.recompute
        if again is None or again.granularity != "full" or again.method != "block":
            return 1.0
        return min(1.0, again.num_layers * self.layout.vpp / max(1, stage.dense + stage.moe))

    def _products(self, matrices: Sequence[Matrix], rows: float) -> Cost:
        return _sum(self.units.product(rows, *matrix) for matrix in matrices)

    def _attention(self, micro: Micro) -> Cost:
        shape = self.shape
        width = shape.num_attention_heads / self.layout.tp * (shape.head_dim + shape.v_head_dim)
        return self.units.attention(micro.pairs, micro.length, width)

    def _mlp(self, layer: Layer, micro: Micro) -> Cost:
        found = self._products(layer.mlp, micro.tokens)
        return found + self._experts(layer, micro) if layer.experts else found

    def _experts(self, layer: Layer, micro: Micro) -> Cost:
        """Grouped products of the experts that tokens are sent to, of the expert-parallel rank with most of them: as
        many as chance gives it, times those of the experts that routers prefer."""
        shape, layout = self.shape, self.layout
        rows = micro.tokens * shape.moe_topk * layout.etp / layout.tp
        seen = micro.tokens * layout.etp * layout.ep / layout.tp  # tokens of the group
        used = layer.num_experts * (1.0 - (1.0 - shape.moe_topk / shape.num_experts) ** seen)
        uneven = self._uneven(rows)
        groups = max(1.0, used)
        found = _sum(self.units.product(rows * uneven, *matrix, groups=groups) for matrix in layer.experts)
        sent = rows / layout.etp * shape.hidden_size * self.units.itemsize
        moved = self.units.moved(4.0 * sent)  # sorted by expert, and back
        waited = (uneven - 1.0) / uneven * found.seconds
        even = found * (1.0 / uneven)
        return even + moved + Cost(waiting=waited)

    def _uneven(self, rows: float) -> float:
        """Tokens of the expert-parallel rank with most, as a multiple of the mean."""
        ep = self.layout.ep
        by_chance = most_of(ep, rows * ep)
        return min(float(ep), by_chance * fullest_rank(ep, self.shape.num_experts, self.load_imbalance))

    def _exchanged_tokens(self, is_moe: bool, micro: Micro, passes: int = 1) -> float:
        """Seconds in which tokens go to the ranks of their experts, their probabilities in a message of their own, and
        back, as in megatron's all-to-all dispatcher; those of the rank with most. Ranks that divide each expert gather
        both, and scatter sums in fp32. Before the first of the passes all ranks gather the number of tokens of each
        expert. An engine's ranks have all tokens, and exchange none: their parts of each expert are summed with those
        of the layer, see `_reductions`."""
        shape, layout, network = self.shape, self.layout, self.network
        if not is_moe or (layout.tp > 1 and not self._shares_tokens):
            return 0.0
        rows = micro.tokens * shape.moe_topk / layout.tp
        most, hidden = rows * self._uneven(rows * layout.etp), shape.hidden_size
        ep, etp = (group_of(layout, self.ranks_per_node, dim) for dim in ("ep", "etp"))
        exchanged = 2.0 * network.all_to_all(most * hidden * self.units.itemsize, ep)
        exchanged += network.all_to_all(most * FP32, ep)
        for width in (hidden * self.units.itemsize, FP32, hidden * FP32):
            exchanged += network.all_gather(most * layout.etp * width, etp)
        every = group_of(layout, self.ranks_per_node, "etp", "ep")
        return passes * exchanged + network.all_gather(INT64 * shape.num_experts * every.size, every)

    def _elementwise(self, is_moe: bool, micro: Micro) -> Cost:
        """Two norms (read, write), two residual sums (two reads, a write), the rotary embedding, the activation."""
        shape, tp = self.shape, self.layout.tp
        local = micro.tokens / tp if self._shares_tokens else micro.tokens
        heads = (shape.num_attention_heads + shape.num_query_groups) * shape.head_dim / tp
        width = shape.moe_topk * shape.moe_ffn_hidden_size + shape.moe_shared_ffn_hidden_size
        ffn = (width if is_moe else shape.ffn_hidden_size) / tp
        numbers = local * 10 * shape.hidden_size + micro.tokens * (2 * heads + 3 * ffn)
        return self.units.moved(numbers * self.units.itemsize)

    def _reductions(self, is_moe: bool, micro: Micro) -> float:
        """Two all-reduces per layer, or as many pairs of a gather and a reduce-scatter (Shoeybi et al. 2019,
        arXiv:1909.08053, section 3; Korthikanti et al. 2022, section 4.2). Where ranks share tokens, each sends its own
        to experts, so that only shared experts need the second pair."""
        nbytes = micro.tokens * self.shape.hidden_size * self.units.itemsize
        if self._shares_tokens:
            pairs = 1 if is_moe and not self.shape.moe_shared_ffn_hidden_size else 2
            return 2.0 * pairs * self.network.all_gather(nbytes, self._tp)
        return 2.0 * self.network.all_reduce(nbytes, self._tp)

    def _exchanged_keys(self, micro: Micro) -> float:
        """Keys and values of all context-parallel ranks, which each of them gathers; their gradients are scattered."""
        shape, layout = self.shape, self.layout
        if layout.cp == 1:
            return 0.0
        width = shape.num_query_groups / layout.tp * (shape.head_dim + shape.v_head_dim)
        nbytes = micro.tokens * layout.cp * width * self.units.itemsize
        return self.network.all_gather(nbytes, group_of(layout, self.ranks_per_node, "cp"))

    def _ends(self, stage: Stage, micro: Micro, *, trains: bool) -> Cost:
        """Embedding and head of a stage that has them."""
        shape, units, found = self.shape, self.units, NOTHING
        hidden = shape.hidden_size * units.itemsize
        passes = 2 if trains else 1
        if stage.is_first:
            found = found + units.moved(passes * 2.0 * micro.tokens * hidden)
            reduced = self.network.all_gather(micro.tokens * hidden, self._tp) * (1 if self._shares_tokens else 2)
            found = found + Cost(communication=passes * reduced)
        if stage.is_last:
            found = found + self._head(micro, trains=trains)
        return found

    def _head(self, micro: Micro, *, trains: bool) -> Cost:
        """The head's products and, of logits, memory and three reductions of one number per token (Shoeybi et al. 2019,
        section 3). A head that computes logits in parts computes them twice in training."""
        shape, units = self.shape, self.head_units
        if self.head != "lm":
            return units.product(micro.outputs, shape.hidden_size, 1) * (3.0 if trains else 1.0)
        columns = shape.padded_vocab_size / self.layout.tp
        times = (3.0 + self.recomputes_head if self.lora is None else 2.0 + self.recomputes_head) if trains else 1.0
        logits = micro.outputs * columns * FP32
        found = units.product(micro.outputs, shape.hidden_size, columns) * times
        found = found + units.moved(logits * (5.0 if trains else 2.0))
        reduced = 3.0 * self.network.all_reduce(micro.outputs * FP32, self._tp)
        hidden = micro.outputs * shape.hidden_size * self.units.itemsize
        reduced += self.network.all_reduce(hidden, self._tp) * trains
        return found + Cost(communication=reduced)


@lru_cache(maxsize=512)
def _numbers(
    shape: ModelShape, stages: tuple[Stage, ...], tp: int, ep: int, etp: int, head: Head, lora: Lora | None
) -> tuple[Numbers, ...]:
    return tuple(numbers_of(shape, stage, tp, ep, etp, head, lora) for stage in stages)


def pipelined(stages: Sequence[Cost], count: int, vpp: int = 1, send: float = 0.0, sends: int = 1) -> Cost:
    """`count` micro-batches through a pipeline, of which a stage takes so long each, by the slowest stage.

    The slowest stage computes all of them; before its first and after its last one it waits for the other stages, a
    vpp-th of their time if the schedule is interleaved: with p equal stages (p - 1) / (vpp m) of the time of m
    micro-batches (Narayanan et al. 2021, arXiv:2104.04473, section 2.2). send: seconds of a message to the next stage,
    `sends` of them per micro-batch and chunk, which a stage waits for.
    """
    slowest = max(stages, key=lambda stage: stage.seconds)
    if len(stages) == 1:
        return slowest * count
    others = sum(stage.seconds for stage in stages) - slowest.seconds
    messages = sends * send * (count * vpp + len(stages) - 2)
    return slowest * count + Cost(bubble=others / vpp, communication=messages)


def evenness(stages: Sequence[Cost]) -> float:
    """Seconds of the mean stage as a share of those of the slowest one."""
    slowest = max(stage.seconds for stage in stages)
    return sum(stage.seconds for stage in stages) / len(stages) / slowest if slowest > 0 else 1.0


def _sum(costs: Iterable[Cost]) -> Cost:
    found = NOTHING
    for cost in costs:
        found = found + cost
    return found
