"""Cards of exports hold what their run recorded, under names that can be published."""

from __future__ import annotations

import getpass
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from huggingface_hub import ModelCard

from hpcrl.run.model_card import card_facts, model_card, public_command, public_name

METRICS = [
    {"step": 0, "val-core/openai/gsm8k/acc/mean@1": 0.25, "val-aux/openai/gsm8k/reward/mean@1": 0.5},
    {"step": 4, "val-core/openai/gsm8k/acc/mean@1": 0.375, "actor/grad_norm": 1.0},
    {"step": 8, "val-core/openai/gsm8k/acc/mean@1": None},
    {"step": 12, "val-core/openai/gsm8k/acc/mean@1": 0.75},
]


def card(folder: Path, config: dict[str, Any], *, step: int = 8, job: str = "train", **kind: bool) -> ModelCard:
    """The card of a run in `folder`."""
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in METRICS))
    state = {"command": ["train", "configs/my.yaml", "placement.actor.tp=2", "run.seed=3"], "rows": {"val": {"b": 9}}}
    return ModelCard(model_card(card_facts(folder, {**state, "job": job}, step), **kind))


@pytest.mark.parametrize(
    "path, name",
    [
        ("/cache/hub/models--Qwen--Qwen3-8B/snapshots/0a1b", "Qwen/Qwen3-8B"),
        ("/scratch/models/Qwen/Qwen3-8B", "Qwen/Qwen3-8B"),
        ("../Qwen/Qwen3-8B/", "Qwen/Qwen3-8B"),
        ("/home/ada/Qwen3-8B", "Qwen3-8B"),
        ("/gpfs/home/ada/Qwen3-8B", "Qwen3-8B"),
        (f"/scratch/{getpass.getuser()}/Qwen3-8B", "Qwen3-8B"),
        (f"~{getpass.getuser()}/Qwen3-8B", "Qwen3-8B"),
        ("/work/runs/sft/checkpoints/step_00000020/huggingface", "sft/step_00000020"),
        ("/w/runs/grpo/bundle_0a1b2c3d/inputs/home/ada/Qwen3-8B", "Qwen3-8B"),
        ("/w/runs/grpo/bundle_0a1b2c3d/inputs/Qwen3-8B", "Qwen3-8B"),
        ("/home/ada", ""),
    ],
)
def test_a_name_has_no_folder_of_the_machine(path: str, name: str) -> None:
    assert public_name(path) == name


def test_a_command_says_what_ran_and_not_where() -> None:
    words = ["train", "/home/ada/jobs/my.yaml", "run.dir=/home/ada/runs", "placement.actor.tp=2", "job={nodes: 2}"]
    words += ["data.train_files=[/home/ada/a.parquet, '/d/e/b.parquet']", "actor.optim.lr=1e-6", "rollout.n=4"]
    expected = ["train", "jobs/my.yaml", "data.train_files=[a.parquet, 'e/b.parquet']", *words[-2:]]
    assert public_command(words) == expected


def test_figures_are_those_up_to_the_step(tmp_path: Path) -> None:
    config = {"algorithm": {"adv_estimator": "grpo"}, "run": {"seed": 0}, "model": {"path": None}}
    found = card(tmp_path, config)
    assert "| `val-core/openai/gsm8k/acc/mean@1` | 0.25 (step 0) | 0.375 (step 4) |" in found.text
    assert "val-aux" not in found.text and "0.75" not in found.text and "| `run.seed` | 0 |" in found.text
    assert "hpcrl train configs/my.yaml run.seed=3\n" in found.text
    assert found.data.tags == ["hpcrl", "grpo"] and "base_model" not in found.data.to_dict()
    assert "0.75 (step 12)" in card(tmp_path, config, step=12).text


def test_settings_are_those_that_the_job_reads(tmp_path: Path) -> None:
    own = {"loss_type": "sigmoid", "beta": 0.1, "optim": {"lr": 1e-6}}
    data = {"train_files": ["a"], "val_files": ["b"]}
    config = {"preference": own, "algorithm": {"adv_estimator": "gae"}, "actor": {"optim": {"lr": 0.5}}, "data": data}
    (tmp_path / "bundle").mkdir()
    (tmp_path / "bundle" / "origin.json").write_text('{"commit": "0a1b with changes"}')
    found = card(tmp_path, config, job="preference", is_vision=True)
    assert found.data.tags == ["hpcrl", "preference", "dpo"] and found.data.pipeline_tag == "image-text-to-text"
    assert "| `preference.beta` | 0.1 |" in found.text and "gae" not in found.text and "0.5 |" not in found.text
    assert "| `b` | val | 9 |" in found.text and "commit 0a1b with changes" in found.text
    assert "AutoModelForImageTextToText" in found.text and "From random weights: trained" in found.text


def test_the_base_is_that_of_an_export_and_its_licence_is_copied(tmp_path: Path) -> None:
    base, export, run = tmp_path / "models--org--base", tmp_path / "export", tmp_path / "run"
    for folder in (base, export, run):
        folder.mkdir()
    (base / "README.md").write_text("---\nlicense: other\nlicense_name: own\nlicense_link: LICENSE\n---\n")
    data = {"train_files": ["/c/datasets--org--sums/a.parquet", "/d/b.parquet"]}
    first = card(run, {"model": {"path": str(base)}, "data": data})
    first.save(export / "README.md")
    trained_on = {"model": {"path": str(export), "init_from": "/w/runs/sft"}}
    second, adapter = card(run, trained_on), card(run, trained_on, is_adapter=True)
    for found in (first, second):
        kept = found.data.to_dict()
        assert kept["base_model"] == "org/base" and kept["license_name"] == "own" and "license_link" not in kept
    assert first.data.datasets == ["org/sums"] and "No licence" not in first.text
    assert adapter.data.library_name == "peft" and adapter.data.base_model == "runs/sft"
    assert 'from_pretrained("runs/sft")' in adapter.text and "From `runs/sft`, of the model `org/base`:" in second.text
    (base / "README.md").write_text("---\nlicense: [broken\n---\n")
    assert "No licence is stated" in card(run, {"model": {"path": str(base)}}).text
