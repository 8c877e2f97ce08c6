"""Seconds of phases that run a role's model over the samples of a step: generation, forward passes, and updates."""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple, TypeAlias

import numpy as np

from hpcrl.algorithms.optimizers.optimizer import Optimizer as OptimizerKind
from hpcrl.batch.packing import micro_batches
from hpcrl.forecast.memory.state import FP32, ITEMSIZE, RoleModel, State, replicas
from hpcrl.forecast.time.cost import NOTHING, Cost, group_of
from hpcrl.forecast.time.lengths import Lengths, spread
from hpcrl.forecast.time.passes import Micro, Numbers, PassModel, numbers_of, pipelined, stages_of
from hpcrl.model.blocks.block import Layer, blocks_of
from hpcrl.model.blocks.micro_batch import Computation
from hpcrl.model.shape import ModelShape

PACKED = 256  # sequences that are packed one by one; more are taken to need micro-batches in proportion
OPTIMIZER_OPERATORS = 100  # gradients' norm and AdamW, counted as in `hpcrl.forecast.time.passes`


@lru_cache(maxsize=1024)
def packing(lengths: Lengths, sequences: int, most_tokens: int) -> int:
    """How many micro-batches `hpcrl.batch.packing` makes of so many sequences."""
    few = min(sequences, PACKED)
    drawn = np.array([min(length, most_tokens) for length in lengths.sequences(few)])
    count = len(micro_batches(drawn, most_tokens))
    if sequences > few:
        each = few / count
        if len(set(drawn.tolist())) == 1:
            each = most_tokens // int(drawn[0])
        count = math.ceil(sequences / each)
    return count


class Passes(NamedTuple):
    """`samples` sequences over all replicas. all_outputs: whether the head is applied to all of a response's tokens,
    or to a sequence's last one."""

    samples: int
    most_tokens: int
    balanced: bool
    all_outputs: bool = True


def micro_batch(model: PassModel, passes: Passes, lengths: Lengths) -> tuple[Micro, int]:
    """The mean micro-batch, and how many of them a replica has: as many as the one with most needs, of its share of the
    samples."""
    layout = model.layout
    of_replica = math.ceil(passes.samples / layout.dp)
    count = layout.scheduled(packing(lengths, of_replica, passes.most_tokens))
    sequences = of_replica / count
    multiple = layout.token_multiple(model.row_multiple)
    tokens = math.ceil(sequences * lengths.mean / multiple) * multiple / layout.cp
    outputs = sequences * (lengths.response if passes.all_outputs else 1.0) / layout.cp
    return Micro(tokens, sequences * lengths.pairs / layout.cp, lengths.mean, outputs), count


def imbalance(passes: Passes, lengths: Lengths, dp: int) -> float:
    """Tokens of the replica with most, as a multiple of the mean. Balanced ones differ by less than a sequence, and
    none has less than the longest one; otherwise the largest of dp sums of random lengths, about sqrt(2 ln dp) standard
    deviations above their mean (David and Nagaraja 2003, 10.5)."""
    if dp == 1:
        return 1.0
    of_replica = max(1.0, passes.samples / dp)
    mean = of_replica * lengths.mean
    if passes.balanced:
        return max(1.0, (lengths.prompt + lengths.longest(passes.samples)) / mean)
    variance = 2 * lengths.pairs - lengths.mean - lengths.mean**2
    return 1.0 + math.sqrt(2 * math.log(dp) * max(0.0, variance) * of_replica) / mean


@lru_cache(maxsize=4096)
def forward_cost(model: PassModel, passes: Passes, lengths: Lengths) -> Cost:
    """A pass without gradients over all samples."""
    micro, count = micro_batch(model, passes, lengths)
    cost = pipelined(model.forward(micro), count, model.layout.vpp, model.send(micro))
    return cost + Cost(waiting=cost.seconds * (imbalance(passes, lengths, model.layout.dp) - 1.0))


