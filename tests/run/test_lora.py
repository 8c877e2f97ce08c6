"""A job that trains adapters, as a person starts it: its reference, and the same steps after a resumption."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.run.small_run import MODEL, compared, run_folder, train


def test_a_job_with_adapters_resumed(tmp_path: Path) -> None:
    def run() -> None:
        code = train(
            tmp_path,
            2,
            model={**MODEL, "lora_rank": 4, "target_modules": ["q_proj", "v_proj", "down_proj"]},
            placement={"actor": {"tp": 2}, "ref": {"tp": 2}, "critic": {"pp": 2}},
            actor={
                "ppo_mini_batch_size": 8,
                "ppo_max_token_len_per_gpu": 128,
                "optim": {"lr": 1e-2},
                "use_kl_loss": True,
            },
            algorithm={"adv_estimator": "grpo"},
            trainer={"total_training_steps": 2, "save_freq": 1},
        )
        assert code == 0

    run()
    first, second = compared(tmp_path)
    assert first["actor/kl_loss"] == 0 and second["actor/kl_loss"] > 1e-6
    for line in (first, second):
        assert line["training/rollout_probs_diff_max"] < 1e-5 and line["actor/grad_norm"] > 0
    saved = run_folder(tmp_path) / "checkpoints"
    adapter = saved / "step_00000002" / "lora_adapter"
    card = (adapter / "README.md").read_text()
    assert {file.name for file in adapter.iterdir()} == {
        "adapter_config.json",
        "adapter_model.safetensors",
        "README.md",
    }
    shutil.rmtree(saved / "step_00000002")
    run()
    assert (adapter / "README.md").read_text() == card
    assert compared(tmp_path) == [first, pytest.approx(second, rel=0, abs=0, nan_ok=True)]
