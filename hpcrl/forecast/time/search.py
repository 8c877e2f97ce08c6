"""Search for the fastest layouts of a job: enumerate, prune by memory, combine, predict.

For each placement of the roles and each way of recomputing:

1. Each role has its layouts, micro-batches and offloads on its ranks. A choice that does not fit by the least bytes of
   its state, or then with its activations, is dropped; the others get their seconds by part of the step.
2. Of each role, and of all roles but the actor and the engine together, the choices are kept that no other one beats
   in seconds and in bytes.
3. The kept choices of actor, engine and other roles are combined. For each layout of actor and engine the fastest
   combination that fits by the least bytes is kept.

The fastest combinations are predicted as `hpcrl plan` predicts them. In the order of the predictions their memory is
computed exactly, until enough of them fit.

HybridFlow's mapping (Sheng et al. 2024, arXiv:2409.19256, section 6, algorithm 1) is alike: it enumerates sets of
colocated models, takes each model's fastest layout for each number of ranks, and estimates the step by simulation. Here
layouts of colocated roles are chosen together, because the fastest one of each may not fit beside the others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, reduce
from itertools import islice, product
from typing import NamedTuple

import numpy as np

from hpcrl.config.roles import KEYS, Part, offloaded
from hpcrl.config.schema import Config
from hpcrl.config.yaml_core import ConfigError
from hpcrl.forecast.memory.fixes import tightest
from hpcrl.forecast.memory.memory import Row, TrainingPlan, with_keys
from hpcrl.forecast.time.candidates import GRANULARITY, Keys, Placement, Probe, Space
from hpcrl.forecast.time.cost import fitted
from hpcrl.forecast.time.lengths import Lengths
from hpcrl.forecast.time.phases import JobTimes, Timed
from hpcrl.forecast.time.step import Prediction, predict
from hpcrl.machine.machine_file import Machine
from hpcrl.runtime.exits import InputError

KEPT = 5  # results
PREDICTED = 60  # combinations that are predicted at a time, the fastest by the sum of their phases
ROOM = (1.0, 0.97, 0.9)  # of the memory, with which combinations are chosen: the exact bytes are a few more
GRAINS = 32  # of a GPU's memory: smaller differences between choices do not count

# Columns of a table: seconds by part of a synchronous step; bytes of a role's first and last stage while other roles
# work; and bytes more while it works.
PARTS = ("generate", "score", "forward", "advantages", "train")
SECONDS, IDLE, EXTRA, WIDTH = slice(0, 5), slice(5, 7), slice(7, 9), 9
PART_OF = {"gen": "generate", "gen_max": "generate", "judge": "score", "reward": "score", "adv": "advantages"}


class Result(NamedTuple):
    """row: the fullest one."""

    job: TrainingPlan
    prediction: Prediction
    row: Row


@dataclass(frozen=True, eq=False)
class Choice:
    """A role's layout, micro-batch and offload; of the engine the layout and the KV cache."""

    keys: Keys
    grid: tuple[object, ...]
    probe: Probe


class Choices(NamedTuple):
    """Choices of a role, or of several on the same ranks, and a row of the table for each."""

    chosen: list[tuple[Choice, ...]]
    table: np.ndarray

    def undominated(self, grain: float) -> Choices:
        """The fastest first, without those that another one equals or beats in each column. Bytes that differ by less
        than a grain are equal."""
        rounded, kept = self.table.copy(), list[int]()
        rounded[:, SECONDS.stop :] = np.ceil(rounded[:, SECONDS.stop :] / grain)
        for row in np.argsort(self.table[:, SECONDS].sum(1), kind="stable"):
            if not (rounded[kept] <= rounded[row]).all(1).any():
                kept.append(row)
        return Choices([self.chosen[row] for row in kept], self.table[kept])

    def beside(self, other: Choices) -> Choices:
        """All pairs with choices of another role."""
        mine, its = self.table[:, None], other.table[None]
        table = np.where(np.arange(WIDTH) < EXTRA.start, mine + its, np.maximum(mine, its))
        return Choices([(*one, *two) for one, two in product(self.chosen, other.chosen)], table.reshape(-1, WIDTH))


class Combination(NamedTuple):
    """room: the share of the memory that it may take. seconds: the sum of its phases, without refit and saves. layout:
    what differs between results."""

    room: float
    seconds: float
    layout: tuple[Placement, tuple[object, ...], tuple[object, ...]]
    chosen: list[Keys]


