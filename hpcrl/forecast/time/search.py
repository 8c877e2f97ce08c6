"""Search for the fastest layouts of a job: best first, pruned by memory and by a lower bound of the step.

A candidate is a placement of the roles, a way of recomputing, and a choice for each role: layout, micro-batch, offload.
A node of the search tree has choices for the first roles; its bound is the time of a step in which each role that is
left has its fastest choice, and takes least memory from the KV cache. Nodes are visited in the order of their bounds,
so nothing is faster than the results as soon as a bound reaches them. A large space may have more candidates near the
best than can be computed: then the search ends after `MOST_COMPUTED` of them, and says how much faster another one
could be.

HybridFlow's mapping (Sheng et al. 2024, arXiv:2409.19256, section 6, algorithm 1) is alike: it enumerates sets of
colocated models, gives each set at least the ranks that its memory needs, takes each model's fastest layout on so many
ranks, once for each number of them, and estimates the step by simulation. Different here: layouts of colocated roles
are chosen together, because the fastest one of each may not fit beside the others; memory is that of `hpcrl plan`, with
activations and offload; micro-batches, recomputation, offload and the KV cache are chosen, too; only what does not fit,
what is slower and as large as another choice, or what a bound excludes is dropped. Theirs has any number of sets and
sizes; here there are at most three sets, of multiples of a quarter of the nodes.
"""

from __future__ import annotations

import heapq
import itertools
import math
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import NamedTuple

from hpcrl.config.roles import KEYS, Part
from hpcrl.config.schema import Config
from hpcrl.forecast.memory.fixes import tightest
from hpcrl.forecast.memory.memory import Row, TrainingPlan, with_keys
from hpcrl.forecast.time.candidates import Candidate, Choice, Memo, Probe, Split, families, least_split, undominated
from hpcrl.forecast.time.cost import fitted
from hpcrl.forecast.time.lengths import Lengths
from hpcrl.forecast.time.phases import JobTimes, Timed, least_phases
from hpcrl.forecast.time.space import Keys, Placement, Space
from hpcrl.forecast.time.step import Prediction, lower_bound, predict
from hpcrl.machine.machine_file import Machine
from hpcrl.runtime.exits import is_user_error

KEPT = 5  # results
MOST_COMPUTED = 150  # candidates whose memory is computed exactly
FEW = 6  # candidates that are computed for each result that a search begins with
NEAR = 1.1  # further results are looked for first among those that take less than so many times as long as the fastest
FIRST = ("actor", "rollout")  # roles whose layouts differ between results
SPLIT = ("generate", "forward", "train")  # kinds of phases that are a role's own
PART_OF = {"gen": "generate", "gen_max": "generate", "judge": "score", "reward": "score", "adv": "advantages"}


@dataclass
class Counts:
    """frames: placements and ways of recomputing; opened: those whose choices were made. too_large: choices of a role
    that do not fit even if it has its ranks for itself; too_slow: those with which no step is as fast as the results;
    dominated: those that are slower than another one and take no less memory. The rest counts candidates, which have a
    choice of each role. by_memory, by_bound: excluded; rejected: by the job's own checks; evaluated: those whose step
    was predicted."""

    frames: int = 0
    opened: int = 0
    too_large: int = 0
    too_slow: int = 0
    dominated: int = 0
    all: int = 0
    by_memory: int = 0
    rejected: int = 0
    evaluated: int = 0

    @property
    def by_bound(self) -> int:
        return self.all - self.by_memory - self.rejected - self.evaluated


@dataclass(frozen=True)
class Result:
    keys: Keys  # all that a candidate sets
    job: TrainingPlan
    prediction: Prediction
    row: Row  # the fullest one
    layout: tuple[object, ...]  # placement, and layouts of actor and rollout

    @property
    def left(self) -> int | None:
        """Bytes of a GPU."""
        return None if self.job.capacity is None else self.job.capacity - self.row.total


@dataclass(frozen=True)
class Found:
    """The fastest candidates, each with another placement, or another layout of the actor or the engine. bound: no
    other candidate is faster, in seconds."""

    results: list[Result]
    counts: Counts
    bound: float


class Frame(NamedTuple):
    """A part of the space: choices of each role, the fastest first. fastest: of each role the least of each part."""

    placement: Placement
    common: Keys
    choices: tuple[list[Choice], ...] = ()
    fastest: tuple[Split, ...] = ()
    idle: Mapping[str, int] = MappingProxyType({})  # of each role the least

    def below(self, depth: int) -> int:
        """Candidates with the same choices of the first roles."""
        return math.prod(len(each) for each in self.choices[depth:])