def evenness(model: PassModel, passes: Passes, lengths: Lengths, *, trains: bool) -> float:
    """Return the seconds of the mean pipeline stage in a pass as a share of those of the slowest one."""
    if len(model.stages) == 1:
        return 1.0
    micro, _ = micro_batch(model, passes, lengths)
    seconds = [stage.seconds for stage in (model.training(micro) if trains else model.forward(micro))]
    slowest = max(seconds)
    return sum(seconds) / len(seconds) / slowest if slowest > 0 else 1.0


Operations: TypeAlias = "tuple[tuple[Layer, tuple[float, float]], ...]"


class Optimizer(NamedTuple):
    """state: bytes of a trained weight, besides the weight itself; is_divided: over replicas. of_matrix: bytes in place
    of `state` of a weight in a matrix of a layer. operations: by layer, of its whole matrices outside of experts and of
    those in experts; empty if it computes on elements only. largest: of one matrix."""

    state: int
    of_matrix: int
    is_divided: bool
    clips: bool
    operations: Operations = ()
    largest: float = 0.0

    @classmethod
    def of(cls, model: RoleModel, itemsize: int) -> Optimizer:
        """Return the optimizer of a role's model.

        Args:
            itemsize: bytes of a weight.
        """
        assert model.optim is not None and model.chosen is not None
        chosen, copy = model.chosen, FP32 * (itemsize < FP32)
        is_divided = chosen.is_sharded
        state, of_matrix = (
            copy + sum(ITEMSIZE[dtype] for dtype in chosen.state(is_matrix=each and is_divided).values())
            for each in (False, True)
        )
        return cls(state, of_matrix, is_divided, model.optim.clip_grad > 0, *_operations(model.shape, chosen))

    def share(self, numbers: Numbers, dense: int = 1, experts: int = 1) -> tuple[float, float]:
        """Weights that a rank updates, and those of them in matrices of layers.

        Args:
            dense, experts: number of replicas of dense weights and of experts.
        """
        if not self.is_divided:
            dense = experts = 1
        of_experts = numbers.trained_experts / experts
        return numbers.trained_dense / dense + of_experts, numbers.in_matrices / dense + of_experts

    def nbytes(self, numbers: Numbers, dense: int = 1, experts: int = 1) -> float:
        """Of a rank's share."""
        own, in_matrices = self.share(numbers, dense, experts)
        return self.state * own + (self.of_matrix - self.state) * in_matrices


@lru_cache(maxsize=512)
def projections_of(layer: Layer) -> tuple[tuple[tuple[int, int, bool], int], ...]:
    """How many matrices of one size, (rows, cols) as the Hugging Face file has them, a whole layer has outside of
    experts, and in experts."""
    counts: Counter[tuple[int, int, bool]] = Counter()
    for is_expert, weights in ((False, layer.weights), (True, layer.expert_weights)):
        for weight in (weight for weight in weights if len(weight.size) == 2):
            rows, cols = weight.size
            for own in [weight.periods * projection.rows for projection in weight.projections] or [rows]:
                counts[own, cols, is_expert] += layer.num_experts if is_expert else 1
    return tuple(counts.items())


def _operations(shape: ModelShape, chosen: OptimizerKind) -> tuple[Operations, float]:
    """`Optimizer.operations` and `Optimizer.largest`."""
    if not chosen.operations(1, 1):
        return (), 0.0
    largest, operations = 0.0, []
    for layer in dict.fromkeys(shape.layers):
        sums = [0.0, 0.0]
        for (rows, cols, is_expert), number in projections_of(layer):
            of_matrix = chosen.operations(rows, cols)
            sums[is_expert] += number * of_matrix
            largest = max(largest, of_matrix)
        operations.append((layer, (sums[0], sums[1])))
    return tuple(operations), largest


