"""`hpcrl sft`: loss and gradient are TRL's, layouts agree, a resumed run is the uninterrupted one."""

from __future__ import annotations

import json
import logging
import math
import re
import runpy
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hpcrl.cli import load_job
from tests.mpi.lab import Lab, metrics, run_job

pytestmark = pytest.mark.ci_world(2)

FAMILY = Path(__file__).parents[1] / "algorithms" / "trl_cases" / "sft.py"
CASES = runpy.run_path(str(FAMILY))
RECORDED = np.load(FAMILY.with_suffix(".npz"))
LAYOUTS: dict[int, dict[str, dict[str, int]]] = {
    1: {"single": {}},
    2: {"dp": {}, "tp": {"tp": 2}, "pp": {"pp": 2}, "cp": {"cp": 2}},
    4: {"tp_pp": {"tp": 2, "pp": 2}, "cp_dp": {"cp": 2}, "tp_dp": {"tp": 2}},
}
ALONE = {"pools": {"one": "0"}, "actor": {"pool": "one"}, "rollout": {"pool": "one"}}


def run(lab: Lab, name: str, placement: dict[str, Any], model: dict, data: dict, own: dict, **trainer: Any) -> Path:
    template = {
        "run": {"name": f"conversations_{name}", "dir": str(lab.folder)},
        "placement": placement,
        "model": {"tokenizer": str(CASES["TOKENIZER"]), **model},
        "data": {"chat_template": CASES["TEMPLATE"], "max_prompt_length": 40, "max_response_length": 40, **data},
        "sft": {"max_token_len_per_gpu": 80, **own},
        "trainer": trainer,
    }
    job = load_job("sft")
    run_job(lab.world, "sft", job.prepare(job.schema().model_validate(template)))
    return lab.folder / f"conversations_{name}"


def write_rows(lab: Lab, name: str, rows: list[dict[str, Any]]) -> str:
    """Rows of TRL's columns as a file with ours, where the end-of-sequence token is not part of the answer."""
    path = lab.folder / f"{name}.jsonl"
    if lab.world.rank == 0:
        ours = [
            row if "messages" in row else {"prompt": row["prompt"], "answer": row["completion"].removesuffix("<|eos|>")}
            for row in rows
        ]
        path.write_text("".join(json.dumps(row) + "\n" for row in ours))
    lab.world.barrier()
    return str(path)


def start_weights(lab: Lab) -> tuple[str, dict[str, np.ndarray]]:
    """The model of TRL's record as a Hugging Face directory."""
    from safetensors.numpy import save_file

    prefix = "conversations/gradient "
    shapes = {key.removeprefix(prefix): RECORDED[key].shape for key in RECORDED if key.startswith(prefix)}
    folder, weights = lab.folder / "trl_model", CASES["weights"](shapes)
    if lab.world.rank == 0:
        folder.mkdir(exist_ok=True)
        save_file(weights, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps(CASES["SHAPE"]))
    lab.world.barrier()
    return str(folder), weights


@pytest.mark.parametrize("case", CASES["CASES"])
def test_loss_and_gradient_are_trls(lab: Lab, case: str, caplog: pytest.LogCaptureFixture) -> None:
    """One step of SGD at learning rate 1: the weights' difference is the gradient. Rank 0 shows what is trained."""
    from safetensors.numpy import load_file

    inputs = CASES["CASES"][case]
    folder, before = start_weights(lab)
    files = [write_rows(lab, f"trl_{case}", inputs["rows"])]
    sgd = {"optimizer": "sgd", "lr": 1.0, "weight_decay": 0.0, "clip_grad": 0.0}
    own = {"batch_size": 4, "total_training_steps": 1, "optim": sgd, "loss_type": inputs["loss_type"]}
    for name, sizes in LAYOUTS[lab.world.size].items():
        caplog.clear()
        with caplog.at_level(logging.INFO):
            done = run(
                lab, f"{case}_{name}", {"actor": sizes}, {"path": folder}, {"train_files": files}, own, save_hf=True
            )
        shown = [line for line in map(logging.LogRecord.getMessage, caplog.records) if "tokens are trained" in line]
        if lab.world.rank == 0:
            turns = ["5<|eos|>", "9, I think<|eos|>"] if case != "answers" else ["9, I think<|eos|>"]
            assert re.findall("\u27e6([^\u27e6\u27e7]+)\u27e7", shown[0]) == turns
        assert len(shown) == (lab.world.rank == 0)
        assert metrics(done)[1]["train/loss"] == pytest.approx(float(RECORDED[f"{case}/loss"]), rel=1e-5)
        exported = done / "checkpoints" / "step_00000001" / "huggingface"
        after = {key: it for path in exported.glob("*.safetensors") for key, it in load_file(path).items()}
        assert after.keys() == before.keys()
        expected = {key: RECORDED[f"{case}/gradient {key}"] for key in before}
        norm = math.sqrt(sum(float((it.astype(np.float64) ** 2).sum()) for it in expected.values()))
        wrong = sum(float((((before[key] - after[key]) - expected[key]) ** 2).sum()) for key in before)
        assert math.sqrt(wrong) < 1e-5 * norm


TINY = {"num_layers": 2, "hidden_size": 32, "ffn_hidden_size": 48, "num_attention_heads": 4, "num_query_groups": 2}
LORA = {"lora_rank": 4, "target_modules": ["q_proj", "down_proj"]}


def small(
    lab: Lab, name: str, placement: dict[str, Any], steps: int | None = 3, batch_size: int = 3, **model: Any
) -> dict:
    """Metrics by step of a run over conversations and answers, two of the first to one of the second."""
    files = [write_rows(lab, "small_chat", CASES["CONVERSATIONS"]), write_rows(lab, "small_answers", CASES["ANSWERS"])]
    data = {"train_files": files, "train_weights": [2, 1], "val_files": files}
    own = {"batch_size": batch_size, "total_training_steps": steps, "eval_freq": 2, "eval_score": False}
    own |= {"optim": {"lr": 1e-2}, "total_epochs": 2}
    return metrics(run(lab, name, placement, {**TINY, **model}, data, own, save_freq=2))


@pytest.mark.parametrize("lora", [{}, LORA], ids=["whole", "lora"])
def test_layouts_agree(lab: Lab, lora: dict[str, Any]) -> None:
    kind = "lora" if lora else "whole"
    expected = small(lab, f"{kind}_alone", ALONE, **lora)
    assert expected[2]["val/perplexity"] == pytest.approx(math.exp(expected[2]["val/loss"]))
    for name, sizes in LAYOUTS[lab.world.size].items():
        if lora and "cp" in sizes:
            continue
        for step, line in small(lab, f"{kind}_{name}", {"actor": sizes}, **lora).items():
            assert line == {key: pytest.approx(value, rel=1e-3, abs=1e-5) for key, value in expected[step].items()}


def test_resumed_equals_uninterrupted_bitwise(lab: Lab) -> None:
    """With fewer rows in a step than replicas."""
    make = partial(small, lab, placement={}, batch_size=1)
    straight = make("straight", steps=None)  # two epochs of eight rows
    assert list(straight) == list(range(1, 17))
    make("halted", steps=2)
    assert make("halted", steps=16) == straight
