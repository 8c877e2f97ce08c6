"""Jobs with pictures: layouts and modes, resume, and what is encoded how often."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet
import pytest
from PIL import Image

from hpcrl.batch.ragged import Ragged
from hpcrl.observe.read.archive import read_step
from hpcrl.observe.record.archive import step_path
from hpcrl.runtime.exits import BAD_INPUT, InputError, exit_code
from tests.geometry import SIDE, write_geometry
from tests.mpi.lab import ROOT, Lab, interrupted, metrics, on, own_layout, reused


def make_model(folder: Path, family: str) -> None:
    tool = [sys.executable, str(ROOT / "tools/make_vision_model.py"), "--family", family]
    subprocess.run([*tool, "--out", str(folder / family)], check=True, capture_output=True)


@pytest.fixture(scope="session")
def shown(world, lab: Lab) -> dict[str, Any]:
    """The model and the data as sections of a config."""
    folder = lab.folder / "shown"
    if world.rank == 0:
        folder.mkdir()
        for family in ("qwen2_5_vl", "qwen3_vl"):
            make_model(folder, family)
        write_geometry(folder / "train.parquet", 24)
        write_geometry(folder / "val.parquet", 6)
    world.barrier()
    data = {
        "train_files": [str(folder / "train.parquet")],
        "val_files": [str(folder / "val.parquet")],
        "max_prompt_length": 96,
        "train_batch_size": 6,
    }
    wide = {"ppo_max_token_len_per_gpu": 512}
    return {"data": data, "actor": wide, "critic": wide, "folder": folder}


def sections(shown: dict[str, Any], family: str = "qwen2_5_vl", train: str = "none", **more: Any) -> dict[str, Any]:
    own = {"path": str(shown["folder"] / family), "tokenizer": None, "vision": {"train": train}}
    return {**{name: shown[name] for name in ("data", "actor", "critic")}, "model": own, **more}


@pytest.mark.ci_world(2)
@pytest.mark.parametrize("train", ["none", pytest.param("all", marks=pytest.mark.exhaustive)])
def test_resumed_equals_uninterrupted_bitwise(world, lab: Lab, shown, train: str) -> None:
    placement, name = own_layout(world.size), f"shown_{train}"
    straight = lab.run(
        f"{name}_straight", placement, **sections(shown, train=train, trainer={"total_training_steps": 3})
    )
    lab.run(
        f"{name}_halted", placement, **sections(shown, train=train, trainer={"total_training_steps": 1, "save_freq": 1})
    )
    resumed = lab.run(
        f"{name}_halted", placement, **sections(shown, train=train, trainer={"total_training_steps": 3, "save_freq": 1})
    )
    assert metrics(resumed) == metrics(straight)
    _, samples, _ = read_step(step_path(resumed / "rollouts", 3))
    for row, names in zip(samples["row"].tolist(), samples["pictures"].tolist(), strict=True):
        sizes = [(2 * SIDE, SIDE) if number else (SIDE, SIDE) for number in range((1, 2, 0)[row % 3])]
        assert [Image.open(resumed / "rollouts" / "pictures" / name).size for name in json.loads(names)] == sizes


@pytest.mark.slow
@pytest.mark.ci_world(2)
@pytest.mark.parametrize("train", [pytest.param("none", marks=pytest.mark.exhaustive), "all"])
def test_recorded_rollouts_are_replayed_with_their_pictures(world, lab: Lab, shown, train: str) -> None:
    placement, one_step = own_layout(world.size), {"total_training_steps": 1}
    recorded = lab.run(f"recorded_{train}", placement, **sections(shown, train=train, trainer=one_step))
    trainer = {**one_step, "rollouts_from": str(recorded / "rollouts")}
    replayed = lab.run(f"replayed_{train}", placement, **sections(shown, train=train, trainer=trainer))
    expected, found = metrics(recorded)[1], metrics(replayed)[1]
    assert found["training/rollout_log_probs_diff_max"] < 1e-4
    assert found["actor/grad_norm"] == pytest.approx(expected["actor/grad_norm"], rel=1e-4)


# Random weights write no calls: every first turn is one. Pictures of two sizes; each second one is in many samples.
TOOLS = """
from PIL import Image
from hpcrl.rollout.environments.tools import ToolCall, register_tool_parser, tool

@tool
def zoom(text: str) -> dict:
    "Shows a picture."
    number = sum(map(ord, text))
    side = 16 + 16 * (number % 2)
    color = (number % 256, 0, 0) if number % 3 else (0, 0, 255)
    return {"text": "see", "image": Image.new("RGB", (side, 16), color)}

