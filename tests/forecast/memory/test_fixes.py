"""What `hpcrl plan` proposes for a job that does not fit: it fits, nothing of it is superfluous, and the cheap comes
first."""

from __future__ import annotations

import contextlib
import re

import pytest

from hpcrl.cli import load_job
from hpcrl.config.loader import load_config
from hpcrl.config.yaml_core import ConfigError
from hpcrl.forecast.command import describe
from hpcrl.forecast.memory.fixes import cheapest_fix, override, tightest
from hpcrl.forecast.memory.memory import GIB, TrainingPlan, with_keys
from hpcrl.forecast.memory.supervised import plan_of
from tests.forecast.memory.test_command import ALL_KEPT, ON_DEVICE, ROOT, TEMPLATE

ONE_GPU = ROOT / "configs" / "one_gpu"
ORDER = (  # the kinds of keys that a proposal may have, cheapest first
    *("max_token_len_per_gpu", "recompute", "head_chunk_tokens", "lora_rank", "_dtype", "_offload"),
    *("gpu_memory_utilization", "job.nodes"),
)


def proposed(job: str, template: str, *overrides: str) -> list[str]:
    """The overrides that the command prints; none for a job that fits. What it says of them holds."""
    path, described = str(ONE_GPU / template), load_job(job)
    lines = describe(described, path, overrides)
    at = next((n for n, line in enumerate(lines) if line.startswith("  cheapest fix")), None)
    if at is None:
        assert any(", it fits" in line for line in lines)
        return []
    keys = lines[at].split()[2:]
    fixed = plan_of(described, described.read_config(path, [*overrides, *keys]))
    row = tightest(fixed.rows())
    assert row.total <= fixed.capacity
    last = next(line for line in lines[at + 1 :] if f" {keys[-1]}: " in line or len(keys) == 1)
    assert last.endswith(f"then {row.total / GIB:.2f} GiB, in {row.phase}")
    for key in keys:
        less = described.read_config(path, [*overrides, *(other for other in keys if other != key)])
        with contextlib.suppress(ConfigError):  # a layout of more ranks
            assert tightest(plan_of(described, less).rows()).total > fixed.capacity, f"{key} is not needed"
    return keys


@pytest.mark.parametrize(
    ("job", "template", "overrides"),
    [
        ("train", "grpo_0_5b", ["job.gpu_memory_gib=16", "algorithm.adv_estimator=gae"]),
        ("preference", "dpo_0_5b", ["job.gpu_memory_gib=5"]),
        ("sft", "sft_0_5b", ["job.gpu_memory_gib=9"]),
        *(
            pytest.param(job, template, [f"job.gpu_memory_gib={gib}", *more], marks=pytest.mark.exhaustive)
            for job, template, least, more in (
                ("train", "grpo_1_5b", 7, []),
                ("train", "grpo_0_5b", 5, ["algorithm.adv_estimator=gae"]),
                ("train", "grpo_0_5b", 3, ["actor.use_kl_loss=true", "trainer.head_chunk_tokens=null"]),
                ("train", "grpo_3b_lora", 9, ["actor.optim.betas=[0.9, 0.99]"]),
                ("train", "grpo_1_5b", 9, ["actor.optim.optimizer=muon"]),
                ("preference", "dpo_0_5b", 3, []),
                ("sft", "sft_0_5b", 3, ["sft.eval_score=true"]),
            )
            for gib in (40, 30, 22, 18, 14, 11, 9, 7, 5, 3)
            if gib >= least
        ),
    ],
)
def test_a_proposal_pasted_as_overrides_fits(job: str, template: str, overrides: list[str]) -> None:
    proposed(job, f"{template}.yaml", *overrides)


def test_a_model_on_one_small_gpu_gets_adapters_and_no_second_gpu() -> None:
    keys = proposed("train", "grpo_1_5b.yaml", "job.gpu_memory_gib=24")
    assert [key.partition("=")[0] for key in keys] == ["actor.ppo_max_token_len_per_gpu", "model.lora_rank"]


def test_what_changes_the_training_less_comes_first() -> None:
    """On ever smaller GPUs the costliest kind of a proposal is ever later in the order, and more nodes are the last."""
    costliest: list[int] = []
    options = ["algorithm.adv_estimator=gae", "trainer.head_chunk_tokens=null", "rollout.kv_cache_gib=0.1"]
    for gib in (30, 14, 9, 8):
        config = load_config(ONE_GPU / "grpo_0_5b.yaml", [*options, f"job.gpu_memory_gib={gib}"])
        found = cheapest_fix(TrainingPlan(config))
        assert found is not None
        costliest.append(max(ORDER.index(kind) for key in found.change for kind in ORDER if kind in key))
    assert costliest == sorted(costliest)
    assert {ORDER[number] for number in costliest} >= {"max_token_len_per_gpu", "lora_rank", "_offload", "job.nodes"}


@pytest.mark.exhaustive
def test_a_job_may_have_no_fix() -> None:
    config = load_config(ONE_GPU / "grpo_3b_lora.yaml", ["job.gpu_memory_gib=4"])
    assert cheapest_fix(TrainingPlan(config)) is None


def test_a_smaller_cache_comes_before_adapters_where_generation_takes_most() -> None:
    keys = ["job.gpu_memory_gib=11", "actor.use_kl_loss=true", "model.recompute.granularity=full"]
    assert proposed("train", "grpo_0_5b.yaml", *keys) == ["rollout.gpu_memory_utilization=0.3"]


@pytest.mark.slow
def test_the_fix_of_the_70b_template() -> None:
    job = TrainingPlan(load_config(TEMPLATE, ALL_KEPT))
    found = cheapest_fix(job)
    assert found is not None
    assert found.change == {"actor.ppo_max_token_len_per_gpu": 5120, "critic.ppo_max_token_len_per_gpu": 5120}
    overrides = [*ALL_KEPT, *found.overrides]
    assert tightest(TrainingPlan(load_config(TEMPLATE, overrides)).rows()) == found.then


def test_another_layout_of_the_same_gpus_comes_before_adapters() -> None:
    budgets = [f"{role}.ppo_max_token_len_per_gpu=5120" for role in ("actor", "critic")]
    config = load_config(TEMPLATE, [*ON_DEVICE, *budgets, "job.nodes=32", "rollout.kv_cache_gib=2.0"])
    gib = tightest(TrainingPlan(config).rows()).total / GIB - 1.0
    found = cheapest_fix(TrainingPlan(with_keys(config, {"job.gpu_memory_gib": gib})))
    assert found is not None and found.change == {"placement.actor.pp": 16}


def test_values_are_those_of_yaml() -> None:
    assert override("actor.param_offload", True) == "actor.param_offload=true"
    assert re.fullmatch(r"rollout\.gpu_memory_utilization=0\.3", override("rollout.gpu_memory_utilization", 0.3))
