"""A step that a kill has cut short does not draw its responses twice."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from hpcrl.observe.read.archive import read_step
from hpcrl.observe.record.archive import generation_log, generation_logs, read_records, step_path
from hpcrl.run.recovery import DurableRollouts, bring_back
from hpcrl.run.start import set_aside
from hpcrl.workers.response_journal import ARRAYS
from tests.preloaded import RANK
from tests.run.small_run import write_config
from tests.run.test_ends import ranks_of
from tests.runtime.conftest import MPIEXEC, run, start  # noqa: F401  # fixtures

NOT_COMPARED = ("timing_s/", "timing_per_token_ms/", "perf/", "memory/")
# Few at once, so that responses are finished one after the other.
SLOW = {
    "data": {"train_batch_size": 16, "max_prompt_length": 16, "max_response_length": 48},
    "rollout": {"n": 2, "max_num_seqs": 2},
    "actor": {"ppo_mini_batch_size": 16, "ppo_max_token_len_per_gpu": 512, "optim": {"lr": 1e-3}},
    # The step before the one that is killed has its checkpoint by then.
    "trainer": {"total_training_steps": 2, "save_freq": 1, "checkpoint": {"async_save": False}},
    "reward": {"custom_reward_function": {"path": "score.py"}},
}
SCORE = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return sum(map(ord, solution_str)) % 7 / 7
"""


def steps_kept(folder: Path) -> list[int]:
    return sorted({step for step, _ in generation_logs(folder)})


def make_logs(folder: Path, *steps: int) -> None:
    for step in steps:
        for rank in (0, 3):
            generation_log(folder, step, rank).touch()


def test_a_restart_keeps_what_its_weights_have_drawn(tmp_path: Path) -> None:
    for num_ahead, kept in ((0, [21]), (1, [21, 22])):
        make_logs(tmp_path, 19, 20, 21, 22, 23)
        assert DurableRollouts(tmp_path, resumed_at=20, num_ahead=num_ahead).resume() == 20
        assert steps_kept(tmp_path) == kept
    assert DurableRollouts(tmp_path, resumed_at=20, enabled=False).resume() is None
    assert steps_kept(tmp_path) == []
    assert DurableRollouts(tmp_path, resumed_at=20).resume() is None


def test_a_run_that_starts_anew_keeps_what_the_start_weights_have_drawn(tmp_path: Path) -> None:
    (tmp_path / "rollouts").mkdir()
    make_logs(tmp_path / "rollouts", 1, 2)
    step_path(tmp_path / "rollouts", 1).touch()
    aside = set_aside(tmp_path, ["rollouts"])
    assert aside is not None
    bring_back(aside / "rollouts", tmp_path / "rollouts")
    assert DurableRollouts(tmp_path / "rollouts", resumed_at=0).resume() == 0
    assert steps_kept(tmp_path / "rollouts") == [1] and step_path(aside / "rollouts", 1).exists()


def test_logs_stay_while_a_restart_could_need_them(tmp_path: Path) -> None:
    durable = DurableRollouts(tmp_path, resumed_at=20)
    make_logs(tmp_path, 21)
    durable.step_ended(21, saved=20)
    make_logs(tmp_path, 22)
    assert steps_kept(tmp_path) == [21, 22]  # a kill goes back to 20; a planned stop in 22 saves 21 and goes on in 22
    durable.step_ended(22, saved=20, perhaps=(21, None))
    assert steps_kept(tmp_path) == [21, 22]  # a save that fails leaves 20 the newest
    make_logs(tmp_path, 23)
    durable.step_ended(22, saved=21)
    assert steps_kept(tmp_path) == [22, 23]
    durable.step_ended(23, saved=23)
    assert steps_kept(tmp_path) == []
    make_logs(tmp_path, 24)
    durable.run_ended()
    assert steps_kept(tmp_path) == []


def lines(folder: Path) -> dict[int, dict[str, Any]]:
    found = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line for line in found}


