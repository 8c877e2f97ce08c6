"""Jobs on a device that is not the CPU: no tensor on the wrong one, and the CPU's numbers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.mpi.lab import Lab, metrics, on
from tests.strict_device.load import in_place_of_cuda, load_on_all_ranks

pytestmark = pytest.mark.ci_world(2)

SGD = {"optimizer": "sgd", "lr": 0.05}
OFFLOAD = {"param_offload": True, "grad_offload": True, "optimizer_offload": True}
REFIT = {"checkpoint_engine": {"alias": False, "verify": "always"}}


@pytest.fixture(scope="module")
def device(world: Any) -> torch.device:
    return load_on_all_ranks(world)


@pytest.fixture
def labs(world: Any, lab: Lab, device: torch.device, countdown_files: Path) -> Iterator[Any]:
    """Runs a job on both devices and compares every metric."""
    folder = lab.folder / "on_device"
    if world.rank == 0:
        folder.mkdir(exist_ok=True)
    world.barrier()
    there = Lab(replace(world, device=device), countdown_files, folder)

    def run(kind: str, name: str, *arguments: Any, **sections: Any) -> dict[int, dict[str, float]]:
        expected = metrics(getattr(lab, kind)(f"device_{name}", *arguments, **sections))
        with in_place_of_cuda(device):
            found = metrics(getattr(there, kind)(name, *arguments, **sections))
        assert set(found) == set(expected)
        for step, values in expected.items():
            assert set(found[step]) == set(values)
            # mean(exp(2 x) - 1) of a sum x of log-ratios cancels, and has that many more units of rounding
            loose = {key for key in values if key.startswith("rollout_corr/")}
            for keys, least in ((values.keys() - loose, 1e-5), (loose, 1e-4)):
                expected = {key: values[key] for key in keys}
                assert {key: found[step].get(key) for key in keys} == pytest.approx(
                    expected, rel=1e-4, abs=least, nan_ok=True
                ), step
        return found

    yield run


def test_ppo_with_a_critic_a_reference_and_offload(labs: Any) -> None:
    """The cache holds a part of the sequences, so that some are preempted; the head runs on a few rows at a time."""
    roles = {"actor": {**OFFLOAD, "optim": SGD}, "critic": {**OFFLOAD, "optim": SGD}, "ref": {"param_offload": True}}
    rollout = {"kv_cache_gib": 6e-5, "max_num_seqs": 8, "n": 2, **REFIT}  # seven blocks, three for a long sequence
    trainer = {"total_training_steps": 2, "head_chunk_tokens": 16}
    found = labs("run", "ppo", on(2, tp=2), **roles, rollout=rollout, data={"max_response_length": 60}, trainer=trainer)
    assert found[2]["critic/grad_norm"] > 0


def test_grpo_of_adapters_in_a_mixture_resumes(labs: Any) -> None:
    mixture = {"family": "qwen3_moe", "num_experts": 4, "moe_topk": 2, "moe_ffn_hidden_size": 32, "lora_rank": 4}
    sections = {
        "model": mixture,
        "algorithm": {"adv_estimator": "grpo", "use_kl_in_reward": False},
        "rollout": REFIT,
        "actor": {"optim": SGD},
    }
    for steps in (1, 2):
        trainer = {"total_training_steps": steps, "save_freq": 1}
        found = labs("run", "grpo", {**on(2, ep=2), "rollout": {}}, **sections, trainer=trainer)
    assert set(found) == {1, 2}


def test_rollout_in_8_bits_of_a_policy_with_adapters(labs: Any) -> None:
    sections = {
        "model": {"lora_rank": 4},
        "algorithm": {"adv_estimator": "grpo", "use_kl_in_reward": False},
        "rollout": {"quantization": "fp8", "kv_cache_dtype": "fp8", **REFIT},
        "actor": {"optim": SGD},
    }
    found = labs("run", "fp8", {"actor": {"tp": 2}, "ref": {"tp": 2}, "rollout": {"tp": 1}}, **sections)
    assert 1e-4 < found[2]["training/rollout_log_probs_diff_mean"] < 0.5


def test_distillation_and_a_judge(lab: Lab, labs: Any) -> None:
    """The judge's weights are on the host while the student trains."""
    grpo = {"algorithm": {"adv_estimator": "grpo", "use_kl_in_reward": False}}
    teacher = lab.run("device_teacher", on(2), **grpo, trainer={"total_training_steps": 1, "save_freq": 1})
    judge = {"template": "{prompt}{response}=", "pattern": r"(\d)", "max_prompt_length": 40, "max_response_length": 8}
    judge |= {"enable": True, "init_from": str(teacher), "param_offload": True}
    sections = {"distillation": {"enabled": True}, "teacher": {"init_from": str(teacher)}, "rollout": REFIT}
    placement = {**on(2, pp=2), "judge": {"tp": 2}}
    found = labs("run", "distillation", placement, **grpo, **sections, actor={"optim": SGD}, reward={"judge": judge})
    assert found[2]["reward/judge/unparsed_ratio"] < 1


def test_supervised_fine_tuning(labs: Any) -> None:
    labs("run_sft", "sft", on(2, tp=2), sft={"batch_size": 8, "total_training_steps": 2, "optim": SGD})


def test_reward_model(labs: Any) -> None:
    labs("run_rm", "rm")
