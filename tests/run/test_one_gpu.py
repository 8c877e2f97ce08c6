"""The jobs of configs/one_gpu, with small models and short texts, on the CPU: a dry run, and two steps."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.preloaded import RANK
from tests.runtime.conftest import REPOSITORY, environment

FOLDER = REPOSITORY / "configs" / "one_gpu"
JOBS = {
    "grpo_0_5b": "train",
    "grpo_1_5b": "train",
    "grpo_1_5b_lora": "train",
    "grpo_3b_lora": "train",
    "sft_0_5b": "sft",
    "samples_0_5b": "generate",
    "dpo_0_5b": "preference",
    **dict.fromkeys(("sft_1_5b_lora", "sft_3b_lora"), "sft"),
    **dict.fromkeys(("dpo_1_5b_lora", "dpo_3b_lora"), "preference"),
}
IN_CI = ("grpo_1_5b_lora", "dpo_0_5b")
SMALL = [
    f"model.tokenizer={REPOSITORY / 'configs' / 'tool_tokenizer'}",
    *("model.init_from=null", "model.hf_config.hidden_size=64", "model.hf_config.intermediate_size=96"),
    *("model.hf_config.num_hidden_layers=2", "model.hf_config.num_attention_heads=4", "model.hf_config.vocab_size=128"),
    *("data.max_prompt_length=160", "data.max_response_length=24", "data.train_batch_size=4", "data.val_max_samples=4"),
    *("rollout.n=2", "rollout.max_num_seqs=8", "rollout.max_num_batched_tokens=256", "rollout.kv_cache_gib=0.01"),
    *("actor.ppo_mini_batch_size=4", "actor.ppo_max_token_len_per_gpu=400", "trainer.save_freq=2"),
    *("job.gpus_per_node=0", "job.cpus_per_task=1"),
]
OWN = {
    "train": ["trainer.total_training_steps=2", "trainer.test_freq=2"],
    "sft": [
        f"sft.{key}" for key in ("batch_size=4", "total_training_steps=2", "max_token_len_per_gpu=400", "eval_freq=2")
    ],
    "preference": [
        f"preference.{key}" for key in ("batch_size=4", "total_training_steps=2", "max_token_len_per_gpu=400")
    ],
    "generate": [],
}


def hpcrl(folder: Path, *arguments: str, python: Sequence[str | Path] = RANK, **variables: str) -> str:
    command = [*python, "-m", "hpcrl", *arguments]
    done = subprocess.run(
        command, cwd=folder, env=environment(**variables), capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with data/gsm8k, of files as GSM8K has them, and pairs."""
    folder = tmp_path_factory.mktemp("one_gpu")
    rows = [{"question": f"What is {i} + {i + 1}?", "answer": f"<<{i}>> #### {2 * i + 1}"} for i in range(40)]
    (folder / "raw").mkdir()
    for name, part in (("train", rows[:32]), ("test", rows[32:])):
        (folder / "raw" / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    hpcrl(folder, "data", "gsm8k", "--from", "raw", "--out", "data/gsm8k")
    pairs = [
        {"prompt": [{"role": "user", "content": row["question"]}], "chosen": row["answer"], "rejected": "#### 0"}
        for row in rows
    ]
    (folder / "data" / "gsm8k" / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in pairs))
    return folder


def overrides(template: str) -> list[str]:
    files = ["data.train_files=[data/gsm8k/pairs.jsonl]"] if JOBS[template] == "preference" else []
    return [*SMALL, *OWN[JOBS[template]], *files]


@pytest.mark.parametrize(
    "template", [pytest.param(it, marks=() if it in IN_CI else pytest.mark.exhaustive) for it in JOBS]
)
def test_two_steps(template: str, data: Path) -> None:
    hpcrl(data, JOBS[template], str(FOLDER / f"{template}.yaml"), *overrides(template))
    if JOBS[template] == "generate":
        samples = data / "runs" / template / "generations.jsonl"
        assert len(samples.read_text().splitlines()) == 4 * 2
        return
    lines = [json.loads(line) for line in (data / "runs" / template / "metrics.jsonl").read_text().splitlines()]
    assert lines[-1]["step"] == 2
    assert (data / "runs" / template / "checkpoints" / "step_00000002").is_dir()
    if JOBS[template] == "train":
        assert any(key.startswith("val-core/openai/gsm8k/") for key in lines[-1])


@pytest.mark.exhaustive
def test_a_run_with_adapters_is_evaluated_exported_and_a_start(data: Path) -> None:
    """The commands of docs/one_gpu.md after a run: its score, that of its export, and a run that starts from it."""
    template, small = str(FOLDER / "grpo_1_5b_lora.yaml"), overrides("grpo_1_5b_lora")
    hpcrl(data, "train", template, *small, "run.name=first")
    (data / "models").mkdir()
    hpcrl(data, "convert", "runs/first", "models/mine")
    for number, start in enumerate(("runs/first", "models/mine")):
        hpcrl(data, "evaluate", template, *small, f"run.name=evaluated_{number}", f"model.init_from={start}")
        (found,) = (data / "runs" / f"evaluated_{number}").rglob("evaluation.json")
        assert "val-core/openai/gsm8k/" in found.read_text()
    hpcrl(data, "train", template, *small, "run.name=second", "model.init_from=models/mine")


@pytest.mark.parametrize(
    "template", [pytest.param(it, marks=() if it == "grpo_0_5b" else pytest.mark.exhaustive) for it in JOBS]
)
def test_a_dry_run(template: str, tmp_path: Path) -> None:
    """As it is, on one rank; it names the files that are not here."""
    said = hpcrl(tmp_path, JOBS[template], str(FOLDER / f"{template}.yaml"), python=[sys.executable], HPCRL_DRY_RUN="1")
    assert "dry run: one world of 1 ranks" in said and "all ranks agree" in said and "note:" not in said
    assert "warning: model.init_from: models/Qwen2.5-" in said
