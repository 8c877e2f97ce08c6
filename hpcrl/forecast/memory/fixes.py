"""What makes a job need less memory: the cheapest changes that make it fit, and advice to a rank that ran out of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from hpcrl.config.roles import ACTOR, KEYS, REF, ROLLOUT, Part, RoleSpec
from hpcrl.config.schema import Config, OptimConfig
from hpcrl.forecast.memory.memory import NEEDED, Phase, Row, TrainingPlan, binary, with_keys

Change = dict[str, object]  # dotted config key -> value
LORA_RANK = 16
LEAST_SEQUENCES = 16  # of a generation
HEAD_CHUNK = 1024  # tokens: the default of trainer.head_chunk_tokens


def tightest(rows: list[Row]) -> Row:
    return max(rows, key=lambda row: row.total)


class Fix(NamedTuple):
    """Changes that make a job fit. then: its tightest row with all of them. parts: key -> the tightest row with this
    key and those before it."""

    change: Change
    then: Row
    parts: dict[str, Row]

    @property
    def overrides(self) -> list[str]:
        """`key=value` of each, as on a command line."""
        return [override(key, value) for key, value in self.change.items()]


def override(key: str, value: object) -> str:
    return f"{key}={str(value).lower() if isinstance(value, bool) else value}"


def cheapest_fix(job: TrainingPlan) -> Fix | None:
    """The first changes that make a job fit which does not; None if there are none.

    Kinds of changes are tried in the order of `STEPS`, each beside those before it. Of the first set that fits, what is
    not needed is dropped, the last kinds first. More nodes come last.
    """
    kinds: list[_Kind] = []
    now = tightest(job.rows()).total
    assert job.capacity is not None and now > job.capacity
    for step in STEPS:
        # what a step offers depends on what takes most by now
        kind = _Kind(list(step(_changed(job, _joined(kinds)))))
        kinds.append(kind)
        for number in range(len(kind.levels)):
            before, kind.chosen = kind.chosen, number
            row = tightest_with(job, _joined(kinds))
            if row is None or row.total > now:
                kind.chosen = before
                continue
            now = row.total
            if now <= job.capacity:
                return _needed_only(job, kinds)
    return _more_nodes(job, kinds)


class _Kind:
    """Alternative changes of a kind, in order; chosen: the number of the one that is made, or None."""

    def __init__(self, levels: Sequence[Change]) -> None:
        self.levels = levels
        self.chosen: int | None = None

    @property
    def change(self) -> Change:
        return {} if self.chosen is None else self.levels[self.chosen]


def _joined(kinds: Sequence[_Kind]) -> Change:
    return {key: value for kind in kinds for key, value in kind.change.items()}


def _changed(job: TrainingPlan, change: Mapping[str, object]) -> TrainingPlan:
    return replace(job, config=with_keys(job.config, change))


def tightest_with(job: TrainingPlan, change: Mapping[str, object]) -> Row | None:
    """The tightest row of the job with a change; None if it cannot run so."""
    try:
        return tightest(_changed(job, change).rows())
    except Exception as error:
        if getattr(error, "user_error", False):
            return None
        raise


def _fits(job: TrainingPlan, change: Mapping[str, object]) -> bool:
    row = tightest_with(job, change)
    return row is not None and job.capacity is not None and row.total <= job.capacity


def _needed_only(job: TrainingPlan, kinds: Sequence[_Kind], more: Mapping[str, object] | None = None) -> Fix:
    """Weaken each kind, the last one first, as long as the job fits; then drop the keys that are not needed.

    Args:
        more: further changes, which stay.
    """
    for kind in reversed(kinds):
        last = kind.chosen
        for weaker in (None, *range(last or 0)):
            kind.chosen = weaker
            if _fits(job, {**_joined(kinds), **(more or {})}):
                break
        else:
            kind.chosen = last
    change = _joined(kinds)
    for key in reversed(list(change)):
        less = {other: value for other, value in change.items() if other != key}
        if _fits(job, {**less, **(more or {})}):
            change = less
    change |= more or {}
    parts: dict[str, Row] = {}
    applied: Change = {}
    for key, value in change.items():
        applied[key] = value
        row = tightest_with(job, applied)  # None where a key needs another one that comes after it
        if row is not None:
            parts[key] = row
    return Fix(change, parts[key], parts)


def _more_nodes(job: TrainingPlan, kinds: Sequence[_Kind]) -> Fix | None:
    for factor in (2, 4, 8, 16):
        nodes: Change = {"job.nodes": job.config.job.nodes * factor}
        for layout in ({}, *_layouts(job)):
            if _fits(job, {**_joined(kinds), **nodes, **layout}):
                return _needed_only(job, kinds, {**nodes, **layout})
    return None


def _budgets(job: TrainingPlan) -> Iterator[Change]:
    """Halves of the micro-batches of the trained roles, down to the smallest that the job can have."""
    least = job.least_tokens
    budgets = {
        f"{spec.path}.{spec.max_tokens}": spec.token_budget(job.config) for spec in job.specs.values() if spec.trains
    }
    while max(budgets.values()) > least:
        budgets = {key: max(least, tokens // 2) for key, tokens in budgets.items()}
        yield dict(budgets)


def recompute(job: TrainingPlan) -> Iterator[Change]:
    if job.config.model.recompute.granularity != "full":
        yield {"model.recompute.granularity": "full"}


def head_chunks(job: TrainingPlan) -> Iterator[Change]:
    if job.config.trainer.head_chunk_tokens is None:
        yield {"trainer.head_chunk_tokens": HEAD_CHUNK}


def _cache_of_generation(job: TrainingPlan) -> Iterator[Change]:
    """A smaller share for the KV cache, where generation takes most: this changes nothing but its speed."""
    if tightest(job.rows()).phase == ROLLOUT.name:
        yield from _cache_shares(job)


def _sequences_of_generation(job: TrainingPlan) -> Iterator[Change]:
    """Halves of the sequences that decode at once, where generation takes most."""
    sequences = job.config.rollout.max_num_seqs
    while tightest(job.rows()).phase == ROLLOUT.name and sequences > LEAST_SEQUENCES:
        sequences = max(LEAST_SEQUENCES, sequences // 2)
        yield {"rollout.max_num_seqs": sequences}


def _other_layouts(job: TrainingPlan) -> Iterator[Change]:
    if job.derived.world_size > 1:
        yield from _layouts(job)


def _layouts(job: TrainingPlan) -> Iterator[Change]:
    """Larger pp, then larger tp inside a node, of the role that takes most on the fullest rank."""
    row = tightest(job.rows())
    working = next((phase.role for phase in job.phases if phase.name == row.phase), "")
    sizes = {role: job.states[role, stage].total for role, stage in row.place.stages.items() if role in job.models}
    if not sizes:
        return
    if working in sizes:
        sizes[working] += row.activations + row.logits
    role = max(job.models, key=lambda name: sizes.get(name, -1))
    layout = job.layouts[role]
    for pp in (2 * layout.pp, 4 * layout.pp):
        yield {f"placement.{role}.pp": pp}
    tp = 2 * layout.tp
    while tp <= job.config.job.ntasks_per_node:
        yield {f"placement.{role}.tp": tp}
        tp *= 2


def adapters(job: TrainingPlan) -> Iterator[Change]:
    if ACTOR.name in job.models and job.config.model.lora_rank == 0:
        yield {"model.lora_rank": LORA_RANK}


def moments(job: TrainingPlan) -> Iterator[Change]:
    """The optimizer's state in 16 bits, where its parameters allow it."""
    change: Change = {}
    for key in (name for name in OptimConfig.model_fields if name.endswith("_dtype")):
        for spec in (spec for spec in job.specs.values() if spec.trains):
            if _accepts(spec.config_of(job.config).optim, key, "bfloat16"):
                change[f"{spec.path}.optim.{key}"] = "bfloat16"
        if change:
            yield dict(change)


