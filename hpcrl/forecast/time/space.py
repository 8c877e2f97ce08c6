"""The candidates of a job, as dotted keys to change: placements of its roles, and for each role the layouts,
micro-batches and offloads that the config's rules allow. Nothing is computed before it is asked for."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from hpcrl.config.derive import Derived
from hpcrl.config.placement import divisors
from hpcrl.config.roles import KEYS, PLACED, RoleSpec, with_own
from hpcrl.config.schema import Config, RolePlacement
from hpcrl.forecast.memory.memory import TrainingPlan, with_keys
from hpcrl.forecast.memory.refit import job_shape, model_shape
from hpcrl.model.params import role_layout
from hpcrl.model.shape import ModelShape
from hpcrl.runtime.exits import InputError

Keys = Mapping[str, object]  # dotted key -> value
Mode = Literal["sync", "one_step_off", "bounded_staleness"]
AXES = ("tp", "pp", "cp", "vpp", "ep", "etp")

MOST_CHUNKS = 5  # of a pipeline stage; more have shorter bubbles and longer messages
MOST_SETS = 3  # of roles that have ranks of their own
PARTS = 4  # of a job's nodes: sizes of pools are multiples of them
CONTEXT_TOKENS = 2048  # of the longest sequence, that context parallelism leaves to a rank at least
MICRO_BATCHES = (1, 2, 4)  # tokens of a micro-batch, in longest sequences
SHARES = (0.9, 0.75, 0.6, 0.45, 0.3)  # of the free memory, for the KV cache
RESERVE = 0.05  # of a GPU's memory, for CUDA's own, NCCL's buffers and fragmentation, which the plan does not count
GRANULARITIES = (None, "selective", "full")


@dataclass(frozen=True)
class Knobs:
    """What a search changes; the rest stays as the template has it. modes: none for the template's."""

    axes: tuple[str, ...] = AXES
    context_tokens: int = CONTEXT_TOKENS
    micro_batches: bool = True
    offload: bool = True
    kv_cache: bool = True
    recompute: bool = True
    pools: bool = True
    modes: tuple[Mode, ...] = ()


@dataclass(frozen=True)
class Placement:
    """Sets of roles, and the ranks of each set, which are consecutive: (first, number)."""

    mode: Mode
    sets: tuple[tuple[str, ...], ...]
    ranks: tuple[tuple[int, int], ...]

    def of(self, role: str) -> tuple[int, int]:
        """First rank and number of ranks of a role."""
        return next(ranks for roles, ranks in zip(self.sets, self.ranks, strict=True) if role in roles)

    def roles_beside(self, role: str) -> tuple[str, ...]:
        """Other roles on the same ranks."""
        return next(tuple(each for each in roles if each != role) for roles in self.sets if role in roles)

    def name(self, number: int) -> str:
        """A pool's name: `all`, or that of its first role."""
        return "all" if len(self.sets) == 1 else f"{self.sets[number][0]}_ranks"


