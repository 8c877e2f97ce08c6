"""`hpcrl replay` as a person starts it: exit codes, lines, and a run that is under way."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import h5py
import pytest

from hpcrl.observe.record.archive import step_path
from tests.preloaded import RANK
from tests.run.small_run import run_folder, train
from tests.runtime.conftest import MPIEXEC, environment

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on two ranks: three steps, a checkpoint after the second."""
    folder = tmp_path_factory.mktemp("replay")
    assert train(folder, 2, trainer={"total_training_steps": 3, "save_freq": 2}) == 0
    return folder


def replay(folder: Path, run: Path, ranks: int, *arguments: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a replay of step 3."""
    command = [str(MPIEXEC), "-n", str(ranks), *RANK, "-m", "hpcrl", "replay", str(run), "--step", "3", *arguments]
    done = subprocess.run(command, cwd=folder, env=environment(), capture_output=True, text=True, timeout=300)
    return done.returncode, done.stdout, done.stderr


def test_exit_codes_and_lines(folder: Path) -> None:
    run = run_folder(folder)
    code, out, _ = replay(folder, run, 2, "--tokens", "tokens.jsonl")
    assert code == 0 and "step 3: " in out and "agree bit for bit" in out
    result = json.loads((run / "replay" / "step_00000003" / "replay.json").read_text())
    assert result["run"] == str(run) and (result["first_step"], result["step"]) == (3, 3)
    assert len((folder / "tokens.jsonl").read_text().splitlines()) == 16

    code, out, _ = replay(folder, run, 1, "--rtol", "0")  # again, in place of the first one
    assert code == 1
    assert "differ by more than 0; the first is " in out and ": the run has " in out
    assert "other than in the run: the number of ranks, 1, was 2" in out


def test_a_run_that_is_under_way(folder: Path, tmp_path: Path) -> None:
    """Its last line is torn, and the next step has begun."""
    run = tmp_path / "run"
    shutil.copytree(run_folder(folder), run, ignore=shutil.ignore_patterns("replay", "exit.json", "step_00000003"))
    with open(run / "metrics.jsonl", "a") as lines:
        lines.write('{"step": 4, "actor/lo')
    step_path(run / "rollouts", 4).with_suffix(".h5.tmp").write_bytes(b"")
    (run / "checkpoints" / "step_00000004.tmp").mkdir()
    code, out, _ = replay(folder, run, 2, "--out", str(tmp_path / "apart"))
    assert code == 0 and "agree bit for bit" in out
    assert not (run / "replay").exists()


def test_damaged_tokens_are_an_error_of_one_line(folder: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(run_folder(folder), run, ignore=shutil.ignore_patterns("replay"))
    path = step_path(run / "rollouts", 3)
    with h5py.File(path) as file:
        place = file["tokens/input_ids/values"].id.get_chunk_info(0).byte_offset
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)
    code, _, err = replay(folder, run, 2)
    assert code == 2
    (line,) = [line for line in err.splitlines() if line.startswith("hpcrl: error: ")]
    assert f"{path}: not a whole rollout archive" in line
    assert "Traceback" not in err