def compared(line: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in line.items() if not name.startswith(NOT_COMPARED)}


def rows(folder: Path, step: int) -> dict[tuple[str, int], dict[str, np.ndarray]]:
    """What the archive has of each sample, in the journal's words."""
    tokens, samples, _ = read_step(step_path(folder / "rollouts", step))
    names = {"token_ids": "input_ids", "log_probs": "rollout_log_probs", "mask": "response_mask"}
    parts = {name: np.split(tokens[column][0], tokens[column][1][1:-1]) for name, column in names.items()}
    found = {}
    for index, key in enumerate(zip(samples["uid"].tolist(), samples["sample_index"].tolist(), strict=True)):
        row = {name: column[index] for name, column in parts.items()}
        found[key] = row | {"token_ids": row["token_ids"][samples["prompt_length"][index] :]}
    return found


def records(folder: Path, step: int) -> dict[tuple[str, int], dict[str, Any]]:
    paths = [path for its_step, path in generation_logs(folder / "rollouts") if its_step == step]
    found = [record for path in paths for record in read_records(path, print)]
    return {(record["uid"], record["sample_index"]): record for record in found}


def kill_in_generation(process: psutil.Popen, folder: Path, step: int) -> None:
    """kill -9 of rank 1, when both ranks have finished responses of the step."""
    logs = [generation_log(folder / "rollouts", step, rank) for rank in (0, 1)]
    give_up = time.monotonic() + 120
    while not all(path.exists() and path.stat().st_size for path in logs):
        assert process.poll() is None, process.stderr.read()
        assert time.monotonic() < give_up, f"no responses of step {step}"
        time.sleep(0.002)
    ranks_of(psutil.Process(process.pid).children(recursive=True))[1].kill()
    assert process.wait(timeout=60) != 0


@pytest.fixture
def job(start: Callable, run: Callable, tmp_path: Path) -> Iterator[Callable[..., Path]]:  # noqa: F811
    """`job(name, *overrides)`: run it to its end; `kill_in=step`: until then. Gives its folder."""
    (tmp_path / "score.py").write_text(SCORE)
    config = write_config(tmp_path, **SLOW)
    command = [MPIEXEC, "-n", "2", *RANK, "-m", "hpcrl", "train", config]

    def job(name: str, *overrides: str, kill_in: int | None = None) -> Path:
        folder = tmp_path / "runs" / name
        arguments = [*command, f"data.train_files=[{tmp_path / 'train.jsonl'}]", f"run.name={name}", *overrides]
        if kill_in is not None:
            kill_in_generation(start(*arguments), folder, kill_in)
        else:
            ended = run(*arguments)
            assert ended.code == 0, ended.stderr
        return folder

    return job


@pytest.mark.slow
def test_a_killed_step_reuses_what_was_drawn_or_repeats_itself_bit_for_bit(job: Callable[..., Path]) -> None:
    expected = lines(job("straight"))
    killed = job("killed", kill_in=2)
    drawn = records(killed, 2)
    assert 0 < len(drawn) < 32
    shutil.copytree(killed, killed.with_name("repeated"))

    resumed = job("killed")
    found = lines(resumed)
    assert found[2]["perf/rollouts_reused"] == len(drawn)
    archived = rows(resumed, 2)
    assert len(archived) == 32
    for key, record in drawn.items():
        for name in ARRAYS:
            assert archived[key][name].tobytes() == record[name], (key, name)
    step = compared(found[2])
    assert step.keys() == compared(expected[2]).keys()
    for name, value in step.items():
        assert value == pytest.approx(expected[2][name], rel=1e-4, abs=1e-4, nan_ok=True), name
    assert steps_kept(resumed / "rollouts") == []

    repeated = lines(job("repeated", "trainer.reuse_rollouts=false"))
    assert "perf/rollouts_reused" not in repeated[2]
    for step in (1, 2):
        assert compared(repeated[step]) == compared(expected[step])