class _OutOfTime(Exception):
    """A search has taken its seconds."""


@dataclass
class Search:
    """A search on a fixed number of nodes.

    kept: results. most: candidates that are computed. faster_than: seconds of a step; slower ones are not looked for.
    seconds: of CPU time that the search takes at most; how far it gets in them depends on the machine.
    """

    space: Space
    machine: Machine
    lengths: Lengths
    kept: int = KEPT
    most: float = MOST_COMPUTED
    faster_than: float = math.inf
    seconds: float = math.inf
    counts: Counts = field(default_factory=Counts)

    def __post_init__(self) -> None:
        roles = list(self.space.specs)
        self.roles = [*FIRST, *(role for role in roles if role not in FIRST)]
        self._choices: dict[tuple[object, ...], tuple[float, list[Choice], Counts]] = {}
        self._floors: dict[tuple[object, ...], Split] = {}
        self._splits: dict[tuple[object, ...], Split] = {}
        self._moved: dict[tuple[object, ...], float] = {}
        self._generated: dict[tuple[object, ...], Split] = {}
        self._memo, self._found, self._computed = Memo(), dict[tuple[object, ...], Result](), 0
        self._ceiling = math.inf  # seconds above which nothing is looked for yet

    def run(self) -> Found:
        """What the search finds; again after another value of `kept`, what it has computed is used."""
        self._deadline, self._reached = time.process_time() + self.seconds, 0.0
        self._computed = 0
        with suppress(_OutOfTime):
            if not self._found:
                self._begin_with_fewer()
            has_few = 0 < len(self._found) < self.kept
            for ceiling in [NEAR * self._seconds()[0], math.inf] if has_few else [math.inf]:
                self._ceiling, self.counts = ceiling, Counts()
                self._visit()
                num_near = sum(seconds < ceiling for seconds in self._seconds())
                if num_near >= self.kept or self._computed >= self.most:
                    break
        for name in ("too_large", "too_slow", "dominated"):
            setattr(self.counts, name, sum(getattr(counts, name) for _, _, counts in self._choices.values()))
        results = sorted(self._found.values(), key=lambda it: it.prediction.seconds)[: self.kept]
        return Found(results or self._only_one(), self.counts, self._reached)

    def _begin_with_fewer(self) -> None:
        """Find results in a small part of the space first: what is slower need not be looked at in the whole one."""
        space = self.space
        fewer = replace(space.knobs, micro_batches=False, offload=False, kv_cache=False, recompute=False, pools=False)
        if fewer == space.knobs:
            return
        part = Space(space.template, space.num_ranks // space.per_node, fewer, space.own_roles)
        seconds = max(0.0, self._deadline - time.process_time())
        most = min(self.most, FEW * self.kept)
        first = Search(part, self.machine, self.lengths, self.kept, most, self.faster_than, seconds)
        first.run()
        self._found |= first._found

    def _visit(self) -> None:
        """Visit nodes of the tree until nothing is faster than the results."""
        waiting: list[tuple[float, int, Frame, tuple[Choice, ...] | None]] = []  # None: choices are not made yet
        numbers = itertools.count()  # of two equal bounds the earlier one is first
        for placement in self.space.placements():
            for common in self.space.common():
                self.counts.frames += 1
                frame = Frame(placement, common)
                heapq.heappush(waiting, (self._floor(frame), next(numbers), frame, None))
        while waiting:
            self._check_time()
            bound, _, frame, chosen = heapq.heappop(waiting)
            self._reached = bound
            if bound >= self._limit():
                break
            if chosen is None:
                made = self._with_choices(frame)
                if all(made.choices):
                    heapq.heappush(waiting, (max(bound, self._bound(made, ())), next(numbers), made, ()))
            elif bound >= self._limit(frame, chosen):
                continue
            elif not self._may_fit(frame, chosen):
                self.counts.by_memory += frame.below(len(chosen))
            elif len(chosen) < len(self.roles):
                for longer in ((*chosen, choice) for choice in frame.choices[len(chosen)]):
                    if (its := self._bound(frame, longer)) < self._limit(frame, longer):
                        heapq.heappush(waiting, (its, next(numbers), frame, longer))
            elif self._computed >= self.most:
                break
            else:
                self._evaluate(frame, chosen)
        else:
            self._reached = math.inf

    def _check_time(self) -> None:
        if time.process_time() >= self._deadline:
            raise _OutOfTime

    def _only_one(self) -> list[Result]:
        """The leanest candidate, if it fits: the fastest ones that were computed did not."""
        space, is_limited = self.space, min(self.faster_than, self.seconds) < math.inf
        if (
            is_limited
            or space.capacity is None
            or "sync" not in (space.knobs.modes or (space.template.async_training.mode,))
        ):
            return []
        keys, job = leanest(space)
        row = fullest(job, space.capacity)
        if row.total > space.capacity:
            return []
        return [Result(keys, job, predict(job, self.machine, self.lengths), row, ())]

    def _with_choices(self, frame: Frame) -> Frame:
        limit, placement = self._limit(), frame.placement
        choices = []
        for role in self.roles:
            # In a step, roles on the same ranks follow each other.
            beside = sum(sum(self._floor_of(other, frame)) for other in placement.roles_beside(role))
            choices.append(self._choices_of(role, placement, frame.common, limit - beside))
        made = frame._replace(choices=tuple(choices))
        self.counts.opened += 1
        self.counts.all += made.below(0)
        fastest = tuple(least_split(choice.split for choice in each) for each in choices)
        idle = {role: min((it.idle for it in each), default=0) for role, each in zip(self.roles, choices, strict=True)}
        return made._replace(fastest=fastest, idle=idle)

    def _floor(self, frame: Frame) -> float:
        """Seconds of a step at least, before the layouts of models are looked at: all operations at the full rate of a
        role's ranks, and the engine's fastest choice."""
        splits = tuple(self._floor_of(role, frame) for role in self.roles)
        return self._bound(frame._replace(fastest=splits), ())

    def _floor_of(self, role: str, frame: Frame) -> Split:
        if role == "rollout":
            return least_split(choice.split for choice in self._choices_of(role, frame.placement, frame.common))
        key = "floor", role, frame.placement.of(role)[1], frame.placement.mode
        if key not in self._floors:
            first, count = frame.placement.of(role)
            config = with_keys(self.space.base.config, {"async_training.mode": frame.placement.mode})
            ranks = tuple(range(first, first + count))
            probe = Probe(config, self.space.own_roles, base=self.space.base, role=role, ranks=ranks)
            self._floors[key] = self._split(
                probe, least_phases(JobTimes(probe, self.machine, self.lengths)), exact=False
            )
        return self._floors[key]

    def _choices_of(self, role: str, placement: Placement, common: Keys, most: float = math.inf) -> list[Choice]:
        """A role's choices that take less than `most` seconds of a step, and perhaps others, the fastest first; the
        same for all placements with as many ranks at the same place of a node."""
        first, count = placement.of(role)
        first %= self.space.per_node
        trains = self.space.specs[role].trains
        key = role, first, count, placement.mode, tuple(common.items()) if trains else ()
        known, few, _ = self._choices.get(key, (-math.inf, [], Counts()))
        if known < most:
            config = with_keys(self.space.base.config, {**common, "async_training.mode": placement.mode})
            ranks, counts = tuple(range(first, first + count)), Counts()
            made = list(self._made(role, config, ranks, tuple(common.values()), most, counts))
            if role == "rollout":
                few = families(made)
            else:
                few = undominated(made, by_grid=role == "actor")
                counts.dominated = len(made) - len(few)
            self._choices[key] = most, few, counts
        return few

    def _made(
        self, role: str, config: Config, ranks: tuple[int, ...], common: tuple[object, ...], most: float, counts: Counts
    ) -> Iterator[Choice]:
        """The choices whose state may fit, which is computed first, and that take less than `most` seconds."""
        space, capacity = self.space, self.space.capacity
        offloads = space.offloads(role)

        def probe(keys: Keys) -> Probe:
            return Probe(with_keys(config, keys), space.own_roles, base=space.base, role=role, ranks=ranks)

        for grid in space.grids(role, ranks[0], len(ranks)):
            works = [(work, probe({**grid, **work, **offloads[0]})) for work in space.work(role)]
            everything = self._parts(role, dict.fromkeys(offloads[-1], True))
            if capacity is not None and Choice(grid, works[0][1], memo=self._memo, away=everything).state > capacity:
                counts.too_large += len(works) * len(offloads)
                continue
            for work, own in works:
                times = JobTimes(own, self.machine, self.lengths)
                shared = role, len(ranks), *common, *grid.values(), *work.values()
                split: Split | None = None
                for place, moved in enumerate(offloads):
                    self._check_time()
                    choice = Choice({**grid, **work, **moved}, own, shared=shared, memo=self._memo)
                    if place:
                        choice.away = self._parts(role, moved)
                    if capacity is not None and (choice.state > capacity or choice.peak > capacity):
                        counts.too_large += 1
                        continue
                    if split is None:
                        key = *shared, ranks[0], config.async_training.mode
                        split = self._splits.get(key) or self._split(own, times.without_saves())
                        self._splits[key] = split
                    choice.split = self._with_copies(split, times, choice.away or ())
                    if sum(choice.split) < most:
                        yield choice
                    elif place == 0:  # it offloads nothing, so the others are slower still
                        counts.too_slow += len(offloads)
                        break
                    else:
                        counts.too_slow += 1

    def _parts(self, role: str, moved: Keys) -> tuple[Part, ...]:
        path = self.space.specs[role].path
        return tuple(part for part, key in KEYS.items() if moved.get(f"{path}.{key}"))

    def _with_copies(self, split: Split, times: JobTimes, away: Collection[Part]) -> Split:
        """The seconds of a choice, from those of the same one that offloads nothing."""
        seconds = split._asdict()
        for phase in times.job.phases if away else ():
            cost = fitted(times.copied(phase, away), self.machine, phase.name)
            seconds[PART_OF.get(phase.name, phase.kind)] += cost.seconds
        return Split(**seconds)

    def _split(self, probe: Probe, timed: Sequence[Timed], *, exact: bool = True) -> Split:
        """exact: before the machine's efficiency, as `JobTimes` has phases."""
        seconds = dict.fromkeys(Split._fields, 0.0)
        for it in timed:
            if it.role == probe.role and it.kind in SPLIT:
                cost = fitted(it.cost, self.machine, it.name) if exact else it.cost
                seconds[PART_OF.get(it.name, it.kind)] += cost.seconds
        return Split(**seconds)

    def _bound(self, frame: Frame, chosen: Sequence[Choice]) -> float:
        """Seconds that a step takes at least."""
        splits = [*(choice.split for choice in chosen), *frame.fastest[len(chosen) :]]
        if len(chosen) >= len(FIRST):
            splits[FIRST.index("rollout")] = self._generating(frame, chosen)
        by_role = dict(zip(self.roles, splits, strict=True))
        sets = [[by_role[role] for role in roles] for roles in frame.placement.sets]
        if frame.placement.mode == "sync":
            parts = zip(*([sum(part) for part in zip(*each, strict=True)] for each in sets), strict=True)
            moving = self._moving(frame, chosen) if len(chosen) >= len(FIRST) else 0.0
            return sum(map(max, parts)) + moving
        return max(sum(map(sum, each)) for each in sets)

    def _generating(self, frame: Frame, chosen: Sequence[Choice]) -> Split:
        """The engine's seconds with the KV cache that other models leave, which take as little as they can if they are
        not chosen yet; of a family the least."""
        engine, by_role = chosen[FIRST.index("rollout")], dict(zip(self.roles, chosen, strict=False))
        roles = frame.placement.roles_beside("rollout")
        resident = sum(by_role[role].resident if role in by_role else frame.idle[role] for role in roles)
        return least_split(self._generated_by(each, resident, frame.placement.mode) for each in engine.members)

    def _generated_by(self, engine: Choice, resident: int, mode: str) -> Split:
        """resident: bytes of other models."""
        times = JobTimes(engine.probe, self.machine, self.lengths, resident)
        ranks = engine.probe.ranks
        key = engine.grid, ranks[0], len(ranks), mode, times.work.slots
        if key not in self._generated:
            self._generated[key] = self._split(engine.probe, times.without_saves())
        return self._generated[key]

    def _moving(self, frame: Frame, chosen: Sequence[Choice]) -> float:
        """Seconds of a synchronous step's refit and saves, which depend on the placement, the actor and the engine."""
        key = *self._layout(frame, chosen), "parameters" in chosen[0].offloaded_parts
        if key not in self._moved:
            keys = self.space.joined(frame.placement, {}, [choice.keys for choice in chosen[: len(FIRST)]])
            job = Candidate(with_keys(self.space.base.config, keys), self.space.own_roles)
            times = JobTimes(job, self.machine, self.lengths)
            try:
                found = [times.refit(), *times.saves()]
            except Exception as error:
                if not is_user_error(error):
                    raise
                found = []
            self._moved[key] = sum(fitted(it.cost, self.machine, it.name).seconds for it in found)
        return self._moved[key]

    def _limit(self, frame: Frame | None = None, chosen: Sequence[Choice] = ()) -> float:
        """Seconds from which on candidates are not looked at: they change no result, or are not near it."""
        seconds = self._seconds()
        limit = min(self._ceiling, seconds[self.kept - 1] if len(seconds) >= self.kept else self.faster_than)
        if frame is not None and len(chosen) >= len(FIRST):
            same = self._found.get(self._layout(frame, chosen))
            return limit if same is None else min(limit, same.prediction.seconds)
        return limit

    def _seconds(self) -> list[float]:
        """Seconds of a step of the results, ascending."""
        return sorted(result.prediction.seconds for result in self._found.values())

    def _layout(self, frame: Frame, chosen: Sequence[Choice]) -> tuple[object, ...]:
        return frame.placement, *(choice.grid for choice in chosen[: len(FIRST)])

    def _may_fit(self, frame: Frame, chosen: Sequence[Choice]) -> bool:
        """Whether the chosen roles fit on their ranks, if the others take as little as they can. State comes first,
        because activations take longer to compute."""
        capacity = self.space.capacity
        if capacity is None or not chosen:
            return True
        by_role = dict(zip(self.roles, chosen, strict=False))
        idle = {role: by_role[role].idle if role in by_role else frame.idle[role] for role in self.roles}
        for size in ("state", "peak"):
            for roles in frame.placement.sets:
                taken = sum(idle[role] for role in roles)
                if any(
                    taken - idle[role] + getattr(by_role[role], size) > capacity for role in roles if role in by_role
                ):
                    return False
        if "rollout" not in by_role:
            return True
        beside = sum(idle[role] for role in frame.placement.roles_beside("rollout"))
        return by_role["rollout"].members[0].probe.generating(beside, idle["rollout"]) <= capacity

    def _evaluate(self, frame: Frame, chosen: Sequence[Choice]) -> None:
        """Compute the candidate with the KV cache that is the fastest of those that fit, of equals the smallest."""
        place = FIRST.index("rollout")
        each = [(*chosen[:place], engine, *chosen[place + 1 :]) for engine in chosen[place].members]
        bounds = [self._bound(frame, its) for its in each]
        for bound, its in sorted(zip(bounds, each, strict=True), key=lambda it: it[0]):
            if bound >= self._limit(frame, its) or (self._may_fit(frame, its) and self._is_possible(frame, its)):
                return
        self.counts.by_memory += 1

    def _is_possible(self, frame: Frame, chosen: Sequence[Choice]) -> bool:
        """Compute a candidate, which becomes a result if it is faster than others; False: it does not fit."""
        space, counts = self.space, self.counts
        keys = space.joined(frame.placement, frame.common, [choice.keys for choice in chosen])
        config, limit = with_keys(space.template, keys), self._limit(frame, chosen)
        job = Candidate(config, space.own_roles, self._memo)
        try:
            if lower_bound(job, self.machine, self.lengths) >= limit:
                return True
            self._computed += 1
            row = fullest(job, space.capacity)
        except Exception as error:
            if not is_user_error(error):
                raise
            counts.rejected += 1
            return True
        if space.capacity is not None and row.total > space.capacity:
            return False
        counts.evaluated += 1
        prediction, layout = predict(job, self.machine, self.lengths), self._layout(frame, chosen)
        if prediction.seconds < limit:
            self._found[layout] = Result(keys, job, prediction, row, layout)
        return True


def fullest(job: Candidate, capacity: int | None) -> Row:
    """The row with most bytes. A refit's buffers have their own size only where the largest would not fit."""
    row = tightest(job.rows())
    if capacity is not None and row.total > capacity and row.phase == "refit":
        return tightest(TrainingPlan(job.config, job.own_roles).rows())
    return row


def leanest(space: Space) -> tuple[Keys, Candidate]:
    """About the candidate that takes least memory: all roles on all ranks, everything offloaded, layers recomputed, one
    sequence in a micro-batch, and of each role the smallest peak."""
    common: Keys = {"model.recompute.granularity": "full"}
    placement = Placement("sync", (tuple(space.specs),), ((0, space.num_ranks),))
    config, ranks, chosen = with_keys(space.base.config, common), tuple(range(space.num_ranks)), []
    for role in space.specs:
        moved, work = space.offloads(role)[-1], space.work(role)[-1 if role == "rollout" else 0]
        choices = []
        for grid in space.grids(role, 0, space.num_ranks):
            keys = {**grid, **work, **dict.fromkeys(moved, True)}
            probe = Probe(with_keys(config, keys), space.own_roles, base=space.base, role=role, ranks=ranks)
            choices.append(Choice(keys, probe))
        best = min(choices, key=lambda it: (it.peak, -it.probe.derived.roles[it.probe.role].tp))
        chosen.append(best.keys)
    keys = space.joined(placement, common, chosen)
    return keys, Candidate(with_keys(space.template, keys), space.own_roles)