def _accepts(optim: OptimConfig, key: str, value: object) -> bool:
    """Whether a key of an optimizer may have another value."""
    try:
        type(optim).model_validate({**optim.model_dump(), key: value})
    except ValueError:
        return False
    return getattr(optim, key) != value


def _offloads(job: TrainingPlan) -> Iterator[Change]:
    """Offload of frozen models, then of what trained ones have beside their weights, then of everything."""
    can_move = [spec for spec in job.specs.values() if hasattr(spec.config_of(job.config), KEYS["parameters"])]
    change: Change = {}
    order: tuple[tuple[Part, bool], ...] = (
        *(("parameters", False), ("optimizer", True)),
        *(("gradients", True), ("parameters", True)),
    )
    for part, trains in order:
        if more := {f"{spec.path}.{KEYS[part]}": True for spec in can_move if spec.trains is trains}:
            change |= more
            yield dict(change)


def _cache_shares(job: TrainingPlan) -> Iterator[Change]:
    rollout = job.config.rollout
    if ROLLOUT.name in job.layouts and rollout.kv_cache_gib is None:
        for tenths in range(9, 0, -1):
            if tenths / 10 < rollout.gpu_memory_utilization:
                yield {"rollout.gpu_memory_utilization": tenths / 10}


# In the order in which they are tried: what costs time only, what is trained, rounding, copies.
STEPS: tuple[Callable[[TrainingPlan], Iterator[Change]], ...] = (
    *(_budgets, recompute, head_chunks, _cache_of_generation, _sequences_of_generation),
    *(_other_layouts, adapters, moments, _offloads, _cache_shares),
)


