"""`hpcrl replay`: recorded steps agree with the run, and what was changed since is found and named."""

from __future__ import annotations

import io
import json
import re
import shutil
from argparse import Namespace
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from hpcrl.cli import load_job
from hpcrl.engine.checkpoint.manifest import write_manifest
from hpcrl.observe.read.archive import read_step
from hpcrl.observe.record.archive import step_path
from hpcrl.run.replay import job_of, replayed, write_tokens
from hpcrl.runtime.exits import DONE, OTHER, InputError
from hpcrl.runtime.job import run_directory
from tests.mpi.lab import ROOT, Lab, own_layout

pytestmark = pytest.mark.ci_world(2)

NO_KL: dict[str, Any] = {"use_kl_in_reward": False}
GRPO = {"adv_estimator": "grpo", **NO_KL}
EXPERTS = {"family": "qwen3_moe", "num_experts": 4, "moe_ffn_hidden_size": 48, "moe": {"aux_loss_coeff": 0.01}}
LORA = {"lora_rank": 4, "target_modules": ["q_proj", "v_proj", "down_proj"]}
RUNS: dict[str, dict[str, Any]] = {
    "ppo": {"actor": {"ppo_epochs": 2}},
    "grpo": {"algorithm": GRPO, "actor": {"use_kl_loss": False, "ppo_mini_batch_size": 12}},
    "lora": {"algorithm": GRPO, "model": LORA},
    "moe": {"algorithm": GRPO, "model": EXPERTS},
}


class Replays:
    """Runs of the lab, made once, and replays of their steps."""

    def __init__(self, lab: Lab, caplog: pytest.LogCaptureFixture) -> None:
        self.lab, self.world, self.caplog = lab, lab.world, caplog

    def run(self, name: str) -> Path:
        """Three steps with a checkpoint after the second."""
        folder = self.lab.folder / f"to_replay_{name}"
        if not (folder / "metrics.jsonl").exists():
            trainer = {"total_training_steps": 3, "save_freq": 2}
            self.lab.run(folder.name, own_layout(self.world.size), trainer=trainer, **RUNS[name])
        return folder

    def copy(self, run: Path, name: str) -> Path:
        """A copy of a run, to be changed on rank 0."""
        folder = run.with_name(name)
        if self.world.rank == 0:
            shutil.copytree(run, folder, ignore=shutil.ignore_patterns("replay"))
        self.world.barrier()
        return folder

    def replay(self, run: Path, step: int, *overrides: str, **options: Any) -> tuple[int, list[str]]:
        """The exit code, and the lines that rank 0 printed, on all ranks."""
        given = {"run": str(run), "step": step, "out": None, "rtol": 1e-5, "tokens": None, **options}
        arguments = Namespace(**given, overrides=list(overrides))
        world, job = self.world, replayed(load_job(job_of(run, overrides)))
        job.schema()
        self.caplog.clear()
        loaded = world.run_collectively(lambda: job.load(arguments) if world.rank == 0 else None)
        config = world.broadcast_object(loaded)
        if world.rank == 0:
            run_directory(config).mkdir(parents=True, exist_ok=True)
            job.prepare_folder(config, arguments)
        world.barrier()
        with self.caplog.at_level("INFO"):
            code = job(world, config, job.check_with_torch(config, world.size), arguments).main()
        return world.broadcast_object((code, [record.getMessage() for record in self.caplog.records]))


@pytest.fixture
def replays(lab: Lab, caplog: pytest.LogCaptureFixture) -> Replays:
    return Replays(lab, caplog)


def lines_of(lines: list[str]) -> list[str]:
    return [line for line in lines if line.startswith("step ") and "begins" not in line]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name in ("lora", "moe"))) for name in RUNS]
)
def test_a_step_agrees_bit_for_bit_on_the_same_layout(replays: Replays, name: str) -> None:
    run = replays.run(name)
    before = sorted((path, path.stat().st_mtime_ns) for path in run.rglob("*") if path.is_file())
    code, lines = replays.replay(run, 3, out=str(run.with_name(f"{run.name}_again")))
    assert code == DONE
    (found,) = lines_of(lines)
    assert found.startswith("step 3: ") and found.endswith("agree bit for bit")
    num_metrics, num_columns = (int(found.split()[place]) for place in (2, 5))
    assert num_metrics >= 40 and num_columns >= 4
    assert sorted((path, path.stat().st_mtime_ns) for path in run.rglob("*") if path.is_file()) == before


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.exhaustive] * (name in ("grpo", "lora"))) for name in RUNS]
)
def test_a_step_agrees_within_rounding_on_another_layout(replays: Replays, name: str) -> None:
    """Data-parallel instead of tensor-parallel, in smaller micro-batches."""
    run = replays.run(name)
    plain = 'placement.pools={all: "*"}'
    code, lines = replays.replay(run, 3, plain, "actor.ppo_max_token_len_per_gpu=64")
    (found,) = lines_of(lines)
    assert code == DONE, found
    assert "agree within 1e-05" in found


