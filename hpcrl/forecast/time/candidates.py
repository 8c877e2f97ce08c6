"""Plans of a search: a whole candidate, and one role's choice. What candidates share is computed once."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

from hpcrl.config.derive import Derived
from hpcrl.config.placement import PlacedRole
from hpcrl.config.roles import Part, offloaded
from hpcrl.engine.refit.planner import Resharding
from hpcrl.forecast.memory.activations import Pass
from hpcrl.forecast.memory.memory import NEEDED, Phase, TrainingPlan
from hpcrl.forecast.memory.state import ITEMSIZE, RoleModel, State
from hpcrl.forecast.time.phases import whole_numbers
from hpcrl.forecast.time.space import AXES, Keys
from hpcrl.forecast.time.training import least_states
from hpcrl.model.params import chunk_layers, role_layout
from hpcrl.runtime.layout import Layout

NOWHERE = Layout((-1,))


@dataclass
class Memo:
    """State of a role's stages, weights of an engine's rank by its tensor parallelism, activations of a choice, and the
    least state of a role's stages."""

    states: dict[tuple[object, ...], list[State]] = field(default_factory=dict)
    engines: dict[int, int] = field(default_factory=dict)
    activations: dict[tuple[object, ...], int] = field(default_factory=dict)
    least: dict[tuple[object, ...], list[State]] = field(default_factory=dict)


@dataclass(frozen=True)
class Candidate(TrainingPlan):
    """The plan of a candidate. Its memory is that of `TrainingPlan` but for a refit's buffers, which are as large as
    they may be: their size takes seconds for hundreds of ranks."""

    memo: Memo = field(default_factory=Memo, compare=False, repr=False)

    @cached_property
    def states(self) -> dict[tuple[str, int], State]:
        return {
            (role, stage): state
            for role, model in self.models.items()
            for stage, state in enumerate(self._states_of(role, model))
        }

    def _states_of(self, role: str, model: RoleModel) -> list[State]:
        key = (role, model.layout.size, *(getattr(model.layout, axis) for axis in AXES))
        if key not in self.memo.states:
            self.memo.states[key] = states_of(model)
        return self.memo.states[key]

    @cached_property
    def _engine(self) -> dict[tuple[int, ...], tuple[int, int, int]]:
        if self.refit.aliases:
            return super()._engine
        limit = self.config.rollout.checkpoint_engine.update_weights_bucket_megabytes * 2**20
        own = self._engine_weights()
        return {place.ranks: (limit, own, own) if "rollout" in place.stages else (limit, 0, 0) for place in self.places}

    def _engine_weights(self) -> int:
        """Bytes of weights of the rank with most of them."""
        layout, asked = self.layouts["rollout"], self.refit.resharding
        if layout.tp not in self.memo.engines:
            one = replace(layout, ranks=tuple(range(layout.tp)))
            replica = Resharding(asked.shape, one, one, asked.itemsize, destination_format=asked.destination_format)
            held = dict.fromkeys(one.ranks, 0)
            for group in replica.destination_groups:
                for rank in group.ranks:
                    held[rank] += sum(math.prod(shard.local_shape) for shard in group.shards) * asked.itemsize
            self.memo.engines[layout.tp] = max(held.values())
        return self.memo.engines[layout.tp]


def states_of(model: RoleModel) -> list[State]:
    """The state of each stage. Stages with as many layers of each kind, in as many chunks, have the same."""
    shape, layout, found = model.shape, model.layout, []
    known: dict[tuple[object, ...], State] = {}
    for stage in range(layout.pp):
        chunks = (chunk_layers(shape.num_layers, stage, layout.pp, chunk, layout.vpp) for chunk in range(layout.vpp))
        kinds = tuple(tuple(map(shape.is_moe_layer, chunk)) for chunk in chunks)
        key = kinds, stage == 0, stage == layout.pp - 1
        if key not in known:
            known[key] = model.state(stage)
        found.append(known[key])
    return found


@dataclass(frozen=True)
class Probe(TrainingPlan):
    """A job of which only one role is looked at, with its choice, on its ranks. Nothing is checked but its layout."""

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
        own = self.base.models.get(self.role)
        if own is None:  # an engine, whose ranks have no other models
            return {role: replace(model, layout=NOWHERE) for role, model in self.base.models.items()}
        layout = role_layout(own.shape, self.role, **self.derived.roles[self.role].grid)
        return {**self.base.models, self.role: replace(own, layout=layout)}

    @cached_property
    def phases(self) -> list[Phase]:
        """Those of the role, without refit and saves."""
        return [phase for phase in super().phases if phase.role == self.role and phase.kind not in ("refit", "save")]

    def _work(self, role: str, max_tokens: int, samples: int, entropy: bool) -> Pass | None:  # type: ignore[override]
        """None of other roles, whose phases are left out."""
        return super()._work(role, max_tokens, samples, entropy) if role == self.role else None

    def generating(self, taken: int, weights: int) -> int:
        """Bytes of an engine's rank while it generates, beside `taken` bytes of other roles."""
        return taken + weights + self._kv_cache(taken, weights) + sum(self._generation())


class Split(NamedTuple):
    """Seconds of a role in each part of a step; those of a synchronous one follow each other."""

    generate: float = 0.0
    score: float = 0.0
    forward: float = 0.0
    advantages: float = 0.0
    train: float = 0.0


def least_split(splits: Iterable[Split]) -> Split:
    """The least of each part; no bound of what has no choice."""
    each = list(splits)
    return Split(*map(min, zip(*each, strict=True))) if each else Split()


