"""Whole jobs with a model of each family: rollout and training agree, a resumed job is an uninterrupted one, and
`transformers` reads what they export."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.model.families import make_model
from tests.mpi.lab import Lab, metrics, on

pytestmark = pytest.mark.ci_world(2)

STEPS = 10
NEW = (
    *("qwen3.5-moe", "qwen3-next", "qwen3.5", "nemotron-h", "gpt-oss", "gemma3", "apertus", "olmo3", "smollm3"),
    *("ministral", "seed-oss", "glm4-moe", "minimax-m2"),
)
WITH_EXPERTS = ("qwen3.5-moe", "qwen3-next", "nemotron-h", "gpt-oss", "glm4-moe", "minimax-m2")


@pytest.mark.parametrize("name", [NEW[0], *(pytest.param(name, marks=pytest.mark.exhaustive) for name in NEW[1:])])
def test_ten_steps_of_a_family(world: Any, lab: Lab, name: str) -> None:
    source = lab.folder / name
    if world.rank == 0:
        make_model(name, vocab_size=60, pad_token_id=0, bos_token_id=1, eos_token_id=2).save_pretrained(source)
    world.barrier()

    def run(folder: str, steps: int, save_freq: int) -> Path:
        return lab.run(
            f"{name}_{folder}",
            on(world, tp=world.size),
            model={"path": str(source), "vocab_size": None},
            rollout={"checkpoint_engine": {"verify": "always"}},
            # Else a token whose experts' scores are equal but for rounding may go to others in training.
            # At 1e-3 a token of step 7 is ill-conditioned, and exceeds the bound below on some processors.
            actor={"router_replay": {"mode": "R3" if name in WITH_EXPERTS else "disabled"}, "optim": {"lr": 3e-4}},
            algorithm={"adv_estimator": "grpo"},
            trainer={"total_training_steps": steps, "save_freq": save_freq, "save_hf": True},
        )

    whole = metrics(run("whole", STEPS, -1))
    assert len(whole) == STEPS
    assert max(line["training/rollout_log_probs_diff_max"] for line in whole.values()) < 1e-4
    run("halves", STEPS // 2, STEPS // 2)
    resumed = run("halves", STEPS, STEPS // 2)
    assert metrics(resumed) == whole
    exported = resumed / "checkpoints" / f"step_{STEPS:08d}" / "huggingface"
    trained, before = (
        transformers.AutoModelForCausalLM.from_pretrained(folder).state_dict() for folder in (exported, source)
    )
    assert trained.keys() == before.keys()
    assert any(not torch.equal(tensor, before[key]) for key, tensor in trained.items())