def least_states(model: RoleModel) -> list[State]:
    """Bytes of each stage, with an even share of the optimizer. Cheaper than
    `hpcrl.forecast.memory.state.RoleModel.state`."""
    shape, layout, optim, states = model.shape, model.layout, model.optim, []
    sizes = (layout.tp, layout.ep, layout.etp, model.head, model.lora)
    for stage in stages_of(shape, layout.pp, layout.vpp):
        numbers = numbers_of(shape, stage, *sizes)
        held = 0 if optim is None else int(Optimizer.of(model, model.itemsize).nbytes(numbers, *replicas(layout)))
        states.append(State(numbers.all * model.itemsize, numbers.trained * FP32 * (optim is not None), held))
    return states


class Update(NamedTuple):
    """How a role is trained. num_updates: optimizer steps of a step. reduces, gathers: whether gradients are reduced,
    and weights gathered, during the passes of a micro-batch."""

    optimizer: Optimizer
    num_updates: int
    reduces: bool
    gathers: bool


@lru_cache(maxsize=4096)
def update_cost(model: PassModel, passes: Passes, update: Update, lengths: Lengths) -> Cost:
    """All optimizer steps of a step, each over `passes.samples`."""
    micro, count = micro_batch(model, passes, lengths)
    stages = model.training(micro)
    cost = pipelined(stages, count, model.layout.vpp, model.send(micro), sends=2)
    cost = cost + Cost(waiting=cost.seconds * (imbalance(passes, lengths, model.layout.dp) - 1.0))
    slowest = max(stages, key=lambda stage: stage.seconds).seconds
    backward = slowest * (2 / 3 if model.lora is None else 0.5)
    cost = cost + _replicas(model, update, backward, slowest - backward)
    return (cost + _optimizer(model, update)) * update.num_updates


def _replicas(model: PassModel, update: Update, backward: float, forward: float) -> Cost:
    """Gradients in fp32 are reduced, and if the optimizer is divided over replicas, updated weights are gathered
    (Rajbhandari et al. 2020, ZeRO, arXiv:1910.02054, section 5). Where it overlaps with a micro-batch's passes, only
    what takes longer counts; what is reduced last cannot overlap: a stage's share of one layer."""
    layout, each, network, itemsize = model.layout, model.ranks_per_node, model.network, model.units.itemsize
    groups = group_of(layout, each, "dp", "cp"), group_of(layout, each, "edp")
    reduced = gathered = 0.0
    for numbers in {*model.numbers}:
        pair = list(zip((numbers.trained_dense, numbers.trained_experts), groups, strict=True))
        collective = network.all_gather if update.optimizer.is_divided else network.all_reduce
        reduced = max(reduced, sum(collective(FP32 * count, group) for count, group in pair if count))
        if update.optimizer.is_divided:
            gathered = max(gathered, sum(network.all_gather(itemsize * count, group) for count, group in pair if count))
    layers = max(stage.num_layers for stage in model.stages)
    exposed = max(reduced / layers, reduced - backward) if update.reduces else reduced
    exposed += max(gathered / layers, gathered - forward) if update.gathers else gathered
    return Cost(communication=exposed)


def _optimizer(model: PassModel, update: Update) -> Cost:
    """An optimizer reads and writes the weights in fp32 and their state, reads gradients, and writes weights, of a
    rank's share; before it the gradients' norm is computed, and after it all gradients are set to zero. One that is not
    divided has no shares."""
    optimizer, itemsize, own = update.optimizer, model.units.itemsize, replicas(model.layout)
    whole = itemsize == FP32  # the weights themselves are what is updated
    each = FP32 + 2 * FP32 * whole + itemsize * (not whole) + FP32 * optimizer.clips
    most = max(
        2 * optimizer.nbytes(it, *own) + each * optimizer.share(it, *own)[0] + it.trained * FP32 for it in model.numbers
    )
    norm = model.network.all_reduce(FP32, group_of(model.layout, model.ranks_per_node, "tp", "cp", "dp", "pp"))
    moved = model.units.moved(most, OPTIMIZER_OPERATORS)
    return moved + Cost(communication=norm) + _matrices(model, optimizer)