@register_tool_parser("always")
def always(text):
    return [ToolCall("zoom", {"text": text})]
"""


def with_tool(world, shown: dict[str, Any]) -> dict[str, Any]:
    """Sections of a job whose tool shows pictures."""
    if world.rank == 0:
        (shown["folder"] / "zoom.py").write_text(TOOLS)
    world.barrier()
    tool = {"function_tool_path": str(shown["folder"] / "zoom.py"), "format": "always"}
    multi_turn = {"enable": True, "max_assistant_turns": 2, **tool}
    return {"rollout": {"multi_turn": multi_turn}, "data": {**shown["data"], "max_response_length": 64}}


@pytest.mark.slow
@pytest.mark.world(2)
@pytest.mark.parametrize(
    ("family", "train"), [pytest.param("qwen2_5_vl", "none", marks=pytest.mark.exhaustive), ("qwen3_vl", "all")]
)
def test_tools_answer_with_pictures(world, lab: Lab, shown, straight, family: str, train: str) -> None:
    """Training agrees with the log-probs of what was drawn after a picture; a step that was drawn is repeated bit for
    bit, and replayed from its archive, without a call of the tool."""
    own, trainer = with_tool(world, shown), {"total_training_steps": 2, "save_freq": 1}

    def options(**more: Any) -> dict[str, Any]:
        return sections(shown, family, train, **own, trainer={**trainer, **more})

    whole = straight(f"tools_{family}", own_layout(2), **options())
    expected = metrics(whole)[2]
    assert expected["training/rollout_log_probs_diff_max"] < 1e-4 and expected["tools/calls"] > 0
    drawn = interrupted(world, lab, whole, f"cut_tools_{family}", saved=1, drawn=2)
    again = lab.run(f"cut_tools_{family}", own_layout(2), **options())
    assert reused(again, 2) == drawn > 0
    assert {name for name, value in metrics(again)[2].items() if value != expected[name]} <= {"tools/calls"}

    tokens, samples, _ = read_step(step_path(whole / "rollouts", 1))
    response_mask = Ragged(*tokens["response_mask"])
    answered = 0
    for row, text in enumerate(samples["tool_pictures"].tolist()):
        for picture in json.loads(text):
            with Image.open(whole / "rollouts" / "pictures" / picture["name"]) as image:
                assert image.size[1] == 16
            start, num = picture["start"] - int(samples["prompt_length"][row]), np.prod(picture["grid"]) // 4
            assert not response_mask.row(row)[start : start + num].any()
            answered += 1
    assert answered > 0
    replayed = lab.run(
        f"replayed_tools_{family}",
        own_layout(2),
        **options(total_training_steps=1, rollouts_from=str(whole / "rollouts")),
    )
    assert metrics(replayed)[1]["training/rollout_log_probs_diff_max"] < 1e-4
    assert metrics(replayed)[1]["actor/grad_norm"] == pytest.approx(metrics(whole)[1]["actor/grad_norm"], rel=1e-4)


@pytest.mark.slow
@pytest.mark.ci_world(2)
@pytest.mark.parametrize(
    "family", ["qwen2_5_vl", *(pytest.param(it, marks=pytest.mark.exhaustive) for it in ("qwen3_vl", "qwen3_vl_moe"))]
)
def test_rollout_and_training_log_probs_agree_over_five_steps(world, lab: Lab, shown, family: str) -> None:
    """More than an epoch of a data file of which some rows have no picture; experts are those of the rollout."""
    placement = {**own_layout(world.size), "rollout": {"tp": 1}}
    own = {"trainer": {"total_training_steps": 5, "save_rollouts": False}}
    if family == "qwen3_vl_moe":
        own["actor"] = shown["actor"] | {"router_replay": {"mode": "R3"}}
        if world.rank == 0:
            make_model(shown["folder"], family)
        world.barrier()
    run = lab.run(f"ten_shown_{family}", placement, **sections(shown, family, "all", **own))
    for step, line in metrics(run).items():
        assert line["training/rollout_log_probs_diff_max"] < 1e-4, step


@pytest.mark.world(1, 2)
@pytest.mark.ci_world(2)
def test_pictures_are_encoded_once(world, lab: Lab, shown, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a frozen tower: once per step and replica of the engine, and not again while they are in host memory. With
    processes that decode them ahead, too."""
    placement = {**on(world.size, tp=world.size), "critic": {}}
    data, steps = {**shown["data"], "image_workers": 1}, {"total_training_steps": 5}
    with monkeypatch.context() as patch:
        patch.delattr("hpcrl.data.image_loader.readable")  # around what the rank decodes
        ahead = lab.run("encoded_ahead", placement, **sections(shown, data=data, trainer=steps))
    run = lab.run("encoded", placement, **sections(shown, trainer=steps))
    assert metrics(ahead) == metrics(run)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    distinct = len({each["bytes"] for number in range(24) for each in images_of(shown, number)})
    assert sum(line["perf/pictures_encoded"] for line in lines) == distinct
    assert all(0 < line["perf/pictures"] <= 12 for line in lines)


