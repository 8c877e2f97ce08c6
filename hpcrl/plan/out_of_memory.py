"""What `hpcrl plan` expects of a phase that ran out of GPU memory, and what would need less. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hpcrl.config.roles import KEYS, REF, Part, RoleSpec, offloaded
from hpcrl.config.schema import Config
from hpcrl.plan.memory import NEEDED, Phase, Row, TrainingPlan, binary, with_keys

PHASES = {  # a worker's method -> the plan's name of the phase
    "rollout.generate": "rollout",
    "rollout.go_on": "rollout",
    "actor.compute_log_prob": "old_log_prob",
    "actor.compute_ref_log_prob": "ref",
    "ref.compute_ref_log_prob": "ref",
    "teacher.compute_teacher_log_prob": "teacher",
    "reward.compute_rm_score": "reward",
    "critic.compute_values": "values",
    "critic.update_critic": "update_critic",
    "actor.update_actor": "update_actor",
    "refit.update_weights": "refit",
    "actor.begin_save": "save_actor",
    "critic.begin_save": "save_critic",
}


def advice(
    config: Config,
    num_ranks: int,
    rank: int,
    role: str | None,
    method: str | None,
    own_roles: Sequence[RoleSpec] = (),
) -> str:
    """One line for a rank of `hpcrl train` that ran out of memory in a method of a role."""
    try:
        job = TrainingPlan(with_keys(config, _size(config, num_ranks)), tuple(own_roles))
        name = PHASES.get(f"{role}.{method}", f"update_{role}" if "update" in (method or "") else role)
        phase = next((phase for phase in job.phases if phase.name == name), None)
        row = next((row for row in job.rows() if row.phase == name and rank in row.place.ranks), None)
    except Exception as error:
        if not getattr(error, "user_error", False):
            raise
        return f"`hpcrl plan` has no figures: {error}"
    if phase is None or row is None:
        return "`hpcrl plan` has no figures for this phase"
    return f"`hpcrl plan` expects {_figures(row)}; to need less: {', '.join(changes(job, phase, row))}"


def _size(config: Config, num_ranks: int) -> dict[str, object]:
    """The job as it was started, which `job` need not say."""
    per_node = config.job.ntasks_per_node
    if num_ranks % per_node:
        per_node = num_ranks
    return {"job.nodes": num_ranks // per_node, "job.ntasks_per_node": per_node, "job.gpus_per_node": per_node}


def _figures(row: Row) -> str:
    parts = zip(Row._fields[2:], row[2:], strict=True)
    return f"{binary(row.total)}: " + ", ".join(f"{name} {binary(nbytes)}" for name, nbytes in parts if nbytes)


def changes(job: TrainingPlan, phase: Phase, row: Row) -> Iterator[str]:
    """Keys that make the phase need less, the cheapest first."""
    config, role = job.config, phase.role
    if phase.kind == "generate":
        yield "a smaller rollout.gpu_memory_utilization or rollout.max_num_seqs"
    elif phase.kind == "refit":
        yield "a smaller rollout.checkpoint_engine.update_weights_bucket_megabytes"
    elif phase.work is not None:
        spec = REF if phase.name == "ref" else job.specs[role]
        if spec.max_tokens:
            yield f"{spec.path}.{spec.max_tokens} below {spec.token_budget(config)}"
        if phase.kind == "train" and config.model.recompute.granularity != "full":
            yield "model.recompute.granularity=full"
    yield from _offloads(job, phase, row)
    yield f"a larger placement.{role}.tp or pp"


def _offloads(job: TrainingPlan, phase: Phase, row: Row) -> Iterator[str]:
    """Of the roles on the rank, what this phase does not need and what is on the device all the same."""
    for role, model in job.models.items():
        if role not in row.place.stages:
            continue
        parts: tuple[Part, ...] = (
            ("parameters", "gradients", "optimizer") if model.optim is not None else ("parameters",)
        )
        works = role == phase.role or (role == "actor" and phase.kind == "refit")
        kept = {*offloaded(job.config, job.specs[role]), *(NEEDED[phase.kind] if works else ())}
        for part in parts:
            if part not in kept:
                yield f"{job.specs[role].path}.{KEYS[part]}=true"