def test_tokens_of_the_update(replays: Replays, world_tmp_path: Path) -> None:
    """Two passes of two updates, the last ones off policy: ratios, clips and gradients are those of PPO."""
    run = replays.run("ppo")
    code, _ = replays.replay(run, 3, tokens=str(world_tmp_path / "tokens.jsonl"), out=str(world_tmp_path / "replay"))
    assert code == DONE
    if replays.world.rank:
        return
    write_tokens(world_tmp_path / "tokens.h5", step_path(world_tmp_path / "replay" / "rollouts", 3))
    rows = [json.loads(line) for line in (world_tmp_path / "tokens.jsonl").read_text().splitlines()]
    recorded, samples, _ = read_step(step_path(run / "rollouts", 3))
    assert [(row["uid"], row["sample_index"]) for row in rows] == list(
        zip(samples["uid"].tolist(), samples["sample_index"].tolist(), strict=True)
    )
    columns = {name: np.concatenate([row[name] for row in rows]) for name in rows[0] if isinstance(rows[0][name], list)}
    for name in ("old_log_probs", "rollout_log_probs", "advantages", "returns", "values"):
        assert np.array_equal(columns[name].astype(np.float32), recorded[name][0])
    low, high, bound = 0.8, 1.2, 3.0
    ratio, advantages, clipped = columns["ratio"], columns["advantages"], columns["clipped"] == 1
    np.testing.assert_allclose(ratio, np.exp(columns["update_log_probs"] - columns["old_log_probs"]), rtol=1e-6)
    outside = ((ratio > high) & (advantages > 0)) | (((ratio < low) | (ratio > bound)) & (advantages < 0))
    assert np.array_equal(clipped, outside)
    np.testing.assert_allclose(columns["loss_gradients"][~clipped], (-advantages * ratio)[~clipped], rtol=1e-5)
    assert clipped.any() and not clipped.all() and np.abs(ratio - 1).max() > 0.01
    assert not np.array_equal(columns["new_log_probs"], columns["update_log_probs"])
    with h5py.File(world_tmp_path / "tokens.h5") as file:
        assert np.array_equal(file["tokens/ratio/values"][:], ratio.astype(np.float32))
        assert np.array_equal(file["tokens/clipped/values"][:], clipped)


def test_a_changed_weight_of_the_checkpoint_is_found(replays: Replays) -> None:
    run = replays.copy(replays.run("grpo"), "to_replay_other_weight")
    if replays.world.rank == 0:
        change_a_weight(run / "checkpoints" / "step_00000002")
    replays.world.barrier()
    code, lines = replays.replay(run, 3)
    (found,) = lines_of(lines)
    assert code == OTHER
    assert re.search(r"differ by more than 1e-05; the first is [a-z_/]+: the run has \S+, the replay \S+$", found)


def change_a_weight(checkpoint: Path) -> None:
    """Add 0.1 to one weight of the actor in every tensor that has it; the manifest stays right."""
    import torch
    from torch.distributed.checkpoint import FileSystemReader

    folder = checkpoint / "actor"
    for index, place in FileSystemReader(folder).read_metadata().storage_data.items():
        if not index.fqn.endswith("output_layer.weight"):
            continue
        data = bytearray((folder / place.relative_path).read_bytes())
        piece = slice(place.offset, place.offset + place.length)
        tensor, changed = torch.load(io.BytesIO(data[piece]), weights_only=True), io.BytesIO()
        tensor.view(-1)[0] += 0.1
        torch.save(tensor, changed)
        data[piece] = changed.getvalue()
        (folder / place.relative_path).write_bytes(data)
    write_manifest(checkpoint)


def test_a_changed_advantage_of_the_record_is_found(replays: Replays) -> None:
    run = replays.copy(replays.run("grpo"), "to_replay_other_advantage")
    if replays.world.rank == 0:
        with h5py.File(step_path(run / "rollouts", 3), "r+") as file:
            file["tokens/advantages/values"][7] += 0.5
    replays.world.barrier()
    code, lines = replays.replay(run, 3)
    (found,) = lines_of(lines)
    assert code == OTHER
    assert "1 of " in found and "the first is advantages of sample " in found and ", token 7: the run has " in found


@pytest.mark.slow
def test_a_damaged_checkpoint_is_passed_over_and_a_start_without_one_is_a_start(replays: Replays) -> None:
    run = replays.copy(replays.run("grpo"), "to_replay_damaged")
    if replays.world.rank == 0:
        file = next((run / "checkpoints" / "step_00000002" / "actor").glob("*.distcp"))
        file.write_bytes(file.read_bytes()[:-1])
    replays.world.barrier()
    code, lines = replays.replay(run, 3)
    assert any("damaged checkpoint" in line for line in lines)
    assert code == DONE and [line.split(":")[0] for line in lines_of(lines)] == ["step 1", "step 2", "step 3"]


