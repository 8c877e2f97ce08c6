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
from hpcrl.rewards import score_worker
from hpcrl.rewards.manager import RateLimited, RateLimitedRewardManager, RewardManager, ScoreRequest
from hpcrl.runtime.exits import InputError
from hpcrl.sandbox import process_pool as pool_module
from tests.processes import alive, with_argument

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
    return {"nan": float("nan"), "huge": -1e300, "inf": "inf", "none": None, "text": "0.5", "dict": {"acc": 1},
            "list": [1.0]}[what]
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


def test_every_failure_scores_zero_and_is_counted_and_order_is_kept(make: Callable[..., RewardManager]) -> None:
    solutions = ["number 1", "exit", "number 2", "raise", "nan", "huge", "inf", "none", "text", "dict", "list", "loop",
                 "deep", "sys.exit", "plain", "number 3", "unheard of"]  # fmt: skip
    scores, _, extras, counts = make(workers=2, timeout=2.0, reward_kwargs={"scale": 2.0}).score(_requests(*solutions))
    expected = {"number 1": 2, "number 2": 4, "number 3": 6, "plain": 0.5}
    assert scores.dtype == np.float32
    assert scores.tolist() == [expected.get(solution, 0) for solution in solutions]
    assert counts == {"reward/timeouts": 1, "reward/crashes": 1, "reward/errors": 11, "reward/over_limits": 0}
    assert [extras[row] for row in (0, 2, 15)] == [{"acc": 1.0, "pred": text} for text in "123"]
    assert [row for row, extra in enumerate(extras) if extra] == [0, 2, 14, 15] and extras[14] == {"acc": 0.5}


def test_order_is_kept_when_workers_overtake_each_other(make: Callable[..., RewardManager]) -> None:
    requests = [ScoreRequest("mine", f"number {i}", None, {"delay": 0.2 if i % 3 == 0 else 0.0}) for i in range(12)]
    scores, *_ = make(workers=3).score(requests)
    assert scores.tolist() == list(range(12))


def test_a_timed_out_score_ends_soon_and_takes_its_children_along(make: Callable[..., RewardManager]) -> None:
    manager = make(timeout=1.0)
    start = time.monotonic()
    _, _, _, counts = manager.score(_requests("child"))
    assert counts["reward/timeouts"] == 1
    assert time.monotonic() - start < 10
    assert not with_argument("1000.25")
    assert manager.score(_requests("plain"))[0].tolist() == [0.5]


def test_workers_do_not_import_torch_and_are_gone_after_close(make: Callable[..., RewardManager]) -> None:
    manager = make()
    scores, _, extras, _ = manager.score(_requests("modules"))
    assert scores.tolist() == [0]
    pid = int(extras[0]["pid"])
    worker = psutil.Process(pid)
    manager.close()
    manager.close()
    assert not alive([worker])  # its parent, the fork server, may take a moment to reap it


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
    scores, _, _, counts = manager.score(_requests("exit", "plain", "plain"))
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


# Every call leaves a line in the file `calls`, and ends when there is a file `go`; but "hangs" never does, and among
# coroutines leaves its line when the answers of the others have been sent.
CALLS = """
import asyncio, pathlib, time

calls, go = (pathlib.Path(__file__).with_name(name) for name in ("calls", "go"))
num_done = 0

def begin(text):
    with calls.open("a") as file:
        file.write(text + "\\n")

def serial(data_source, solution_str, ground_truth, extra_info):
    begin(solution_str)
    while not go.exists() or solution_str == "hangs":
        time.sleep(0.01)
    return 1.0

async def together(data_source, solution_str, ground_truth, extra_info):
    global num_done
    if solution_str == "hangs":
        while num_done < 5:
            await asyncio.sleep(0.01)
        for _ in range(100):
            await asyncio.sleep(0)
    begin(solution_str)
    while not go.exists() or solution_str == "hangs":
        await asyncio.sleep(0.01)
    num_done += 1
    return 1.0
"""


def _calls(folder: Path, number: int) -> list[str]:
    """The calls that a scorer of CALLS has begun, once there are that many."""
    give_up = time.monotonic() + 30
    while not (folder / "calls").exists() or len(calls := (folder / "calls").read_text().split("\n")[:-1]) < number:
        assert time.monotonic() < give_up
        time.sleep(0.01)
    return calls


@pytest.mark.parametrize(("function", "before"), [("serial", 0), ("serial", 1), ("together", 5)])
def test_answers_count_however_late_the_rank_hears_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: str, before: int
) -> None:
    """The rank is away for longer than any deadline, and finds some requests done, the next one hanging, and one after
    that which has not begun."""
    (tmp_path / "calls.py").write_text(CALLS)
    reward = {
        "custom_reward_function": {"path": f"{tmp_path / 'calls.py'}:{function}"},
    }
    texts = [*(f"quick {number}" for number in range(before)), "hangs", *["after"] * (function == "serial")]
    cfg = RewardConfig.model_validate(reward)
    limits = RateLimited(max_concurrent=8)
    manager = RateLimitedRewardManager(cfg, limits) if function == "together" else RewardManager(cfg)
    try:
        for number, request in enumerate(_requests(*texts)):
            manager.submit(number, request)
        (tmp_path / "go").touch()
        assert sorted(_calls(tmp_path, before + 1)) == ["hangs", *texts[:before]]
        with monkeypatch.context() as away:
            clock = time.monotonic
            away.setattr(pool_module.time, "monotonic", lambda: clock() + 1000)
            manager.pump()
        scores, _, _, counts = manager.collect(range(len(texts)))
    finally:
        manager.close()
    assert scores.tolist() == [float(text != "hangs") for text in texts]
    assert counts == {"reward/timeouts": 1, "reward/crashes": 0, "reward/errors": 0, "reward/over_limits": 0}
    assert len(_calls(tmp_path, 0)) == len(texts), "some were run again"


