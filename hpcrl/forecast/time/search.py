"""Search for the fastest layouts of a job: enumerate, prune by memory, combine, predict.

For each placement of the roles and each way of recomputing:

1. Enumerate the layouts, micro-batches and offloads of each role on its ranks. Drop a choice whose state, or state and
   activations, exceed the memory by a lower bound, and compute the seconds of the others in each part of the step.
2. Keep the choices that no other choice beats in both seconds and bytes: of each role, and of all roles together other
   than the actor and the engine.
3. Combine the choices of actor, engine and other roles. For each layout of actor and engine, keep the fastest
   combination that fits by the lower bound.

The fastest combinations are predicted as `hpcrl plan` predicts them, and their exact memory is computed in the order
of the predictions until enough of them fit.

HybridFlow's mapping (Sheng et al. 2024, arXiv:2409.19256, section 6, algorithm 1) is similar: it enumerates sets of
colocated models, takes each model's fastest layout for each number of ranks, and estimates the step by simulation. Here
layouts of colocated roles are chosen together, because the fastest one of each may not fit beside the others.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, reduce
from itertools import combinations, islice, product
from typing import NamedTuple

import numpy as np

from hpcrl.config.derive import Derived
from hpcrl.config.roles import KEYS, Part, PlacedRole, RoleSpec, divisors, offloaded
from hpcrl.config.schema import Config, RolePlacement
from hpcrl.config.yaml_core import ConfigError
from hpcrl.forecast.memory.fixes import tightest
from hpcrl.forecast.memory.memory import NEEDED, Phase, Row, TrainingPlan, with_keys
from hpcrl.forecast.memory.state import RoleModel, State, job_shape
from hpcrl.forecast.time.cost import fitted
from hpcrl.forecast.time.lengths import Lengths
from hpcrl.forecast.time.phases import JobTimes, Timed, whole_numbers
from hpcrl.forecast.time.samples import least_states
from hpcrl.forecast.time.step import Prediction, predict
from hpcrl.machine.machine_file import Machine
from hpcrl.model.blocks.block import unsupported
from hpcrl.model.params import role_layout
from hpcrl.runtime.exits import InputError

Keys = Mapping[str, object]  # dotted key -> value
AXES = ("tp", "pp", "cp", "vpp", "ep", "etp")
VARIED = (*AXES, "pools", "recompute", "micro_batches", "offload", "kv_cache")
GRANULARITY = "model.recompute.granularity"

POOL_UNITS = 4  # equal parts of a job's nodes, of which pools have whole numbers
MOST_CHUNKS = 5  # of a pipeline stage; more have shorter bubbles and longer messages
CONTEXT_TOKENS = 2048  # of the longest sequence, that context parallelism leaves to a rank at least
MICRO_BATCHES = (1, 2, 4)  # tokens of a micro-batch, in longest sequences
SHARES = (0.9, 0.75, 0.6, 0.45, 0.3)  # of the free memory, for the KV cache
RESERVE = 0.05  # of a GPU's memory, for CUDA's own, NCCL's buffers and fragmentation, which the plan does not count


class Placement(NamedTuple):
    """The mode, and sets of roles with the consecutive ranks of each set."""

    mode: str
    sets: tuple[tuple[tuple[str, ...], range], ...]


@dataclass
class Space:
    """The candidates of a job on `nodes` nodes. Raises ConfigError or InputError if no layout can run.

    modes: values of async_training.mode to try; if empty, the template's only. varied: the properties that differ
    between candidates; the others are the template's.
    """

    template: Config
    nodes: int
    own_roles: tuple[RoleSpec, ...] = ()
    modes: Sequence[str] = ()
    varied: Collection[str] = VARIED

    def __post_init__(self) -> None:
        config, self.per_node = self.template, self.template.job.ntasks_per_node
        self.num_ranks = self.nodes * self.per_node
        # Every job that can run at all can run with each model whole on each rank.
        roles = type(config.placement).model_fields.keys() - {"pools"}
        whole: dict[str, object] = {f"placement.{role}": RolePlacement() for role in roles}
        whole |= {"job.nodes": self.nodes, "placement.pools": {"all": "*"}, "async_training.mode": "sync"}
        self.base = TrainingPlan(with_keys(config, whole), self.own_roles)
        self.limit = math.inf if self.base.capacity is None else self.base.capacity * (1 - RESERVE)  # bytes of a GPU
        judge, self.specs = self.base.judge, {role: self.base.known[role] for role in self.base.derived.roles}
        self.others = tuple(role for role in self.specs if role not in ("actor", "rollout"))
        self.shapes = dict.fromkeys(self.specs, job_shape(config)) | ({} if judge is None else {"judge": judge.shape})
        self.shapes |= {role: model.shape for role, model in self.base.models.items()}
        varies, now = "recompute" in self.varied, config.model.recompute.granularity
        self.granularities = (None, "selective", "full") if varies else (now,)

    def joined(self, placement: Placement, chosen: Sequence[Keys]) -> dict[str, object]:
        """The keys of one candidate."""
        pools = dict.fromkeys(self.template.placement.pools, "*")  # which no role uses any more
        candidate: dict[str, object] = {"job.nodes": self.nodes, "async_training.mode": placement.mode}
        for roles, ranks in placement.sets:
            name = "all" if len(placement.sets) == 1 else f"{roles[0]}_ranks"
            pools[name] = "*" if len(ranks) == self.num_ranks else f"{ranks[0]}-{ranks[-1]}"
            candidate |= {f"placement.{role}.pool": name for role in roles}
        for keys in ({"placement.pools": pools}, *chosen):
            candidate |= keys
        if self.base.derived.ref_in_actor:  # which it is as long as the two have one layout
            own = {key: value for key, value in candidate.items() if "placement.actor." in key}
            candidate |= {key.replace(".actor.", ".ref."): value for key, value in own.items()}
        return candidate

    def placements(self) -> Iterator[Placement]:
        """In synchronous modes all roles on all ranks; then sets of roles with ranks of their own. In asynchronous
        modes the engine has ranks of its own."""
        engine, actor, others = ("rollout",), ("actor",), self.others
        apart = [(engine, actor + others), (engine, actor, others)]
        shapes: list[tuple[tuple[str, ...], ...]] = [(engine + actor + others,)]
        if "pools" in self.varied:
            shapes += [*apart, (engine + others, actor), (engine + actor, others)]
        for mode in self.modes or (self.template.async_training.mode,):
            for sets in dict.fromkeys(shapes if mode == "sync" else apart):
                for ranks in self._rank_sets(mode, len(sets)) if all(sets) else ():
                    yield Placement(mode, tuple(zip(sets, ranks, strict=True)))

    def _rank_sets(self, mode: str, number: int) -> Iterator[list[range]]:
        """Divide the ranks into `number` sets: of whole nodes, or of single ranks if the job has one node.

        In asynchronous modes rank 0 runs the loop and is in no set. The first set starts at a rank where a
        tensor-parallel group can start.
        """
        unit = self.per_node if self.num_ranks > self.per_node else 1
        step = unit * max(1, self.num_ranks // unit // POOL_UNITS)
        for cuts in combinations(range(step, self.num_ranks, step), number - 1):
            for first in (0,) if mode == "sync" else divisors(self.per_node):
                bounds = first, *cuts, self.num_ranks
                if first < bounds[1]:
                    yield [range(*pair) for pair in zip(bounds, bounds[1:], strict=False)]

    def place(self, placement: Placement, roles: tuple[str, ...]) -> range:
        """Ranks of roles on the same ones, as if their first node were the first of all; costs are the same."""
        ranks = next(ranks for its, ranks in placement.sets if {*roles} <= {*its})
        return range(ranks.start % self.per_node, ranks.start % self.per_node + len(ranks))

    def grids(self, role: str, count: int) -> Iterator[Keys]:
        """The layouts on `count` ranks that a role's model allows. Tensor-parallel groups stay inside a node."""
        shape, ranks = self.shapes[role], tuple(range(count))
        for sizes in product(*self._axis_sizes(role, count)):
            tp, pp, cp, vpp, ep, etp = sizes
            if count % (tp * pp * cp) or count % (etp * ep * pp) or tp % etp:
                continue
            if vpp > 1 and (pp == 1 or shape.num_layers % (pp * vpp)):  # chunks have equally many layers
                continue
            with suppress(InputError, ValueError):
                role_layout(shape, role, ranks=ranks, **dict(zip(AXES, sizes, strict=True)))
                yield {f"placement.{role}.{axis}": size for axis, size in zip(AXES, sizes, strict=True)}

    def _axis_sizes(self, role: str, count: int) -> list[list[int]]:
        """Sizes of each axis."""
        shape, now = self.shapes[role], getattr(self.template.placement, role)
        inside = [size for size in divisors(count) if size <= self.per_node]
        longest = 0 if unsupported(shape.layers, "planned_cp") else self.base.derived.max_sequence_length
        sizes_of = {"tp": inside, **dict.fromkeys(AXES[1:], [1])}
        if not self.specs[role].is_engine:
            sizes_of["pp"] = [pp for pp in divisors(count) if pp <= shape.num_layers]
            sizes_of["cp"] = [cp for cp in inside if cp <= max(1, longest // CONTEXT_TOKENS)]
            sizes_of["vpp"] = [vpp for vpp in divisors(shape.num_layers) if vpp <= MOST_CHUNKS]
            if shape.routed is not None:
                sizes_of["ep"], sizes_of["etp"] = divisors(shape.routed.num_experts), inside
        return [sizes_of[axis] if axis in self.varied else [getattr(now, axis)] for axis in AXES]

    def work(self, role: str) -> list[Keys]:
        """Tokens of a micro-batch, ascending, and of the engine the KV cache; only what the template has where nothing
        depends on it."""
        spec, config, longest = self.specs[role], self.template, self.base.derived.max_sequence_length
        if role == "rollout":
            varies = "kv_cache" in self.varied and config.rollout.kv_cache_gib is None and self.limit < math.inf
            shares = {config.rollout.gpu_memory_utilization, *(SHARES if varies else ())}
            return [{"rollout.gpu_memory_utilization": share} for share in sorted(shares)]
        if not spec.max_tokens or "micro_batches" not in self.varied:
            return [{}]
        sizes = {*(longest * number for number in MICRO_BATCHES), max(longest, spec.token_budget(config))}
        return [{f"{spec.path}.{spec.max_tokens}": size} for size in sorted(sizes)]

    def offloads(self, role: str) -> list[Keys]:
        """Nothing, everything, and what the template has. Without a GPU it would only copy."""
        path, section = self.specs[role].path, self.specs[role].config_of(self.template)
        now = {f"{path}.{key}": getattr(section, key) for key in KEYS.values() if hasattr(section, key)}
        varies = now and self.limit < math.inf and "offload" in self.varied
        choices: list[Keys] = [dict.fromkeys(now, False), dict.fromkeys(now, True)] if varies else [now]
        return choices if now in choices else [*choices, now]

    def probe(self, role: str, config: Config, ranks: range, keys: Keys) -> Probe:
        """A role with its layout and micro-batch; it offloads nothing."""
        changed = with_keys(config, {**keys, **dict.fromkeys(self.offloads(role)[0], False)})
        return Probe(changed, self.own_roles, base=self.base, role=role, ranks=tuple(ranks))


@dataclass(frozen=True)
class Probe(TrainingPlan):
    """A job of which only one role is looked at, on its ranks. Nothing is checked but its layout."""

    base: TrainingPlan = field(kw_only=True, compare=False, repr=False)
    role: str = field(kw_only=True)
    ranks: tuple[int, ...] = field(kw_only=True)

    @cached_property
    def derived(self) -> Derived:
        placed = getattr(self.config.placement, self.role)
        own = PlacedRole(self.ranks, **{axis: getattr(placed, axis) for axis in AXES}, pool=placed.pool)
        return replace(self.base.derived, roles={**self.base.derived.roles, self.role: own})

    @cached_property
    def models(self) -> dict[str, RoleModel]:
        models, grid = dict(self.base.models), self.derived.roles[self.role].grid
        if (own := models.get(self.role)) is not None:
            models[self.role] = replace(own, layout=role_layout(own.shape, self.role, **grid))
        return models

    @cached_property
    def phases(self) -> list[Phase]:
        """Those of the role, without refit and saves."""
        return [phase for phase in super().phases if phase.role == self.role and phase.kind not in ("refit", "save")]

    @cached_property
    def ends(self) -> tuple[State, State]:
        """A lower bound of the state of the first and the last stage. An engine that may share the actor's weights has
        none of its own."""
        if self.role in self.models:
            states = least_states(self.models[self.role])
            return states[0], states[-1]
        rollout, mode = self.config.rollout, self.config.async_training.mode
        can_share = "shared_weights" in self.config.engine.supports
        shares = can_share and mode == "sync" and rollout.checkpoint_engine.alias
        whole = whole_numbers(self.refit.shape) * self.refit.itemsize if self.role == "rollout" and not shares else 0
        return (State(whole // self.derived.roles[self.role].tp),) * 2

    @cached_property
    def activations(self) -> dict[str, list[int]]:
        """By phase, bytes of the first and the last stage."""
        held = {it.name: it.work.training if it.kind == "train" else it.work.forward for it in self.phases if it.work}
        last = self.derived.roles[self.role].pp - 1
        return {name: [sum(of_stage(0)), sum(of_stage(last))] for name, of_stage in held.items()}

    def sizes(self, away: Collection[Part]) -> list[int]:
        """Bytes of the first and the last stage while other roles work, and the bytes that each has in addition while
        this role works.

        Args:
            away: parts that are in host memory while they are not needed.
        """
        idle, extra = [state.without(away).total for state in self.ends], [0, 0]
        for phase in self.phases:
            missing = [part for part in away if part not in NEEDED[phase.kind]]
            for place, held in enumerate(self.activations.get(phase.name, ())):
                extra[place] = max(extra[place], self.ends[place].without(missing).total + held - idle[place])
        return [*idle, *extra]

    def generating(self, taken: int) -> int:
        """Bytes of an engine's rank while it generates, beside `taken` bytes of other roles."""
        return taken + self.ends[0].total + self._kv_cache(taken, self.ends[0].total) + sum(self._generation())


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
    """A choice for every role.

    room: the share of the memory that it may take. seconds: the sum of its phases without refit and saves. layout: the
    placement and the layouts of actor and engine, by which results differ.
    """

    room: float
    seconds: float
    layout: tuple[Placement, tuple[object, ...], tuple[object, ...]]
    chosen: list[Keys]


class Search:
    """A search on a fixed number of nodes.

    counts: the numbers of `all` combinations, of those that are too `full` to fit, and of those whose exact memory was
    `computed`.
    """

    def __init__(self, space: Space, machine: Machine, lengths: Lengths) -> None:
        self.space, self.machine, self.lengths, self.counts = space, machine, lengths, Counter[str]()
        self._grain = space.limit / GRAINS
        self._choices, self._generation = cache(self._choices_of), cache(self._generation_of)

    def run(self) -> list[Result]:
        """The fastest candidates, each with another placement, or another layout of the actor or the engine."""
        frames = product(self.space.placements(), self.space.granularities)
        combined = sorted((it for frame in frames for it in self._combinations(*frame)), key=lambda it: it.seconds)
        best = {(it.room, it.layout): it for it in reversed(combined)}
        ranked = iter(sorted({(it.seconds, it.layout): it for it in best.values()}.values(), key=lambda it: it.seconds))
        results: dict[object, Result] = {}
        while not results and (few := list(islice(ranked, PREDICTED))):
            for layout, job, prediction in sorted(self._predicted(few), key=lambda it: it[-1].seconds):
                if layout not in results and len(results) < KEPT:
                    self.counts["computed"] += 1
                    if (row := tightest(job.rows())).total <= self.space.limit:
                        results[layout] = Result(job, prediction, row)
        return [*results.values()]

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
        """Seconds of a role by part of the step.

        Args:
            away: parts that are copied from host memory for its phases.
        """
        costs = [(it.name, it.kind, it.cost) for it in timed]
        costs += [(phase.name, phase.kind, times.copied(phase, away)) for phase in times.job.phases if away]
        seconds = dict.fromkeys(PARTS, 0.0)
        for name, kind, cost in costs:
            seconds[PART_OF.get(name, kind)] += fitted(cost, self.machine, name).seconds
        return [*seconds.values()]


def leanest(space: Space) -> tuple[str, int]:
    """Return the phase with most memory and its bytes, of approximately the smallest candidate.

    It has all roles on all ranks, offloads and recomputes everything, and has for each role micro-batches of one
    sequence and the layout with the smallest peak.
    """
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
