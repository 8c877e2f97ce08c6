"""What makes a phase need less memory: advice to a rank that ran out of it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from hpcrl.config.roles import KEYS, REF, RoleSpec
from hpcrl.config.schema import Config
from hpcrl.forecast.memory.fixes import Change, adapters, head_chunks, moments, override, recompute, tightest_with
from hpcrl.forecast.memory.memory import NEEDED, Phase, Row, TrainingPlan, binary, with_keys

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
