"""Jobs on Hugging Face directories, as a person starts them: score, convert, train, and what a wrong directory gets."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from huggingface_hub import ModelCard
from safetensors.torch import load_file

from tests.model.families import make_model
from tests.preloaded import RANK
from tests.run.small_run import SCORE, write_config
from tests.runtime.conftest import MPIEXEC, REPOSITORY, environment

BUDGET = "actor.ppo_max_token_len_per_gpu=999"
TOKENIZER, NUM_TOKENS = REPOSITORY / "configs" / "tokenizer", 25  # the models have 50 rows


def hpcrl(folder: Path, ranks: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [str(MPIEXEC), "-n", str(ranks), *RANK, "-m", "hpcrl", *arguments]
    return subprocess.run(
        command, cwd=folder, env=environment(), stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=300
    )


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for name in ("llama-3.1", "qwen3-moe"):
        make_model(name).save_pretrained(folder / name)
        shutil.copytree(TOKENIZER, folder / name, dirs_exist_ok=True)
    (folder / "llama-3.1" / "README.md").write_text("---\nlicense: llama3.1\ntags: [mine]\n---\n# llama\n")
    rng = np.random.default_rng(0)
    rows = [{"tokens": rng.integers(NUM_TOKENS, size=length).tolist()} for length in (1, 2, 40, 7, 31)]
    (folder / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def log_probs(path: Path) -> list[list[float]]:
    return [json.loads(line)["log_probs"] for line in path.read_text().splitlines()]


@pytest.mark.slow
def test_scores_are_those_of_transformers_in_every_form_of_the_weights(models: Path, tmp_path: Path) -> None:
    source, rows = models / "qwen3-moe", (models / "in.jsonl").read_text().splitlines()
    theirs = transformers.AutoModelForCausalLM.from_pretrained(source)
    expected = []
    for row in rows:
        ids = torch.tensor(json.loads(row)["tokens"])
        with torch.no_grad():
            logits = theirs(ids[None]).logits[0, :, :NUM_TOKENS].log_softmax(-1)
        expected.append(logits[:-1].gather(1, ids[1:, None])[:, 0])
    options = ("placement.actor.tp=2", "placement.actor.ep=2")
    forms = {"directory": (source, 2, options), "run": ("runs/converted", 1, ()), "back": ("back", 2, options[:1])}
    assert hpcrl(tmp_path, 2, "convert", str(source), "runs/converted", options[1]).returncode == 0
    assert hpcrl(tmp_path, 1, "convert", "runs/converted", "back").returncode == 0
    for name, (model, ranks, layout) in forms.items():
        tokens = ("--tokens", str(models / "in.jsonl"), "--out", f"{name}.jsonl")
        ended = hpcrl(tmp_path, ranks, "score", str(model), *tokens, *layout)
        assert ended.returncode == 0, ended.stderr
        for found, wanted in zip(log_probs(tmp_path / f"{name}.jsonl"), expected, strict=True):
            np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-4)
    before, after = (load_file(folder / "model.safetensors") for folder in (source, tmp_path / "back"))
    assert before.keys() == after.keys() and all(torch.equal(after[name], tensor) for name, tensor in before.items())
    assert (tmp_path / "back" / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()
    again = hpcrl(tmp_path, 1, "convert", "runs/converted", "back")
    assert again.returncode == 2 and again.stderr.startswith("hpcrl: error: back exists already")


@pytest.mark.slow
def test_training_from_a_directory_and_back(models: Path, tmp_path: Path) -> None:
    (tmp_path / "score.py").write_text(SCORE)
    config = write_config(
        tmp_path,
        model={"path": str(models / "llama-3.1"), "recompute": {"granularity": "full"}},
        placement={"actor": {"tp": 2}, "critic": {"pp": 2}, "ref": {"cp": 2}},
        algorithm={"adv_estimator": "gae", "use_kl_in_reward": True},
        critic={"ppo_max_token_len_per_gpu": 128},
        reward={"custom_reward_function": {"path": str(tmp_path / "score.py")}},
        data={
            "train_files": [str(tmp_path / "train.jsonl")],
            "val_files": [str(tmp_path / "train.jsonl")],
            "train_batch_size": 8,
            "max_prompt_length": 16,
            "max_response_length": 8,
        },
        trainer={"total_training_steps": 2, "save_freq": 1, "save_hf": True, "test_freq": 1},
    )
    ended = hpcrl(tmp_path, 2, "train", str(config))
    assert ended.returncode == 0, ended.stderr
    run = tmp_path / "runs" / "ends"
    for line in (run / "metrics.jsonl").read_text().splitlines()[1:]:  # after the first validation
        found = json.loads(line)
        assert found["training/rollout_probs_diff_max"] < 1e-5 and found["actor/grad_norm"] > 0
        assert found["training/global_step"] > 1 or abs(found["actor/reward_kl_penalty"]) < 1e-6
    tokens = ("--tokens", str(models / "in.jsonl"), "--out")
    exported = run / "checkpoints" / "step_00000002" / "huggingface"
    for name, model in (("exported", exported), ("checkpoint", run), ("start", models / "llama-3.1")):
        assert hpcrl(tmp_path, 1, "score", str(model), *tokens, f"{name}.jsonl").returncode == 0
    exported_ones, saved_ones, first_ones = (
        np.concatenate(log_probs(tmp_path / f"{name}.jsonl")) for name in ("exported", "checkpoint", "start")
    )
    assert hpcrl(tmp_path, 1, "convert", "runs/ends", "one_rank").returncode == 0
    check_card(exported / "README.md", tmp_path / "one_rank" / "README.md", run)
    own = "model.tokenizer=" + str(TOKENIZER)
    plain = write_config(tmp_path, run={"name": "plain", "dir": str(tmp_path / "runs")}, trainer={"save_freq": 1})
    steps = ("trainer.total_training_steps=1", own, f"model.init_from={models / 'qwen3-moe'}")
    other = hpcrl(tmp_path, 2, "train", str(plain), *steps)
    assert other.returncode == 2 and "describes another model" in other.stderr, other.stderr
    assert hpcrl(tmp_path, 2, "train", str(plain), *steps[:2]).returncode == 0
    assert hpcrl(tmp_path, 1, "convert", "runs/plain", "plain").returncode == 0
    assert (tmp_path / "plain" / "model.safetensors").is_file()
    assert np.array_equal(exported_ones, saved_ones) and np.abs(saved_ones - first_ones).max() > 1e-4


def check_card(exported: Path, converted: Path, run: Path) -> None:
    """The cards of a checkpoint's exports are equal, hold the run's figures, and no folder of this machine."""
    card = ModelCard.load(exported)
    assert converted.read_text() == card.content
    assert card.data.to_dict() == {
        "base_model": "models0/llama-3.1",
        "license": "llama3.1",
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["hpcrl", "gae"],
    }
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    key = next(name for name in lines[0] if name.startswith("val-core/"))
    for line in (lines[0], lines[-1]):
        assert f"{line[key]:.4g} (step {line['step']})" in next(row for row in card.text.splitlines() if key in row)
    for split in ("train", "val"):
        assert f"| `{run.parents[1].name}/train.jsonl` | {split} | 9 |" in card.text
    assert "hpcrl train " in card.text and "placement" not in card.text
    assert not re.search(r"[\s`=\"'(\[]/", card.content) and "step 2" in card.text


@pytest.mark.slow
def test_a_wrong_directory_ends_the_job_before_anything_is_built(models: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(models / "llama-3.1", folder)
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**settings, "intermediate_size": 64}))
    config = write_config(tmp_path, model={"path": str(folder)})
    for arguments, said in (
        (("train", str(config)), "gate_proj.weight has shape (48, 32); config.json says (64, 32)"),
        (("score", "model", "--tokens", "none.jsonl", "--out", "out.jsonl"), "config.json says (64, 32)"),
        (("score", str(models / "llama-3.1"), "--tokens", "none.jsonl", "--out", "out.jsonl"), "none.jsonl"),
        (
            ("score", str(models / "llama-3.1"), "--out", "out.jsonl"),
            "score: the following arguments are required: --tokens",
        ),
        (("convert", "nothing", "target"), "nothing: expected a Hugging Face directory, a run or"),
        (("train", str(config), f"model.path={models / 'qwen3-moe'}", "placement.actor.ep=3"), "does not divide"),
        (
            ("train", str(config), f"model.path={models / 'llama-3.1'}", "data.max_response_length=250", BUDGET),
            "exceeds the 256",
        ),
    ):
        ended = hpcrl(tmp_path, 1, *arguments)
        assert ended.returncode == 2 and said in ended.stderr, ended.stderr
        assert ended.stderr.count("\n") == 1, ended.stderr
