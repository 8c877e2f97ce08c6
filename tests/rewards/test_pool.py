"""A custom function cannot stop the run: whatever it does costs one score, and nothing is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest

from hpcrl.config.schema import CustomRewardConfig, RewardConfig
from hpcrl.launch.exits import InputError
from hpcrl.rewards import pool as pool_module
from hpcrl.rewards.manager import RewardManager, ScoreRequest

BEHAVIOURS = """
import os, subprocess, sys, time
import numpy as np

def daemon(command):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.execvp(command[0], command)
        os._exit(0)

def compute_score(data_source, solution_str, ground_truth, extra_info, scale=1.0):
    what, _, number = solution_str.partition(" ")
    if what == "number":
        time.sleep(float(extra_info.get("delay", 0)))
        return {"score": scale * float(number), "acc": True, "pred": number}
    if what == "plain":
        return np.float32(0.5)
    if what == "exit":
        os._exit(3)
    if what == "sys.exit":
        sys.exit(3)
    if what == "raise":
        raise RuntimeError("two\\nlines")
    if what == "loop":
        while True:
            pass
    if what == "child":
        subprocess.Popen(["sleep", "1000.25"])
        time.sleep(1000)
    if what == "daemon":
        daemon(["sleep", "1000.75"])
        time.sleep(1000)
    if what == "deep":
        return compute_score(data_source, solution_str, ground_truth, extra_info)
    if what == "modules":
        return {"score": float("torch" in sys.modules), "pid": os.getpid()}
    return {"nan": float("nan"), "inf": "inf", "none": None, "text": "0.5", "dict": {"acc": 1}, "list": [1.0]}[what]