PHASES = {  # of a plan, by a worker's method, where neither its role nor `update_<role>` names them
    "actor.compute_log_prob": "old_log_prob",
    "actor.compute_ref_log_prob": "ref",
    "critic.compute_values": "values",
    "refit.update_weights": "refit",
    "actor.begin_save": "save_actor",
    "critic.begin_save": "save_critic",
    "actor.begin_snapshot": "save_actor",
    "critic.begin_snapshot": "save_critic",
}


def phase_of(role: str | None, method: str | None) -> str | None:
    """The plan's name of the phase in which a method of a role's worker runs."""
    return PHASES.get(f"{role}.{method}", f"update_{role}" if "update" in (method or "") else role)


def advice(
    config: Config, num_ranks: int, rank: int, role: str | None, method: str | None, own_roles: Sequence[RoleSpec] = ()
) -> str:
    """One line for a rank of `hpcrl train` that ran out of memory in a method of a role."""
    per_node = config.job.ntasks_per_node if num_ranks % config.job.ntasks_per_node == 0 else num_ranks
    # the job's actual size, which section `job` may not have
    size = {"job.nodes": num_ranks // per_node, "job.ntasks_per_node": per_node, "job.gpus_per_node": per_node}
    try:
        job = TrainingPlan(with_keys(config, size), tuple(own_roles))
        phases = {phase.name: phase for phase in job.phases}
        name = phase_of(role, method)
        row = next((row for row in job.rows() if row.phase == name and rank in row.place.ranks), None)
    except Exception as error:
        if not getattr(error, "user_error", False):
            raise
        return f"`hpcrl plan` has no figures: {error}"
    if row is None:
        return "`hpcrl plan` has no figures for this phase"
    parts = zip(Row._fields[2:], row[2:], strict=True)
    figures = ", ".join(f"{name} {binary(nbytes)}" for name, nbytes in parts if nbytes)
    needs_less = ", ".join(changes(job, phases[row.phase], row))
    return f"`hpcrl plan` expects {binary(row.total)}: {figures}; to need less: {needs_less}"


def changes(job: TrainingPlan, phase: Phase, row: Row) -> Iterator[str]:
    """Config keys that reduce the phase's memory, in the order of `fixes.STEPS` after the phase's own."""
    config, role = job.config, phase.role
    if phase.kind == "generate":
        section = "reward.judge" if role == "judge" else "rollout"
        yield f"a smaller {section}.gpu_memory_utilization or {section}.max_num_seqs"
    elif phase.kind == "refit":
        yield "a smaller rollout.checkpoint_engine.update_weights_bucket_megabytes"
    elif phase.work is not None:
        spec = REF if phase.name == "ref" else job.specs[role]
        if spec.max_tokens:
            yield f"{spec.path}.{spec.max_tokens} below {spec.token_budget(config)}"
        again = recompute(job) if phase.kind == "train" else ()
        yield from _overrides((*again, *head_chunks(job)))
    if job.derived.world_size > 1:
        yield f"a larger placement.{role}.tp or pp"
    yield from _overrides(change for change in adapters(job) if tightest_with(job, change) is not None)
    narrower, names = list(moments(job)), [name for name in job.models if name in row.place.stages]
    optimizers = {  # with the optimizer on the device
        f"{job.specs[name].path}.optim"
        for name in names
        if "optimizer" not in job.away(name) or "optimizer" in job.needed(name, phase)
    }
    for key, value in narrower[-1].items() if narrower else ():
        if key.rpartition(".")[0] in optimizers:
            yield override(key, value)
    for name in names:
        parts = NEEDED["forward" if job.models[name].optim is None else "train"]
        for part in parts:  # on the device without need
            if part not in (*job.away(name), *job.needed(name, phase)):
                yield f"{job.specs[name].path}.{KEYS[part]}=true"


def _overrides(found: Iterable[Change]) -> Iterator[str]:
    for change in found:
        yield from (override(key, value) for key, value in change.items())
