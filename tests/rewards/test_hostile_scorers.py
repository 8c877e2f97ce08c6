"""A scorer that loops for ever, forks, takes all memory, raises, prints or returns NaN costs one sample and one metric,
nothing else: the scores around it are right, nothing is printed, and no process is left."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]

SCORERS = """
import ctypes, math, mmap, multiprocessing, os, signal, subprocess, sys, threading, time

def compute_score(data_source, solution_str, ground_truth, extra_info):
    return globals()[solution_str]()

FOLDER = os.getcwd()

def good():
    print("fine", flush=True)
    assert os.getcwd() == FOLDER
    return 1.0

def loops():
    while True:
        pass

def forks_and_returns_twice():
    os.fork()
    return 1.0

def forks_a_loop():
    if os.fork() == 0:
        while True:
            pass
    return 1.0

def forks_for_ever():
    while True:
        os.fork()

def starts_a_daemon():
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            time.sleep(1000)
        os._exit(0)
    os.wait()
    return 1.0

def starts_a_daemon_and_loops():
    starts_a_daemon()
    loops()

def starts_a_daemon_and_dies():
    starts_a_daemon()
    os._exit(1)

def leaves_a_session():
    subprocess.Popen(["sleep", "1000"], start_new_session=True)
    return 1.0

def takes_10_gb():
    return float(len(bytearray(10 << 30)))

def takes_10_gb_in_threads():
    threads = [threading.Thread(target=takes_10_gb) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return math.nan

def raises():
    raise ValueError("boom")

def exits():
    sys.exit(1)

def prints():
    for _ in range(1000):
        print("printed " * 1000)
        print("printed " * 1000, file=sys.stderr)
    os.write(1, b"printed")
    subprocess.run(["echo", "printed"])
    return 1.0

def returns_nan():
    return math.nan

def returns_a_lot():
    return {"score": 0.0, "text": "x" * (16 << 20), "acc": 0.0}

def ignores_signals():
    for number in range(1, 65):
        try:
            signal.signal(number, signal.SIG_IGN)
        except (OSError, ValueError):
            pass
    loops()

def segfaults():
    ctypes.string_at(0)

def closes_stdout():
    sys.stdout.close()
    return 1.0

def closes_files():
    os.closerange(0, 3)
    return 1.0

def leaves_the_folder():
    os.chdir("/")
    return 1.0

def leaks_until_nothing_is_left():
    kept = globals().setdefault("leaked", [])
    while True:
        kept.append(mmap.mmap(-1, 1 << 30))

def returns_a_huge_number():
    return 1e300

def returns_a_tuple():
    return 1.0, 2.0
"""

JOB = """
import json, sys, time
from hpcrl.config.schema import CustomRewardConfig, RewardConfig
from hpcrl.sandbox import fork_server, process_tree
from hpcrl.rewards.manager import RewardManager, ScoreRequest

fork_server.start()
function = CustomRewardConfig(path=sys.argv[1])
manager = RewardManager(RewardConfig(custom_reward_function=function, timeout=1.5), log_path=sys.argv[2])
for name in sys.argv[3:]:
    scores, _, extras, counts = manager.score([ScoreRequest("mine", text, None) for text in ("good", name, "good")])
    # Another score, so that what the last one left is gone; then there are the worker and nothing else.
    again = manager.score([ScoreRequest("mine", "good", None)] * 2)[0]
    (worker,) = manager._pool._workers
    give_up = time.monotonic() + 5
    while (left := len(process_tree.descendants_of(worker.pid)) - 1) and time.monotonic() < give_up:
        time.sleep(0.01)
    fates = {fate.split("/")[1]: int(count) for fate, count in counts.items() if count}
    print(json.dumps([name, scores.tolist() + again.tolist(), fates, left]), flush=True)
manager.close()
"""

# The hostile sample's score, and the metric that counts it; a fork bomb is found by its size, or is late already.
EXPECTED: dict[str, tuple[float, set[str]]] = {
    "loops": (0.0, {"timeouts"}),
    "forks_and_returns_twice": (1.0, set()),
    "forks_a_loop": (1.0, set()),
    "forks_for_ever": (0.0, {"crashes", "timeouts"}),
    "starts_a_daemon": (1.0, set()),
    "starts_a_daemon_and_loops": (0.0, {"timeouts"}),
    "starts_a_daemon_and_dies": (0.0, {"crashes"}),
    "leaves_a_session": (1.0, set()),
    "closes_stdout": (1.0, set()),
    "closes_files": (1.0, set()),
    "leaves_the_folder": (1.0, set()),
    "leaks_until_nothing_is_left": (0.0, {"errors"}),
    "returns_a_huge_number": (0.0, {"errors"}),
    "returns_a_tuple": (0.0, {"errors"}),
    "takes_10_gb": (0.0, {"errors"}),
    "takes_10_gb_in_threads": (0.0, {"errors"}),
    "raises": (0.0, {"errors"}),
    "exits": (0.0, {"errors"}),
    "prints": (1.0, set()),
    "returns_nan": (0.0, {"errors"}),
    "returns_a_lot": (0.0, set()),
    "ignores_signals": (0.0, {"timeouts"}),
    "segfaults": (0.0, {"crashes"}),
}


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple]:
    """What a job says after each kind of scorer, one after the other in the same job; its whole output is that."""
    folder = tmp_path_factory.mktemp("hostile")
    (folder / "scorers.py").write_text(SCORERS)
    command = [sys.executable, "-c", JOB, str(folder / "scorers.py"), str(folder / "printed.log"), *EXPECTED]
    job = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=120)
    assert job.returncode == 0, job.stderr[-2000:]
    said = [json.loads(line) for line in job.stdout.splitlines()]
    assert "printed" not in job.stderr
    log = folder / "printed.log"
    return {name: (scores, fates, left, log.stat().st_size) for name, scores, fates, left in said}


@pytest.mark.parametrize("name", EXPECTED)
def test_costs_one_sample_and_one_metric_and_nothing_else(reports: dict[str, tuple], name: str) -> None:
    score, fates = EXPECTED[name]
    found, counted, left, _ = reports[name]
    assert found == [1.0, score, 1.0, 1.0, 1.0]
    assert counted.keys() <= fates and sum(counted.values()) == bool(fates)
    assert left == 0


def test_what_scorers_print_is_kept_up_to_a_size(reports: dict[str, tuple]) -> None:
    assert 2**20 <= reports["prints"][3] < 3 * 2**20