def _matrices(model: PassModel, optimizer: Optimizer) -> Cost:
    """Updates of whole matrices, divided over the ranks of a stage, none over several ranks; each rank's ranges are
    sent to the owners of the matrices in fp32, and back."""
    if not optimizer.largest:
        return NOTHING
    ranks = group_of(model.layout, model.ranks_per_node, "tp", "cp", "dp")
    most = NOTHING
    for stage, numbers in zip(model.stages, model.numbers, strict=True):
        operations = dict(optimizer.operations)
        pairs = [(count * operations[layer][0], count * operations[layer][1]) for layer, count in stage.layers]
        of_dense, of_experts = (sum(each) for each in zip(*pairs, strict=True))
        computed = max(optimizer.largest, of_dense / ranks.size)
        computed += max(optimizer.largest, of_experts / ranks.size) if of_experts else 0.0
        sent = FP32 * optimizer.share(numbers, *replicas(model.layout))[1]
        cost = Cost(products=computed / model.units.flops, communication=2.0 * model.network.all_to_all(sent, ranks))
        most = max(most, cost, key=lambda cost: cost.seconds)
    return most


def copied_cost(model: PassModel, parts: tuple[str, ...], optimizer: Optimizer | None, host_copy: float) -> Cost:
    """Offloaded parts are copied to the device before a call, and back after it."""
    itemsize, held = model.units.itemsize * ("parameters" in parts), optimizer if "optimizer" in parts else None
    sizes = (it.all * itemsize + (held.nbytes(it, *replicas(model.layout)) if held else 0.0) for it in model.numbers)
    return Cost(copies=2.0 * max(sizes) / host_copy)


SIMULATED = 1024  # sequences of an engine that are scheduled one by one; of more, each stands for several
GROUPS = 12  # decode steps with about equally many running sequences are computed together
SAMPLING = 6.0  # times that sampling reads or writes the logits in fp32


class Steps(NamedTuple):
    """`num_steps` decode steps with `running` sequences each in the mean."""

    num_steps: float
    running: float


class Work(NamedTuple):
    """What one engine generates: `sequences` sequences, of which `slots` run at once. It prefills `prompts` prompts.
    All engines generate `total` sequences."""

    sequences: int
    prompts: float
    total: int
    slots: int


@dataclass(frozen=True)
class Engine:
    """A generation engine. A prefill call has at most `most_tokens` tokens. cache_itemsize: bytes of a number in the KV
    cache."""

    model: PassModel
    most_tokens: int
    cache_itemsize: int

    def steadily(self, work: Work, lengths: Lengths, running: float) -> Cost:
        """Return the cost in an engine that never stops. New sequences take the places of those that end, so that
        `running` sequences run at any time."""
        steps = Steps(work.sequences * lengths.response / running, running)
        return self.prefill(work.prompts, lengths) + self.decode([steps]) + self.cached(work.sequences, lengths)

    def prefill(self, prompts: float, lengths: Lengths) -> Cost:
        """Return the cost of prefill calls that are as full as possible."""
        tokens = prompts * lengths.prompt
        if tokens <= 0:
            return NOTHING
        calls = math.ceil(tokens / max(self.most_tokens, lengths.prompt))
        pairs = prompts * lengths.prompt * (lengths.prompt + 1) / 2
        micro = Micro(tokens / calls, pairs / calls, lengths.prompt, prompts / calls)
        return self.model.forward(micro)[0] * calls

    def decode(self, steps: Iterable[Steps]) -> Cost:
        return sum((self.step(running) * num_steps for num_steps, running in steps), NOTHING)

    def step(self, running: float) -> Cost:
        """Return the cost of one token for each of the running sequences, without reads of the KV cache.

        All weights are read, and each operator is launched. Then logits are gathered and sampled from (Pope et al.
        2022, arXiv:2211.05102, section 2).
        """
        model, shape = self.model, self.model.shape
        logits = running * shape.padded_vocab_size * FP32
        tp = group_of(model.layout, model.ranks_per_node, "tp")
        sampling = model.units.moved(SAMPLING * logits, 0)
        gathered = Cost(communication=model.network.all_gather(logits, tp))
        return model.forward(Micro(running, 0.0, 1.0, running))[0] + sampling + gathered

    def cached(self, sequences: float, lengths: Lengths) -> Cost:
        """Return the cost of attention over the KV cache. Reading a cached token takes the larger of the time of its
        bytes and that of its operations."""
        units, seconds = self.model.units, 0.0
        for it, count in computations_of(self.model):
            moving = it.cached_width * self.cache_itemsize / units.bandwidth
            computing = 2.0 * it.decode_width / units.attended.flops
            read = lengths.cached if it.sees is None else min(lengths.cached, it.sees * lengths.response)
            seconds += sequences * read * count * max(moving, computing)
        return Cost(attention=seconds)