class Space:
    """Candidates of a job on `nodes` nodes. Raises ConfigError or InputError if the job can run in no layout."""

    def __init__(
        self, config: Config, nodes: int, knobs: Knobs | None = None, own_roles: Sequence[RoleSpec] = ()
    ) -> None:
        self.template, self.knobs, self.own_roles = config, knobs or Knobs(), tuple(own_roles)
        self.size = {"job.nodes": nodes}
        self.per_node = config.job.ntasks_per_node
        self.num_ranks = nodes * self.per_node
        # Every job that can run at all can run with each model whole on each rank.
        roles = type(config.placement).model_fields.keys() - {"pools"}
        whole: dict[str, object] = {f"placement.{role}": RolePlacement() for role in roles}
        whole |= {"placement.pools": {"all": "*"}, "async_training.mode": "sync"}
        self.base = TrainingPlan(with_keys(config, {**self.size, **whole}), self.own_roles)

    @property
    def capacity(self) -> int | None:
        """Bytes of a GPU that a candidate may take; None without GPUs."""
        return None if self.base.capacity is None else int(self.base.capacity * (1 - RESERVE))

    @property
    def derived(self) -> Derived:
        return self.base.derived

    @cached_property
    def specs(self) -> dict[str, RoleSpec]:
        """Of all roles with a layout, in the order in which they are built."""
        known = {spec.name: spec for spec in with_own(PLACED, self.own_roles)}
        return {role: known[role] for role in self.derived.roles}

    @cached_property
    def shapes(self) -> dict[str, ModelShape]:
        found, policy = {}, job_shape(self.template)
        for role, spec in self.specs.items():
            own = spec.architecture(self.template)
            found[role] = policy if own is self.template.model else model_shape(own, policy.vocab_size)
        return found

    def jobs(self) -> Iterator[Keys]:
        """Every candidate, one after the other; some may be rejected by the job's checks. Only for small spaces."""
        for placement, common in itertools.product(self.placements(), self.common()):
            choices = [list(self.of_role(role, *placement.of(role))) for role in self.specs]
            for chosen in itertools.product(*choices):
                yield self.joined(placement, common, chosen)

    def joined(self, placement: Placement, common: Keys, chosen: Sequence[Keys]) -> dict[str, object]:
        """The keys of one candidate."""
        found = {**self.size, **self.of_placement(placement), **common}
        for keys in chosen:
            found |= keys
        if self.derived.ref_in_actor:  # which it is as long as the two have one layout
            found |= {
                key.replace(".actor.", ".ref."): value for key, value in found.items() if "placement.actor." in key
            }
        return found

    def common(self) -> Iterator[Keys]:
        """Changes that concern all roles: recomputation."""
        now = self.template.model.recompute.granularity
        for granularity in GRANULARITIES if self.knobs.recompute else (now,):
            yield {"model.recompute.granularity": granularity}

    # Placements

    def placements(self) -> Iterator[Placement]:
        """All roles on all ranks first; then sets of roles with ranks of their own, generation always in asynchronous
        modes."""
        for mode in self.knobs.modes or (self.template.async_training.mode,):
            if mode == "sync":
                yield Placement(mode, (tuple(self.specs),), ((0, self.num_ranks),))
            if mode != "sync" or self.knobs.pools:
                for sets in self._partitions(mode):
                    for ranks in self._rank_sets(mode, len(sets)):
                        yield Placement(mode, sets, ranks)

    def of_placement(self, placement: Placement) -> Keys:
        pools = {name: self._valid(text) for name, text in self.template.placement.pools.items()}
        found: dict[str, object] = {"async_training.mode": placement.mode, "placement.pools": pools}
        for number, (roles, (first, count)) in enumerate(zip(placement.sets, placement.ranks, strict=True)):
            name = placement.name(number)
            whole = (first, count) == (0, self.num_ranks)
            pools[name] = "*" if whole else f"{first}-{first + count - 1}" if count > 1 else str(first)
            found |= {f"placement.{role}.pool": name for role in roles}
        return found

    def _valid(self, text: str) -> str:
        """The ranks of a pool of the template, which no role may use any more, on fewer ranks than it was made for."""
        try:
            last = max(int(number) for item in text.split(",") for number in item.split("-"))
        except ValueError:
            return text
        return text if last < self.num_ranks else "*"

    def _partitions(self, mode: Mode) -> Iterator[tuple[tuple[str, ...], ...]]:
        """Ways to divide the roles into two or three sets; the engine's set is the first."""
        engine, others = "rollout", tuple(role for role in self.specs if role != "rollout")
        for number in range(1, MOST_SETS + 1):
            for sets in partitions(others, number):
                if number < MOST_SETS:
                    yield ((engine,), *sets)
                for place in range(number if mode == "sync" and number > 1 else 0):
                    rest = (*sets[:place], *sets[place + 1 :])
                    yield ((engine, *sets[place]), *rest)

    def _rank_sets(self, mode: Mode, number: int) -> Iterator[tuple[tuple[int, int], ...]]:
        """Ranks for so many sets: whole nodes, or single ranks of a job on one node. In asynchronous modes rank 0 runs
        the loop, and the first set starts behind it, at a rank where tensor-parallel groups of its node may start."""
        unit = self.per_node if self.num_ranks > self.per_node else 1
        units = self.num_ranks // unit
        step = max(1, units // PARTS)
        for sizes in compositions(units, number, step):
            starts = [unit * start for start in itertools.accumulate(sizes[:-1], initial=0)]
            ranks = tuple((start, unit * size) for start, size in zip(starts, sizes, strict=True))
            if mode == "sync":
                yield ranks
                continue
            for skipped in divisors(self.per_node):
                if skipped < ranks[0][1]:
                    yield ((skipped, ranks[0][1] - skipped), *ranks[1:])

    # Roles

    def of_role(self, role: str, first: int, count: int) -> Iterator[Keys]:
        """The choices of a role on `count` ranks from `first` on."""
        for grid, work, moved in itertools.product(
            self.grids(role, first, count), self.work(role), self.offloads(role)
        ):
            yield {**grid, **work, **moved}

    def grids(self, role: str, first: int, count: int) -> Iterator[Keys]:
        """The layouts of a role that its model allows. Tensor-parallel groups stay inside a node."""
        spec, shape = self.specs[role], self.shapes[role]
        now = getattr(self.template.placement, role)
        ranks = tuple(range(first, first + count))
        for sizes in self._sizes(spec, shape, now, count):
            try:
                role_layout(shape, role, ranks=ranks, **sizes)
            except (InputError, ValueError):
                continue
            yield {f"placement.{role}.{axis}": size for axis, size in sizes.items()}

    def _sizes(self, spec: RoleSpec, shape: ModelShape, now: Any, count: int) -> Iterator[dict[str, int]]:
        def choices(axis: str, found: Sequence[int]) -> Sequence[int]:
            return found if axis in self.knobs.axes else (getattr(now, axis),)

        inside = [size for size in divisors(count) if size <= self.per_node]
        whole = dict.fromkeys(AXES, 1)
        for tp in choices("tp", inside):
            if spec.is_engine:
                yield whole | {"tp": tp}
                continue
            if count % tp:
                continue
            for pp in choices("pp", [pp for pp in divisors(count // tp) if pp <= shape.num_layers]):
                most = 1 if shape.mla else max(1, self.derived.max_sequence_length // self.knobs.context_tokens)
                contexts = [cp for cp in inside if cp <= most and not count % (tp * pp * cp)]
                for cp, vpp in itertools.product(choices("cp", contexts), choices("vpp", _chunks(shape, pp))):
                    for ep, etp in self._expert_sizes(shape, tp, pp, count, choices):
                        yield {"tp": tp, "pp": pp, "cp": cp, "vpp": vpp, "ep": ep, "etp": etp}

    def _expert_sizes(self, shape: ModelShape, tp: int, pp: int, count: int, choices: Any) -> Iterator[tuple[int, int]]:
        if not shape.num_experts:
            yield 1, 1
            return
        for etp in choices("etp", [etp for etp in divisors(tp) if not shape.moe_ffn_hidden_size % etp]):
            for ep in choices("ep", [ep for ep in divisors(shape.num_experts) if not count % (etp * ep * pp)]):
                yield ep, etp

    def work(self, role: str) -> list[Keys]:
        """Tokens of a micro-batch, and of the engine the KV cache; only what the template has where nothing depends on
        it."""
        spec, knobs, config = self.specs[role], self.knobs, self.template
        if role == "rollout":
            now = config.rollout.gpu_memory_utilization
            changes = knobs.kv_cache and config.rollout.kv_cache_gib is None and self.base.capacity is not None
            shares = sorted({*SHARES, now}, reverse=True) if changes else [now]
            return [{"rollout.gpu_memory_utilization": share} for share in shares]
        if not spec.max_tokens or not knobs.micro_batches:
            return [{}]
        key, longest = f"{spec.path}.{spec.max_tokens}", self.derived.max_sequence_length
        sizes = {*(longest * number for number in MICRO_BATCHES), max(longest, spec.token_budget(config))}
        return [{key: size} for size in sorted(sizes)]

    def offloads(self, role: str) -> list[Keys]:
        """Nothing, everything, and what the template has. Without a GPU it would only copy."""
        spec = self.specs[role]
        section = spec.config_of(self.template)
        now = {f"{spec.path}.{key}": getattr(section, key) for key in KEYS.values() if hasattr(section, key)}
        if not now or self.base.capacity is None or not self.knobs.offload:
            return [now]
        found: list[Keys] = [dict.fromkeys(now, False), dict.fromkeys(now, True)]
        return found if now in found else [*found, now]


def _chunks(shape: ModelShape, pp: int) -> list[int]:
    """Chunks of a stage with equally many layers each."""
    if pp == 1 or shape.num_layers % pp:
        return [1]
    return [vpp for vpp in divisors(shape.num_layers // pp) if vpp <= MOST_CHUNKS]


def partitions(members: tuple[str, ...], number: int) -> Iterator[tuple[tuple[str, ...], ...]]:
    """Ways to divide members into `number` sets, none of which is empty; members keep their order."""
    if not members or number > len(members):
        return
    if number == 1:
        yield (members,)
        return
    first, *rest = members
    for sets in partitions(tuple(rest), number - 1):
        yield ((first,), *sets)
    for sets in partitions(tuple(rest), number):
        for place in range(number):
            joined = (first, *sets[place])
            yield tuple(sorted((joined, *sets[:place], *sets[place + 1 :]), key=lambda each: members.index(each[0])))


def compositions(total: int, number: int, step: int) -> Iterator[tuple[int, ...]]:
    """Ways to write `total` as a sum of `number` positive parts, of which all but the last are multiples of `step`."""
    if number == 1:
        yield (total,)
        return
    for part in range(step, total, step):
        for rest in compositions(total - part, number - 1, step):
            yield (part, *rest)