@dataclass(eq=False)
class Choice:
    """A role's layout, micro-batch and offload, its seconds, and the least bytes of a rank that it takes: less than
    the plan's by final norms, padding, and pictures. away: what is offloaded; None: what the probe's config says.
    family: of an engine, the choices that differ only in the KV cache, the smallest first."""

    keys: Keys
    probe: Probe = field(repr=False)
    split: Split = Split()
    shared: tuple[object, ...] = ()  # what its activations depend on
    memo: Memo = field(default_factory=Memo, repr=False)
    away: tuple[Part, ...] | None = None
    family: tuple[Choice, ...] = field(default=(), repr=False)

    @property
    def members(self) -> tuple[Choice, ...]:
        """The family; another choice is its own."""
        return self.family or (self,)

    @cached_property
    def grid(self) -> tuple[object, ...]:
        return tuple(self.keys[f"placement.{self.probe.role}.{axis}"] for axis in AXES)

    @property
    def share(self) -> float:
        """Of the free memory, for the KV cache."""
        return self.probe.config.rollout.gpu_memory_utilization

    @cached_property
    def idle(self) -> int:
        """While other roles work, of the stage with the fewest."""
        return min((state.without(self.offloaded_parts).total for state in self._distinct), default=0)

    @cached_property
    def resident(self) -> int:
        """While other roles work, of the stage with most."""
        return max((state.without(self.offloaded_parts).total for state in self._distinct), default=0)

    @cached_property
    def state(self) -> int:
        """Weights, gradients and optimizer of the fullest stage while the role works."""
        if self.probe.role == "rollout":
            return self.idle
        return max((self._working(phase, state) for phase in self._phases for state in self._distinct), default=0)

    @cached_property
    def peak(self) -> int:
        """The same with activations and logits, of the first or the last stage. Training holds more than a pass without
        gradients."""
        works = [phase for phase in self._phases if phase.work is not None]
        phases = [phase for phase in works if phase.kind == "train"] or works
        return max((self._peak(phase) for phase in phases), default=self.state)

    def _peak(self, phase: Phase) -> int:
        assert phase.work is not None
        most, last = 0, len(self._states) - 1
        for stage in {0, last}:
            key = self.shared, phase.name, stage
            if key not in self.memo.activations:
                held = phase.work.training(stage) if phase.kind == "train" else phase.work.forward(stage)
                self.memo.activations[key] = sum(held)
            most = max(most, self._working(phase, self._states[stage]) + self.memo.activations[key])
        return most

    @property
    def _phases(self) -> list[Phase]:
        return self.probe.phases if self._states else []

    def _working(self, phase: Phase, state: State) -> int:
        return state.without([part for part in self.offloaded_parts if part not in NEEDED[phase.kind]]).total

    @cached_property
    def offloaded_parts(self) -> Collection[Part]:
        """What is in host memory while other roles work."""
        if self.away is not None:
            return self.away
        spec = self.probe.specs.get(self.probe.role)
        return offloaded(self.probe.config, spec) if spec is not None else ()

    @cached_property
    def _distinct(self) -> set[State]:
        return {*self._states}

    @cached_property
    def _states(self) -> list[State]:
        """Of each stage. An engine has its weights, unless it may share the actor's."""
        probe = self.probe
        if probe.role in probe.models:
            key = probe.role, len(probe.ranks), *self.grid
            if key not in self.memo.least:
                self.memo.least[key] = least_states(probe.models[probe.role])
            return self.memo.least[key]
        if probe.role != "rollout":
            return []
        rollout, mode = probe.config.rollout, probe.config.async_training.mode
        may_share = rollout.engine == "native" and mode == "sync" and rollout.checkpoint_engine.alias
        nbytes = whole_numbers(probe.models["actor"].shape) * ITEMSIZE[rollout.dtype or probe.config.model.dtype]
        return [State(0 if may_share else nbytes // probe.derived.roles["rollout"].tp)]


def undominated(choices: Sequence[Choice], *, by_grid: bool) -> list[Choice]:
    """The choices, the fastest first, without those that are no faster in any part of a step than another one and take
    no less memory. by_grid: of those with one layout."""
    kept: dict[object, list[Choice]] = {}
    for choice in sorted(choices, key=lambda it: sum(it.split)):
        others = kept.setdefault(choice.grid if by_grid else (), [])
        if not any(_dominates(other, choice) for other in others):
            others.append(choice)
    return sorted((choice for each in kept.values() for choice in each), key=lambda it: sum(it.split))


def families(choices: Sequence[Choice]) -> list[Choice]:
    """An engine's choices, the fastest first: of each layout one, with the others as its family, because how fast each
    is depends on the memory of the models beside it."""
    kept: dict[object, list[Choice]] = {}
    for choice in sorted(choices, key=lambda it: it.share):
        kept.setdefault(choice.grid, []).append(choice)
    found = []
    for family in kept.values():
        least = least_split(choice.split for choice in family)
        found.append(replace(family[-1], split=least, family=tuple(family)))
    return sorted(found, key=lambda it: sum(it.split))


def _dominates(one: Choice, other: Choice) -> bool:
    is_faster = all(mine <= its for mine, its in zip(one.split, other.split, strict=True))
    mine, its = ((it.idle, it.resident, it.state, it.peak) for it in (one, other))
    return is_faster and all(a <= b for a, b in zip(mine, its, strict=True))