class Search:
    """A search on a fixed number of nodes. counts: of `all` combinations, those that are too `full`; those whose exact
    memory was `computed`."""

    def __init__(self, space: Space, machine: Machine, lengths: Lengths) -> None:
        self.space, self.machine, self.lengths, self.counts = space, machine, lengths, Counter[str]()
        self._grain = space.limit / GRAINS
        self._choices, self._generation = cache(self._choices_of), cache(self._generation_of)

    def run(self) -> list[Result]:
        """The fastest candidates, each with another placement, or another layout of the actor or the engine."""
        frames = product(self.space.placements(), self.space.granularities)
        combinations = sorted((it for frame in frames for it in self._combinations(*frame)), key=lambda it: it.seconds)
        best = {(it.room, it.layout): it for it in reversed(combinations)}
        ranked = iter(sorted({(it.seconds, it.layout): it for it in best.values()}.values(), key=lambda it: it.seconds))
        found: dict[object, Result] = {}
        while not found and (few := list(islice(ranked, PREDICTED))):
            for layout, job, prediction in sorted(self._predicted(few), key=lambda it: it[-1].seconds):
                if layout not in found and len(found) < KEPT:
                    self.counts["computed"] += 1
                    if (row := tightest(job.rows())).total <= self.space.limit:
                        found[layout] = Result(job, prediction, row)
        return [*found.values()]

    def _predicted(self, few: Iterable[Combination]) -> Iterator[tuple[object, TrainingPlan, Prediction]]:
        """Those that pass the job's own checks."""
        for it in few:
            keys = self.space.joined(it.layout[0], it.chosen)
            job = TrainingPlan(with_keys(self.space.template, keys), self.space.own_roles)
            with suppress(ConfigError, InputError):
                yield it.layout, job, predict(job, self.machine, self.lengths)

    def _combinations(self, placement: Placement, granularity: str | None) -> Iterator[Combination]:
        """For each layout of actor and engine, and each share of the memory, the fastest combination that fits."""
        actors, others, engines = (
            self._choices(roles, self.space.place(placement, roles), placement.mode, granularity)
            for roles in (("actor",), self.space.others, ("rollout",))
        )
        for (engine,), row in zip(*engines, strict=True) if actors.chosen and others.chosen else ():
            seconds, nbytes = self._times_and_sizes(placement, actors.table, others.table, engine, row)
            self.counts += Counter(all=seconds.size, full=int((nbytes > self.space.limit).sum()))
            for room in ROOM:
                fitting = np.where(nbytes <= room * self.space.limit, seconds, np.inf)
                for (actor,), at, its in zip(actors.chosen, fitting.argmin(1), fitting.min(1), strict=True):
                    if its < np.inf:
                        keys = [{GRANULARITY: granularity}, *(it.keys for it in (actor, engine, *others.chosen[at]))]
                        yield Combination(room, float(its), (placement, actor.grid, engine.grid), keys)

    def _times_and_sizes(
        self, placement: Placement, actor: np.ndarray, others: np.ndarray, engine: Choice, row: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Seconds of a step, and bytes of the fullest rank, for each choice of the actor and each of the others."""
        tables = {"actor": actor[:, None], **dict.fromkeys(self.space.others[:1], others[None])}
        split, most = [], np.zeros((len(actor), len(others)))
        for roles, _ in placement.sets:
            own = [its for role, its in tables.items() if role in roles]
            table = reduce(np.add, own, np.zeros((1, 1, WIDTH)))
            if "rollout" in roles:
                grains, places = np.unique(np.rint(table[..., IDLE].max(-1) / self._grain), return_inverse=True)
                table_of = np.array([self._generation(engine, grain) for grain in grains])
                generated = table_of[places.reshape(table.shape[:-1])]
                table = table + row + np.pad(generated[..., SECONDS], ((0, 0), (0, 0), (0, WIDTH - len(PARTS))))
                most = np.maximum(most, generated[..., -1])
            for its in own:
                most = np.maximum(most, (table[..., IDLE] + its[..., EXTRA]).max(-1))
            split.append(table[..., SECONDS])
        if placement.mode != "sync":  # roles on ranks of their own overlap over steps
            split = [its.sum(-1, keepdims=True) for its in split]
        return np.broadcast_to(reduce(np.maximum, split).sum(-1), most.shape), most

    def _generation_of(self, engine: Choice, grain: float) -> list[float]:
        """Seconds by part, and bytes of an engine's rank, beside other models of so many grains."""
        nbytes = int(grain * self._grain) if grain else 0
        times = JobTimes(engine.probe, self.machine, self.lengths, nbytes)
        return [*self._seconds(times.without_saves(), times), engine.probe.generating(nbytes)]

    def _choices_of(self, roles: tuple[str, ...], ranks: range, mode: str, granularity: str | None) -> Choices:
        """The choices of roles on the same ranks, but for those that another one equals or beats."""
        if len(roles) != 1:
            each = (self._choices((role,), ranks, mode, granularity) for role in roles)
            none = Choices([()], np.zeros((1, WIDTH)))
            return reduce(lambda some, more: some.beside(more).undominated(self._grain), each, none)
        if granularity is not None and not self.space.specs[roles[0]].trains:
            return self._choices(roles, ranks, mode, None)
        config = with_keys(self.space.base.config, {GRANULARITY: granularity, "async_training.mode": mode})
        rows = list(self._rows(roles[0], config, ranks))
        choices = Choices([it for it, _ in rows], np.array([it for _, it in rows]).reshape(-1, WIDTH))
        return choices if roles == ("rollout",) else choices.undominated(self._grain)

    def _rows(self, role: str, config: Config, ranks: range) -> Iterator[tuple[tuple[Choice], list[float]]]:
        """The choices of a role that fit on its ranks, with their rows of the table."""
        space, spec = self.space, self.space.specs[role]
        offloads = [(moved, offloaded(with_keys(config, moved), spec)) for moved in space.offloads(role)]
        for grid, work in product(space.grids(role, len(ranks)), space.work(role)):
            probe = space.probe(role, config, ranks, {**grid, **work})
            times, timed = JobTimes(probe, self.machine, self.lengths), list[Timed]()
            # Activations take longer to compute than the state, which is all on the device while a role works.
            for moved, away in offloads if max(state.total for state in probe.ends) <= space.limit else ():
                sizes = probe.sizes(away)
                if max(np.add(sizes[:2], sizes[2:])) > space.limit:
                    continue
                timed = timed or [it for it in times.without_saves() if it.role == role != "rollout"]
                seconds = self._seconds(timed, times, away)
                choice = Choice({**grid, **work, **moved}, tuple(grid.values()), probe)
                yield (choice,), [*seconds, *sizes]

    def _seconds(self, timed: Sequence[Timed], times: JobTimes, away: Collection[Part] = ()) -> list[float]:
        """Seconds of a role by part of the step. away: what is copied from host memory for its phases."""
        costs = [(it.name, it.kind, it.cost) for it in timed]
        costs += [(phase.name, phase.kind, times.copied(phase, away)) for phase in times.job.phases if away]
        seconds = dict.fromkeys(PARTS, 0.0)
        for name, kind, cost in costs:
            seconds[PART_OF.get(name, kind)] += fitted(cost, self.machine, name).seconds
        return [*seconds.values()]


def leanest(space: Space) -> tuple[str, int]:
    """The fullest phase, and its least bytes, of about the candidate that takes least: all roles on all ranks,
    everything offloaded and recomputed, and of each role one sequence and the layout with the smallest peak."""
    config, ranks = with_keys(space.base.config, {GRANULARITY: "full"}), range(space.num_ranks)
    chosen, idle = list[tuple[Probe, np.ndarray]](), np.zeros(2, int)
    for role in space.specs:
        least = space.work(role)[0]
        probes = [space.probe(role, config, ranks, {**grid, **least}) for grid in space.grids(role, len(ranks))]
        pairs = [(probe, np.reshape(probe.sizes(tuple(KEYS)), (2, 2))) for probe in probes]
        chosen.append(min(pairs, key=lambda it: (it[1].sum(0).max(), -it[0].derived.roles[it[0].role].tp)))
        idle += chosen[-1][1][0]
    nbytes = {probe.phases[-1].name: int((idle + extra).max()) for probe, (_, extra) in chosen if probe.phases}
    engine, (weights, _) = next(it for it in chosen if it[0].role == "rollout")
    nbytes["rollout"] = engine.generating(int((idle - weights).max()))
    return max(nbytes.items(), key=lambda it: it[1])
