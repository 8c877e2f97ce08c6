"""What a rank that ran out of memory is told of the plan."""

from __future__ import annotations

import pytest

from hpcrl.config.loader import load_config
from hpcrl.config.schema import Config
from hpcrl.controller.register import registration_of
from hpcrl.forecast.memory.fixes import advice, phase_of
from hpcrl.forecast.memory.memory import GIB, TrainingPlan
from hpcrl.workers.actor import ActorWorker, CriticWorker
from hpcrl.workers.frozen import RefWorker, RewardModelWorker, TeacherWorker
from hpcrl.workers.judge import JudgeWorker
from hpcrl.workers.rollout import RolloutWorker
from hpcrl.workers.weight_transfer import RefitWorker
from tests.runtime.conftest import REPOSITORY

KINDS = {
    "actor": ActorWorker,
    "critic": CriticWorker,
    "ref": RefWorker,
    "judge": JudgeWorker,
    "refit": RefitWorker,
    "reward": RewardModelWorker,
    "rollout": RolloutWorker,
    "teacher": TeacherWorker,
}


METHODS = """
rollout.generate rollout.generate_until_interrupted
actor.compute_log_prob actor.compute_ref_log_prob ref.compute_ref_log_prob
teacher.compute_teacher_log_prob reward.compute_rm_score judge.judge critic.compute_values critic.update_critic
actor.update_actor refit.update_weights actor.begin_save critic.begin_save
""".split()


@pytest.fixture(scope="module")
def config() -> Config:
    return load_config(REPOSITORY / "configs" / "ppo_70b.yaml")


@pytest.fixture(scope="module")
def job(config: Config) -> TrainingPlan:
    return TrainingPlan(config)


def test_every_phase_of_a_plan_is_a_method_of_a_worker(job: TrainingPlan) -> None:
    found = set()
    for name in METHODS:
        role, method = name.split(".")
        registration_of(KINDS[role], method)
        found.add(phase_of(role, method))
    assert {phase.name for phase in job.phases} <= found


@pytest.mark.parametrize(
    ("method", "changes"),
    [
        ("rollout.generate", "a smaller rollout.gpu_memory_utilization or rollout.max_num_seqs"),
        ("actor.update_actor", "actor.ppo_max_token_len_per_gpu below"),
        ("ref.compute_ref_log_prob", "ref.log_prob_max_token_len_per_gpu below"),
        ("refit.update_weights", "a smaller rollout.checkpoint_engine.update_weights_bucket_megabytes"),
    ],
)
def test_a_method_has_the_figures_of_its_phase_on_its_rank(
    config: Config, job: TrainingPlan, method: str, changes: str
) -> None:
    ranks = job.derived.world_size
    for rank in (0, ranks - 1):
        told = advice(config, ranks, rank, *method.split("."))
        (row,) = [row for row in job.rows() if row.phase == phase_of(*method.split(".")) and rank in row.place.ranks]
        assert told.startswith(f"`hpcrl plan` expects {row.total / GIB:.2f} GiB: ")
        assert f"; to need less: {changes}" in told


def test_what_stays_on_the_device_without_need_is_offered_for_offload(config: Config, job: TrainingPlan) -> None:
    told = advice(config, job.derived.world_size, 0, "ref", "compute_ref_log_prob")
    assert "param_offload" not in told and "optimizer_offload" not in told  # this template offloads everything
    stays = config.model_copy(update={"critic": config.critic.model_copy(update={"optimizer_offload": False})})
    told = advice(stays, job.derived.world_size, 0, "ref", "compute_ref_log_prob")
    assert "critic.optimizer_offload=true" in told and "critic.param_offload" not in told


def test_what_the_plan_does_not_know_is_no_error(config: Config) -> None:
    assert advice(config, 3, 0, "actor", "update_actor").startswith("`hpcrl plan` has no figures: ")
    assert advice(config, 512, 0, None, "start") == "`hpcrl plan` has no figures for this phase"