@pytest.mark.parametrize(
    ("remove", "step", "overrides", "line"),
    [
        ((), 5, (), "step 5 is not in metrics.jsonl, which has steps 1 to 3"),
        (("rollouts/step_00000003.h5",), 3, (), "step_00000003.h5: no such rollout file; from step_00000002 the"),
        (("rollouts/step_00000001.h5",), 2, (), "has no checkpoint before step 2, and no rollouts of step 1; a replay"),
        ((), 3, ("actor.optim.lr=1.0",), "replay: actor.optim.lr may change what is computed; a replay takes layouts"),
        ((), 3, ("run.name=x",), "replay: run.name may change what is computed"),
    ],
)
def test_what_cannot_be_replayed_is_an_error_of_one_line(
    replays: Replays, remove: tuple[str, ...], step: int, overrides: tuple[str, ...], line: str
) -> None:
    name = f"to_replay_without_{step}_{len(remove)}_{len(overrides)}_{overrides[0][:3] if overrides else ''}"
    run = replays.copy(replays.run("grpo"), name)
    if replays.world.rank == 0:
        for path in remove:
            (run / path).unlink()
    replays.world.barrier()
    with pytest.raises(InputError, match=re.escape(line)) as caught:
        replays.replay(run, step, *overrides)
    assert "\n" not in str(caught.value)


def test_a_truncated_rollout_file_is_an_error_of_one_line(replays: Replays) -> None:
    run = replays.copy(replays.run("grpo"), "to_replay_truncated")
    if replays.world.rank == 0:
        path = step_path(run / "rollouts", 3)
        path.write_bytes(path.read_bytes()[:1000])
    replays.world.barrier()
    with pytest.raises(InputError, match="not a whole rollout archive"):
        replays.replay(run, 3)


OTHER_JOBS: dict[str, tuple[str, dict[str, Any]]] = {
    "online_dpo": ("online_dpo", {"algorithm": NO_KL}),
    "grpo_by_hand": (str(ROOT / "docs/examples/grpo_by_hand.py"), {"algorithm": GRPO, "actor": {"use_kl_loss": False}}),
    "process_reward_model": (
        str(ROOT / "docs/examples/process_reward_model.py"),
        {"algorithm": {**NO_KL, "adv_estimator": "reinforce_plus_plus"}, "actor": {"use_kl_loss": False}},
    ),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", OTHER_JOBS)
def test_other_jobs_agree_bit_for_bit(replays: Replays, name: str) -> None:
    """From a checkpoint, and from the start of a run without one: the job is that of config.yaml."""
    job, sections = OTHER_JOBS[name]
    layout = {"prm": {"tp": replays.world.size}} if name == "process_reward_model" else {}
    for save_freq, first in ((1, 2), (-1, 1)):
        trainer = {"total_training_steps": 2, "save_freq": save_freq}
        own = {"job_file": job if job.endswith(".py") else None}  # as `hpcrl run` fills it in
        run = replays.lab.run(f"to_replay_{name}_{save_freq}", layout, job=job, run=own, trainer=trainer, **sections)
        code, lines = replays.replay(run, 2)
        found = lines_of(lines)
        assert code == DONE and len(found) == 3 - first, lines
        assert all(line.endswith("agree bit for bit") for line in found)


@pytest.mark.exhaustive
def test_supervised_steps_agree_bit_for_bit(replays: Replays) -> None:
    own = {"batch_size": 16, "total_training_steps": 3, "eval_freq": 2}
    run = replays.lab.run_sft("to_replay_sft", {}, sft=own, trainer={"save_freq": 2})
    code, lines = replays.replay(run, 3)
    assert code == DONE and [line.split(":")[0] for line in lines_of(lines)] == ["step 3"]
    assert lines_of(lines)[0].endswith("metrics agree bit for bit")


@pytest.mark.exhaustive
@pytest.mark.world(4)
def test_a_step_of_an_asynchronous_run(replays: Replays) -> None:
    roles = {"actor": {"pool": "a"}, "critic": {"pool": "a"}, "ref": {"pool": "a"}, "rollout": {"pool": "b"}}
    placement = {"pools": {"a": "1-2", "b": "3"}, **roles}
    for mode in ("one_step_off", "bounded_staleness"):
        trainer = {"total_training_steps": 4, "save_freq": 2}
        asynchronous = {"async_training": {"mode": mode}, "trainer": trainer}
        run = replays.lab.run(f"to_replay_{mode}", placement, **asynchronous)
        code, lines = replays.replay(run, 4)
        assert code == DONE, lines
        assert all(line.endswith("agree bit for bit") for line in lines_of(lines))
