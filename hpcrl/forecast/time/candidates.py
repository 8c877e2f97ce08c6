"""The candidates of a job, as dotted keys to change, and the plan of one role of them.

A candidate places the roles, and has a layout, a micro-batch and offload for each of them. Nothing is computed before
it is asked for.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

from hpcrl.config.derive import Derived
from hpcrl.config.placement import PlacedRole, divisors
from hpcrl.config.roles import KEYS, PLACED, Part, RoleSpec, with_own
from hpcrl.config.schema import Config, RolePlacement
from hpcrl.forecast.memory.memory import NEEDED, Phase, TrainingPlan, with_keys
from hpcrl.forecast.memory.refit import job_shape
from hpcrl.forecast.memory.state import RoleModel, State
from hpcrl.forecast.time.phases import whole_numbers
from hpcrl.forecast.time.training import least_states
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
    """Candidates of a job on `nodes` nodes. modes: values of async_training.mode; none for the template's. varied: what
    differs between candidates; the rest is the template's. Raises ConfigError or InputError if no layout can run."""

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
        known, judge = {spec.name: spec for spec in with_own(PLACED, self.own_roles)}, self.base.judge
        self.specs = {role: known[role] for role in self.base.derived.roles}
        self.others = tuple(role for role in self.specs if role not in ("actor", "rollout"))
        self.shapes = dict.fromkeys(self.specs, job_shape(config)) | ({} if judge is None else {"judge": judge.shape})
        self.shapes |= {role: model.shape for role, model in self.base.models.items()}
        now = config.model.recompute.granularity
        self.granularities = (None, "selective", "full") if "recompute" in self.varied else (now,)

    def joined(self, placement: Placement, chosen: Sequence[Keys]) -> dict[str, object]:
        """The keys of one candidate."""
        pools = dict.fromkeys(self.template.placement.pools, "*")  # which no role uses any more
        found: dict[str, object] = {"job.nodes": self.nodes, "async_training.mode": placement.mode}
        for roles, ranks in placement.sets:
            name = "all" if len(placement.sets) == 1 else f"{roles[0]}_ranks"
            pools[name] = "*" if len(ranks) == self.num_ranks else f"{ranks[0]}-{ranks[-1]}"
            found |= {f"placement.{role}.pool": name for role in roles}
        for keys in ({"placement.pools": pools}, *chosen):
            found |= keys
        if self.base.derived.ref_in_actor:  # which it is as long as the two have one layout
            own = {key: value for key, value in found.items() if "placement.actor." in key}
            found |= {key.replace(".actor.", ".ref."): value for key, value in own.items()}
        return found

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
        """Ranks for so many sets: whole nodes, or single ranks of a job on one node. In asynchronous modes rank 0 runs
        the loop, and the first set starts behind it, at a rank where tensor-parallel groups of its node may start."""
        unit = self.per_node if self.num_ranks > self.per_node else 1
        step = unit * max(1, self.num_ranks // unit // POOL_UNITS)
        for cuts in itertools.combinations(range(step, self.num_ranks, step), number - 1):
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
        for sizes in itertools.product(*self._axis_sizes(role, count)):
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
        contexts = (
            0 if unsupported(shape.layers, "planned_cp") else self.base.derived.max_sequence_length // CONTEXT_TOKENS
        )
        found = {"tp": inside, **dict.fromkeys(AXES[1:], [1])}
        if not self.specs[role].is_engine:
            found["pp"] = [pp for pp in divisors(count) if pp <= shape.num_layers]
            found["cp"] = [cp for cp in inside if cp <= max(1, contexts)]
            found["vpp"] = [vpp for vpp in divisors(shape.num_layers) if vpp <= MOST_CHUNKS]
            if shape.routed is not None:
                found["ep"], found["etp"] = divisors(shape.routed.num_experts), inside
        return [found[axis] if axis in self.varied else [getattr(now, axis)] for axis in AXES]

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
        found: list[Keys] = [dict.fromkeys(now, False), dict.fromkeys(now, True)] if varies else [now]
        return found if now in found else [*found, now]

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
        """The least state of the first and the last stage. An engine has its weights, unless it may share the
        actor's."""
        if self.role in self.models:
            states = least_states(self.models[self.role])
            return states[0], states[-1]
        rollout, asked, mode = self.config.rollout, self.refit.resharding, self.config.async_training.mode
        shares = rollout.engine == "native" and mode == "sync" and rollout.checkpoint_engine.alias
        whole = whole_numbers(asked.shape) * asked.itemsize if self.role == "rollout" and not shares else 0
        return (State(whole // self.derived.roles[self.role].tp),) * 2

    @cached_property
    def activations(self) -> dict[str, list[int]]:
        """By phase, bytes of the first and the last stage."""
        held = {it.name: it.work.training if it.kind == "train" else it.work.forward for it in self.phases if it.work}
        last = self.derived.roles[self.role].pp - 1
        return {name: [sum(of_stage(0)), sum(of_stage(last))] for name, of_stage in held.items()}

    def sizes(self, away: Collection[Part]) -> list[int]:
        """Bytes of the first and the last stage while other roles work, and how many more of each while this one does.
        away: what is in host memory if it is not needed."""
        idle, extra = [state.without(away).total for state in self.ends], [0, 0]
        for phase in self.phases:
            missing = [part for part in away if part not in NEEDED[phase.kind]]
            for place, held in enumerate(self.activations.get(phase.name, ())):
                extra[place] = max(extra[place], self.ends[place].without(missing).total + held - idle[place])
        return [*idle, *extra]

    def generating(self, taken: int) -> int:
        """Bytes of an engine's rank while it generates, beside `taken` bytes of other roles."""
        return taken + self.ends[0].total + self._kv_cache(taken, self.ends[0].total) + sum(self._generation())