"""


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "reward.py"
    path.write_text(BEHAVIOURS)
    return path


@pytest.fixture
def make(source: Path) -> Iterator[Callable[..., RewardManager]]:
    managers: list[RewardManager] = []

    def manager(workers: int = 1, timeout: float = 30.0, **custom: object) -> RewardManager:
        function = CustomRewardConfig(**{"path": str(source), **custom})  # type: ignore[arg-type]
        managers.append(
            RewardManager(RewardConfig(custom_reward_function=function, num_workers=workers, timeout=timeout))
        )
        return managers[-1]

    yield manager
    for made in managers:
        made.close()


def _requests(*solutions: str, **extra_info: object) -> list[ScoreRequest]:
    return [ScoreRequest("mine", solution, {"target": 1}, dict(extra_info)) for solution in solutions]


def _sleepers(command: str) -> list[psutil.Process]:
    found = [process for process in psutil.process_iter(["cmdline"]) if command in (process.info["cmdline"] or [])]
    return [process for process in found if process.status() != psutil.STATUS_ZOMBIE]


def test_every_failure_scores_zero_and_is_counted_and_order_is_kept(make: Callable[..., RewardManager]) -> None:
    solutions = ["number 1", "exit", "number 2", "raise", "nan", "inf", "none", "text", "dict", "list", "loop", "deep",
                 "sys.exit", "plain", "number 3", "unheard of"]  # fmt: skip
    scores, extras, counts = make(workers=2, timeout=2.0, reward_kwargs={"scale": 2.0}).score(_requests(*solutions))
    expected = {"number 1": 2, "number 2": 4, "number 3": 6, "plain": 0.5}
    assert scores.dtype == np.float32
    assert scores.tolist() == [expected.get(solution, 0) for solution in solutions]
    assert counts == {"reward/timeouts": 1, "reward/crashes": 1, "reward/errors": 10}
    assert [extras[row] for row in (0, 2, 14)] == [{"acc": 1.0, "pred": text} for text in "123"]
    assert [row for row, extra in enumerate(extras) if extra] == [0, 2, 13, 14] and extras[13] == {"acc": 0.5}


def test_order_is_kept_when_workers_overtake_each_other(make: Callable[..., RewardManager]) -> None:
    requests = [ScoreRequest("mine", f"number {i}", None, {"delay": 0.2 if i % 3 == 0 else 0.0}) for i in range(12)]
    scores, _, _ = make(workers=3).score(requests)
    assert scores.tolist() == list(range(12))


def test_a_timed_out_score_ends_soon_and_takes_its_children_along(make: Callable[..., RewardManager]) -> None:
    manager = make(timeout=1.0)
    start = time.monotonic()
    _, _, counts = manager.score(_requests("child"))
    assert counts["reward/timeouts"] == 1
    assert time.monotonic() - start < 10
    assert not _sleepers("1000.25")
    assert manager.score(_requests("plain"))[0].tolist() == [0.5]


def test_workers_do_not_import_torch_and_are_gone_after_close(make: Callable[..., RewardManager]) -> None:
    manager = make()
    scores, extras, _ = manager.score(_requests("modules"))
    assert scores.tolist() == [0]
    pid = int(extras[0]["pid"])
    assert psutil.pid_exists(pid)
    manager.close()
    manager.close()
    # Its parent, the fork server, may take a moment to reap it.
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_finish_reason_reaches_the_function_and_async_functions_work(tmp_path: Path) -> None:
    path = tmp_path / "seen.py"
    path.write_text(
        "async def f(data_source, solution_str, ground_truth, extra_info):\n"
        "    return float(extra_info['finish_reason'] == 'length' and extra_info['index'] == 7)\n"
    )
    manager = RewardManager(RewardConfig(custom_reward_function=CustomRewardConfig(path=f"{path}:f")))
    try:
        request = ScoreRequest("mine", "", None, {"index": 7}, finish_reason="length")
        assert manager.score([request])[0].tolist() == [1.0]
        assert manager.score([])[0].shape == (0,)
    finally:
        manager.close()


def test_workers_that_can_no_longer_start_do_not_stop_the_run(source: Path, make: Callable[..., RewardManager]) -> None:
    manager = make()
    source.write_text("raise OSError('gone')\n")
    scores, _, counts = manager.score(_requests("exit", "plain", "plain"))
    assert scores.tolist() == [0, 0, 0]
    assert counts["reward/crashes"] == 3
    source.write_text(BEHAVIOURS)
    assert manager.score(_requests("plain"))[0].tolist() == [0.5]


@pytest.mark.parametrize(
    ("text", "name", "said"),
    [
        (None, "compute_score", "no such file"),
        ("def other(): pass\n", "compute_score", "no function 'compute_score'"),
        ("def compute_score(:\n", "compute_score", "SyntaxError"),
        ("import not_a_module\n", "compute_score", "No module named 'not_a_module'"),
        ("import os\nos._exit(0)\n", "compute_score", "died"),
        ("import sys\nsys.exit(4)\n", "compute_score", "SystemExit"),
    ],
)
def test_a_function_that_cannot_be_loaded_is_one_line(tmp_path: Path, text: str | None, name: str, said: str) -> None:
    path = tmp_path / "bad.py"
    if text is not None:
        path.write_text(text)
    with pytest.raises(InputError) as error:
        RewardManager(RewardConfig(custom_reward_function=CustomRewardConfig(path=str(path), name=name)))
    assert said in str(error.value) and str(path) in str(error.value)
    assert "\n" not in str(error.value)


def test_a_start_that_hangs_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "slow.py"
    path.write_text("import time\ntime.sleep(1000)\n")
    monkeypatch.setattr(pool_module, "START_SECONDS", 1.0)
    with pytest.raises(InputError, match="not loaded after"):
        RewardManager(RewardConfig(custom_reward_function=CustomRewardConfig(path=str(path))))


RANK = """
import os, sys, threading, time
from hpcrl.config.schema import CustomRewardConfig, RewardConfig
from hpcrl.launch import children, family
from hpcrl.rewards.manager import RewardManager, ScoreRequest

children.start()
manager = RewardManager(RewardConfig(custom_reward_function=CustomRewardConfig(path=sys.argv[1]), num_workers=2))
workers = manager._pool._workers
assert manager.score([ScoreRequest("mine", "plain", None)] * 20)[0].tolist() == [0.5] * 20
while not all(family.children_of(worker.pid) for worker in workers):
    manager.pump()
print(*(worker.pid for worker in workers), *(family.children_of(worker.pid)[0] for worker in workers), flush=True)
if sys.argv[2] == "killed":
    manager.score([ScoreRequest("mine", "daemon", None), ScoreRequest("mine", "loop", None)])
"""


@pytest.mark.parametrize("end", ["killed", "forgot to close"])
def test_no_worker_outlives_its_rank(source: Path, end: str) -> None:
    repository = Path(__file__).parents[2]
    rank = subprocess.Popen(
        [sys.executable, "-c", RANK, str(source), end], stdout=subprocess.PIPE, text=True, cwd=repository
    )
    assert rank.stdout is not None
    pids = [int(pid) for pid in rank.stdout.readline().split()]
    assert len(pids) == 4
    deadline = time.monotonic() + 20
    if end == "killed":
        while not _sleepers("1000.75"):
            assert time.monotonic() < deadline, "the daemon does not start"
            time.sleep(0.05)
        os.kill(rank.pid, signal.SIGKILL)
    rank.wait(timeout=20)
    rank.stdout.close()
    while any(psutil.pid_exists(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    left = [pid for pid in pids if psutil.pid_exists(pid)]
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert not left and not _sleepers("1000.75")
