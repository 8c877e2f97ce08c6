"""Seconds of generation: prefill, and decode steps over the sequences that still run."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from hpcrl.forecast.memory.state import FP32
from hpcrl.forecast.time.collectives import group_of
from hpcrl.forecast.time.cost import NOTHING, Cost
from hpcrl.forecast.time.lengths import Lengths, spread
from hpcrl.forecast.time.passes import Micro, PassModel
from hpcrl.model.blocks.block import blocks_of
from hpcrl.model.blocks.micro_batch import Computation

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
    """A generation engine. A prefill call has at most `most_tokens` tokens."""

    model: PassModel
    most_tokens: int

    def generate(self, work: Work, lengths: Lengths) -> Cost:
        """Return the cost until the last sequence has ended, of the engine that has the longest one."""
        return generation_cost(self, work, lengths)

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
        found = NOTHING
        for num_steps, running in steps:
            found = found + self.step(running) * num_steps
        return found

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
            moving = it.cached_width * units.itemsize / units.bandwidth
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
    found, now = [], 0
    while waiting or ends:
        while waiting and len(ends) < slots:
            heapq.heappush(ends, now + waiting.pop())
        first = ends[0]
        found.append(Steps(first - now, len(ends)))
        now = first
        while ends and ends[0] == now:
            heapq.heappop(ends)
    return found


def grouped(steps: Iterable[Steps], each: float = 1.0) -> tuple[Steps, ...]:
    """At most GROUPS groups of steps whose running sequences are about as many; their total is unchanged."""
    ordered = sorted(steps, key=lambda it: it.running)
    if not ordered:
        return ()
    ratio = max(ordered[-1].running / ordered[0].running, 1.0)
    found: dict[int, tuple[float, float]] = {}
    distinct = {it.running: place for place, it in enumerate(ordered)}
    for it in ordered:
        place = distinct[it.running]
        if len(distinct) > GROUPS:
            place = min(GROUPS - 1, int(GROUPS * math.log(it.running / ordered[0].running) / math.log(ratio)))
        count, tokens = found.get(place, (0.0, 0.0))
        found[place] = count + it.num_steps, tokens + it.num_steps * it.running
    return tuple(Steps(count, each * tokens / count) for count, tokens in found.values())
