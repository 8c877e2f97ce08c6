"""What makes a job that does not fit need less memory: the cheapest change, and advice to a rank that ran out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hpcrl.config.roles import KEYS, REF, RoleSpec
from hpcrl.config.schema import Config
from hpcrl.forecast.memory.memory import NEEDED, Phase, Row, TrainingPlan, binary, with_keys


def tightest(rows: list[Row]) -> Row:
    return max(rows, key=lambda row: row.total)


def cheapest_fix(job: TrainingPlan) -> tuple[dict[str, object], Row] | None:
    """The first change that makes the job fit, as config keys, and its tightest row; None if there is none.

    In this order: the layout of the role that takes most, micro-batches, the KV cache, offload, several of these, more
    nodes.
    """
    capacity = job.capacity
    assert capacity is not None
    for change in _changes(job):
        try:
            changed = TrainingPlan(with_keys(job.config, change), job.own_roles)
            row = tightest(changed.rows())
        except Exception as error:
            if getattr(error, "user_error", False):
                continue
            raise
        if row.total <= capacity:
            return change, row
    return None


def _changes(job: TrainingPlan) -> Iterator[dict[str, object]]:
    layouts, budgets, offloads = list(_layouts(job)), list(_budgets(job)), list(_more_offload(job))
    key, now = "rollout.gpu_memory_utilization", job.config.rollout.gpu_memory_utilization
    shares: list[dict[str, object]] = [{key: share / 10} for share in range(9, 0, -1) if share / 10 < now]
    yield from (*layouts, *budgets, *shares, *offloads)
    least = budgets[-1] if budgets else {}
    yield from (layout | least for layout in layouts)
    yield from (least | last[-1] for last in (shares, offloads) if last)
    for factor in (2, 4, 8, 16):
        nodes: dict[str, object] = {"job.nodes": job.config.job.nodes * factor}
        yield nodes
        yield from (nodes | budget for budget in budgets)
        yield from (nodes | layout | more for layout in layouts for more in ({}, least))


def _layouts(job: TrainingPlan) -> Iterator[dict[str, object]]:
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


def _more_offload(job: TrainingPlan) -> Iterator[dict[str, object]]:
    """Offload of frozen models, then of everything."""
    can_move = [spec for spec in job.specs.values() if hasattr(spec.config_of(job.config), KEYS["parameters"])]
    changes: dict[str, object] = {f"{spec.path}.{KEYS['parameters']}": True for spec in can_move if not spec.trains}
    if changes:
        yield dict(changes)
    changes |= {f"{spec.path}.{key}": True for spec in can_move if spec.trains for key in KEYS.values()}
    yield changes


def _budgets(job: TrainingPlan) -> Iterator[dict[str, object]]:
    """Halves of the micro-batches of the trained roles, down to one sequence."""
    longest = job.derived.max_sequence_length
    budgets = {
        f"{spec.path}.{spec.max_tokens}": spec.token_budget(job.config) for spec in job.specs.values() if spec.trains
    }
    while max(budgets.values()) > longest:
        budgets = {key: max(longest, tokens // 2) for key, tokens in budgets.items()}
        yield dict(budgets)


PHASES = {  # of a plan, by a worker's method, where neither its role nor `update_<role>` names them
    "actor.compute_log_prob": "old_log_prob",
    "actor.compute_ref_log_prob": "ref",
    "critic.compute_values": "values",
    "refit.update_weights": "refit",
    "actor.begin_save": "save_actor",
    "critic.begin_save": "save_critic",
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
    """Config keys that reduce the phase's memory, the cheapest first."""
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
        if phase.kind == "train" and config.model.recompute.granularity != "full":
            yield "model.recompute.granularity=full"
    for name in (name for name in job.models if name in row.place.stages):
        parts = NEEDED["forward" if job.models[name].optim is None else "train"]
        for part in parts:  # on the device without need
            if part not in (*job.away(name), *job.needed(name, phase)):
                yield f"{job.specs[name].path}.{KEYS[part]}=true"
    yield f"a larger placement.{role}.tp or pp"