def computations_of(model: PassModel) -> list[tuple[Computation, int]]:
    """Return the computation of each kind of block for a token, and how many layers have the block."""
    token = model.batch(Micro(1.0, 0.0, 1.0, 1.0))
    return [(block.computation(token), count) for block, count in blocks_of(model.shape.layers).items()]


@lru_cache(maxsize=1024)
def generation_cost(engine: Engine, work: Work, lengths: Lengths) -> Cost:
    """Return the cost until the last sequence has ended, of the engine that has the longest one."""
    if work.sequences == 0:
        return NOTHING
    steps = schedule(lengths, work.sequences, work.slots, work.total)
    return engine.prefill(work.prompts, lengths) + engine.decode(steps) + engine.cached(work.sequences, lengths)


@lru_cache(maxsize=256)
def schedule(lengths: Lengths, sequences: int, slots: int, total: int) -> tuple[Steps, ...]:
    """Decode steps of an engine whose `slots` are taken by its sequences, first come, first served, until all have
    ended (continuous batching: Yu et al. 2022, Orca, section 4). Its longest response is the longest of `total`."""
    each = max(1.0, sequences / SIMULATED)
    drawn = list(lengths.drawn(round(sequences / each)))
    order = [drawn[place] for place in spread(len(drawn))]
    longest = order.index(drawn[-1])
    order[longest] = max(drawn[-1], round(lengths.longest(total)))
    return grouped(occupied(order, max(1, round(slots / each))), each)


def occupied(responses: Iterable[int], slots: int) -> list[Steps]:
    """Steps with equally many running sequences, in their order in time."""
    waiting = list(responses)[::-1]
    ends: list[int] = []
    steps, now = [], 0
    while waiting or ends:
        while waiting and len(ends) < slots:
            heapq.heappush(ends, now + waiting.pop())
        first = ends[0]
        steps.append(Steps(first - now, len(ends)))
        now = first
        while ends and ends[0] == now:
            heapq.heappop(ends)
    return steps


def grouped(steps: Iterable[Steps], each: float = 1.0) -> tuple[Steps, ...]:
    """At most GROUPS groups of steps whose running sequences are about as many; their total is unchanged."""
    ordered = sorted(steps, key=lambda it: it.running)
    if not ordered:
        return ()
    ratio = max(ordered[-1].running / ordered[0].running, 1.0)
    groups: dict[int, tuple[float, float]] = {}
    distinct = {it.running: place for place, it in enumerate(ordered)}
    for it in ordered:
        place = distinct[it.running]
        if len(distinct) > GROUPS:
            place = min(GROUPS - 1, int(GROUPS * math.log(it.running / ordered[0].running) / math.log(ratio)))
        count, tokens = groups.get(place, (0.0, 0.0))
        groups[place] = count + it.num_steps, tokens + it.num_steps * it.running
    return tuple(Steps(count, each * tokens / count) for count, tokens in groups.values())