def images_of(shown: dict[str, Any], row: int) -> list[dict[str, Any]]:
    return pyarrow.parquet.read_table(shown["folder"] / "train.parquet").slice(row, 1).to_pylist()[0]["images"]


@pytest.mark.ci_world(2)
def test_a_role_without_a_tower_is_an_error_at_the_start(
    world, lab: Lab, shown, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On all ranks, before any model is built; tests/forecast/memory/test_command.py has a reward model."""
    monkeypatch.delattr("hpcrl.engine.engine.build_model")
    teacher = {"model": {"num_layers": 1}, "init_from": str(shown["folder"] / "qwen2_5_vl")}
    own = {"teacher": teacher, "distillation": {"enabled": True}}
    with pytest.raises(
        InputError, match=r"the model of teacher has no vision tower, and the policy's .*path$"
    ) as caught:
        lab.run("blind", own_layout(world.size), **sections(shown, **own))
    assert exit_code(caught.value) == BAD_INPUT and caught.value.everywhere


@pytest.mark.exhaustive
@pytest.mark.world(4)
def test_samples_ahead_are_saved_with_the_pictures_of_tools(world, lab: Lab, shown) -> None:
    own = {
        **with_tool(world, shown),
        "async_training": {"mode": "one_step_off"},
        "algorithm": {"use_kl_in_reward": False},
    }
    found = []
    for name, steps in (("whole", [3]), ("halted", [1, 3])):
        for number in steps:
            trainer = {"total_training_steps": number, "save_freq": 1}
            run = lab.run(f"ahead_{name}", pools(), **sections(shown, **own, trainer=trainer))
        found.append(metrics(run))
    for step, line in found[0].items():  # up to rounding, which depends on when tools answer
        assert found[1][step]["actor/grad_norm"] == pytest.approx(line["actor/grad_norm"], rel=1e-3)


def pools() -> dict[str, Any]:
    """Rank 0 in no pool, training on rank 1, generation on ranks 2 and 3."""
    placement = {"pools": {"lead": "0", "train": "1", "generate": "2-3"}}
    placement |= {role: {"pool": "train"} for role in ("actor", "critic", "ref")}
    return placement | {"rollout": {"pool": "generate", "tp": 2}}


@pytest.mark.slow
@pytest.mark.world(4)
@pytest.mark.parametrize("mode", [pytest.param("one_step_off", marks=pytest.mark.exhaustive), "bounded_staleness"])
def test_asynchronous_modes(world, lab: Lab, shown, mode: str) -> None:
    kl = {"use_kl_in_reward": False}
    run = lab.run(
        f"shown_{mode}",
        pools(),
        **sections(shown, algorithm=kl, async_training={"mode": mode}, trainer={"total_training_steps": 3}),
    )
    assert metrics(run)[1]["training/rollout_log_probs_diff_max"] < 1e-4


@pytest.mark.slow
@pytest.mark.ci_world(2)
def test_supervised_jobs(world, lab: Lab, shown) -> None:
    """SFT and DPO in two layouts have the same losses."""
    for job, own in (
        ("sft", {"sft": {"batch_size": 6, "total_training_steps": 2, "max_token_len_per_gpu": 256, "eval_freq": -1}}),
        (
            "preference",
            {
                "preference": {
                    "batch_size": 6,
                    "total_training_steps": 2,
                    "max_token_len_per_gpu": 256,
                    "eval_freq": -1,
                    "chosen_key": "answer",
                    "rejected_key": "wrong",
                }
            },
        ),
    ):
        found = []
        for name, placement in (("one", on(world.size)), ("split", on(world.size, pp=world.size))):
            options = sections(shown, train="all", **own)
            template = lab.config(f"shown_{job}_{name}", placement, options)
            template["trainer"].pop("total_training_steps")
            found.append(metrics(lab.run_template(job, template)))
        for step, line in found[0].items():
            for key in ("train/loss", "actor/grad_norm"):
                assert found[1][step][key] == pytest.approx(line[key], rel=1e-4), (job, step, key)