def test_a_worker_goes_on_to_a_second_request_by_itself(tmp_path: Path) -> None:
    """While its rank does nothing."""
    (tmp_path / "calls.py").write_text(CALLS)
    custom = CustomRewardConfig(path=f"{tmp_path / 'calls.py'}:serial")
    manager = RewardManager(RewardConfig(custom_reward_function=custom))
    try:
        for text in ("1", "2", "3"):
            manager.submit(text, _requests(text)[0])
        (tmp_path / "go").touch()
        assert _calls(tmp_path, 2) == ["1", "2"]
        assert manager.collect(["1", "2", "3"])[0].tolist() == [1.0] * 3
    finally:
        manager.close()


def test_a_request_that_fills_a_pipe_does_not_block_the_rank(tmp_path: Path) -> None:
    (tmp_path / "calls.py").write_text(CALLS)
    custom = CustomRewardConfig(path=f"{tmp_path / 'calls.py'}:serial")
    manager = RewardManager(RewardConfig(custom_reward_function=custom))
    try:
        for _ in range(3):
            manager.submit("big", _requests("x" * 2**20)[0])
        (tmp_path / "go").touch()
        scores, _, _, counts = manager.collect(["big"] * 3)
    finally:
        manager.close()
    assert scores.tolist() == [1.0] * 3 and not counts["reward/crashes"]


def test_what_a_dead_worker_had_not_begun_is_run_by_the_next(make: Callable[..., RewardManager]) -> None:
    scores, _, _, counts = make(timeout=1.0).score(_requests("number 1", "loop", "number 2", "exit", "number 3"))
    assert scores.tolist() == [1, 0, 2, 0, 3]
    assert counts == {"reward/timeouts": 1, "reward/crashes": 1, "reward/errors": 0, "reward/over_limits": 0}


def test_what_a_scorer_returns_is_cut_to_a_size() -> None:
    long = {
        "score": 1,
        "a": "a" * 10000,
        "é": "é" * 10000,
        "short": "b" * 1000,
        "surrogate": "\ud800",
        "list": [0] * 9999,
    }
    result = score_worker.plain(long)
    size = sum(len(key.encode()) + (8 if isinstance(value, float) else len(value.encode(errors="replace")))
               for key, value in result.items())  # fmt: skip
    assert score_worker.MAX_BYTES - 8 < size <= score_worker.MAX_BYTES
    assert result["short"] == "b" * 1000 and result["score"] == 1
    lengths = [len(str(result[key]).encode()) for key in ("a", "é", "list")]
    assert max(lengths) - min(lengths) <= 1 and lengths[0] > 900
    plenty = {"score": 0.0} | {f"number {index:03}": float(index) for index in range(200)}
    assert score_worker.plain(plenty) == plenty
    for refused in ({f"{index}": 0.0 for index in range(256)}, {"x" * 5000: 0.0}):
        with pytest.raises(ValueError, match="expected at most"):
            score_worker.plain({"score": 0.0} | refused)


RANK = """
import os, sys, threading, time
from hpcrl.config.schema import CustomRewardConfig, RewardConfig
from hpcrl.sandbox import fork_server, process_tree
from hpcrl.rewards.manager import RewardManager, ScoreRequest

fork_server.start()
manager = RewardManager(RewardConfig(custom_reward_function=CustomRewardConfig(path=sys.argv[1]), num_workers=2))
workers = manager._pool._workers
assert manager.score([ScoreRequest("mine", "plain", None)] * 20)[0].tolist() == [0.5] * 20
while not all(process_tree.children_of(worker.pid) for worker in workers):
    manager.pump()
print(*(worker.pid for worker in workers), *(process_tree.children_of(worker.pid)[0] for worker in workers), flush=True)
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
        while not with_argument("1000.75"):
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
    assert not left and not with_argument("1000.75")


def test_a_worker_that_dies_between_two_scores_costs_one_at_most(make: Callable[..., RewardManager]) -> None:
    """Killed while nobody listens: it is found out when it is given the next request."""
    manager, (request,) = make(), _requests("number 1")
    for number in range(3):
        manager.submit(number, request)
    while not manager._pool._outcomes:
        manager.pump()
    (worker,) = manager._pool._workers
    process = psutil.Process(worker.pid)
    process.kill()
    psutil.wait_procs([process], timeout=10)
    manager.submit(3, request)
    scores, _, _, counts = manager.collect(range(4))
    assert scores.sum() >= 3
    assert sum(counts.values()) == 4 - scores.sum()
