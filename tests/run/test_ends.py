"""How `hpcrl train` ends when something breaks in the middle of it, or before it begins."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pyarrow
import pyarrow.parquet
import pytest

from tests.preloaded import RANK
from tests.run.small_run import write_config
from tests.runtime.conftest import MPIEXEC, REPOSITORY, run, start  # noqa: F401  # fixtures
from tests.runtime.test_ends import left_of

TP2 = {**dict.fromkeys(("actor", "ref"), {"tp": 2}), "rollout": {"tp": 2}}  # on 4 ranks, leaders are 0 and 2
HOMES, NUM_WORKERS = 2, 2

# From step 2 on no score comes back: one process of the job computes for ever, the others sleep.
BUSY = """
import os
import time
from pathlib import Path

def compute_score(data_source, solution_str, ground_truth, extra_info=None, folder=""):
    if not (Path(folder) / "runs" / "ends" / "metrics.jsonl").exists():
        return sum(map(ord, solution_str)) % 7 / 7
    (Path(folder) / f"busy.{os.getpid()}").touch()
    try:
        (Path(folder) / "computing").touch(exist_ok=False)
    except FileExistsError:
        time.sleep(600)
    while True:
        pass
"""

FAILS_ON_RANK_2 = """
import functools
import sys

from hpcrl import cli
from hpcrl.workers.actor import ActorWorker

update_actor = ActorWorker.update_actor

@functools.wraps(update_actor)
def break_down(self, batch):
    if (self.rank, batch.meta_info["step"]) == (2, 2):
        raise ValueError("boom")
    return update_actor(self, batch)

ActorWorker.update_actor = break_down

if __name__ == "__main__":
    cli.main(sys.argv[1:])
"""


def family_when_busy(process: psutil.Popen, folder: Path) -> list[psutil.Process]:
    """Every descendant of mpiexec, once every scoring process is at work on step 2."""
    give_up = time.monotonic() + 120
    while len(busy := list(folder.glob("busy.*"))) < HOMES * NUM_WORKERS:
        assert process.poll() is None, process.stderr.read()
        assert time.monotonic() < give_up, "no scoring process is busy"
        time.sleep(0.1)
    family = psutil.Process(process.pid).children(recursive=True)
    assert {int(path.suffix[1:]) for path in busy} <= {member.pid for member in family}
    return family


def ranks_of(family: list[psutil.Process]) -> dict[int, psutil.Process]:
    """The ranks by number; the launcher's variables are in no other process of the family."""
    found = [(member.environ().get("PMI_RANK"), member) for member in family]
    return {int(rank): member for rank, member in found if rank is not None}


@pytest.mark.parametrize(
    "rank",
    [
        pytest.param(0, marks=pytest.mark.slow),  # the controller
        pytest.param(1, marks=pytest.mark.exhaustive),
        pytest.param(2, marks=pytest.mark.exhaustive),
        pytest.param(3, marks=pytest.mark.exhaustive),
    ],
)
def test_kill_9_in_the_middle_of_training_leaves_no_process(start: Callable, tmp_path: Path, rank: int) -> None:  # noqa: F811
    (tmp_path / "score.py").write_text(BUSY)
    function = {"path": str(tmp_path / "score.py"), "reward_kwargs": {"folder": str(tmp_path)}}
    config = write_config(
        tmp_path,
        placement=TP2,
        reward={"custom_reward_function": function, "num_workers": NUM_WORKERS, "timeout": 600},
    )
    process = start(MPIEXEC, "-n", "4", sys.executable, "-m", "hpcrl", "train", config)
    family = family_when_busy(process, tmp_path)
    ranks = ranks_of(family)
    assert sorted(ranks) == [0, 1, 2, 3]

    begin = time.monotonic()
    ranks[rank].kill()
    assert process.wait(timeout=10) != 0
    assert left_of(family, 10 - (time.monotonic() - begin)) == []
    print(f"gone after {time.monotonic() - begin:.2f} s: {len(family)} processes")


def test_a_worker_that_raises_ends_the_job_and_tells_where(run: Callable, tmp_path: Path) -> None:  # noqa: F811
    script = tmp_path / "fails_on_rank_2.py"
    script.write_text(FAILS_ON_RANK_2)
    config = write_config(tmp_path, placement=TP2)
    ended = run(MPIEXEC, "-n", "4", *RANK, script, "train", config)
    exit_json = tmp_path / "runs" / "ends" / "exit.json"
    seconds = time.time() - exit_json.stat().st_mtime  # the failing rank writes it first
    print(f"gone {seconds:.2f} s after the error")
    assert ended.code == 1 and seconds < 10
    lines = ended.stderr.splitlines()  # the script imports megatron, which warns, before hpcrl has its log files
    told = lines[lines.index("hpcrl: rank 2 failed (role actor, phase update_actor): ValueError: boom") + 1 :]
    assert told[0] == "Traceback (most recent call last):" and any("break_down" in line for line in told)
    assert ended.stderr.count("Traceback") == 1
    assert json.loads(exit_json.read_text()) == {
        "code": 1,
        "rank": 2,
        "role": "actor",
        "phase": "update_actor",
        "error": "ValueError: boom",
    }
    steps = (tmp_path / "runs" / "ends" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in steps] == [1]


def jsonl_without_prompt(path: Path) -> None:
    path.write_text('{"data_source": "countdown"}\n')


def parquet_without_prompt(path: Path) -> None:
    pyarrow.parquet.write_table(pyarrow.table({"data_source": ["countdown"]}), path)


def nothing(path: Path) -> None:
    path.touch()


def garbage(path: Path) -> None:
    path.write_bytes(bytes(range(256)) * 8)


@pytest.mark.parametrize(
    ("name", "write", "told"),
    [
        pytest.param("bad.jsonl", jsonl_without_prompt, "no column 'prompt'", marks=pytest.mark.slow),
        pytest.param("bad.parquet", parquet_without_prompt, "no column 'prompt'", marks=pytest.mark.slow),
        pytest.param("bad.jsonl", nothing, "empty dataset", marks=pytest.mark.slow),
        ("bad.parquet", garbage, "not a readable Parquet file"),
    ],
)
def test_a_bad_data_file_is_one_line_and_code_2(
    run: Callable,  # noqa: F811
    tmp_path: Path,
    name: str,
    write: Callable[[Path], None],
    told: str,
) -> None:
    config = write_config(tmp_path)
    write(tmp_path / name)
    override = f"data.train_files=[{tmp_path / name}]"
    ended = run(MPIEXEC, "-n", "2", *RANK, "-m", "hpcrl", "train", config, override)
    assert ended.code == 2
    (line,) = ended.stderr.splitlines()
    assert line.startswith(f"hpcrl: error: {tmp_path / name}: ") and told in line
    assert json.loads((tmp_path / "runs" / "ends" / "exit.json").read_text())["code"] == 2
