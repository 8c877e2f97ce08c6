"""Built-in rules and custom functions through each of the managers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hpcrl.config.plugins import parameters
from hpcrl.config.schema import Config, RewardConfig
from hpcrl.rewards.manager import REWARD_MANAGERS, RewardManager, ScoreRequest, check_rewards, custom_function, has_acc
from hpcrl.runtime.exits import InputError
from hpcrl.sandbox import process_pool as pool_module

TRUTH = {"numbers": [1, 2, 3, 4], "target": 10}


def test_countdown_scores_extras_and_counts() -> None:
    manager = RewardManager(RewardConfig(format_score=0.2))
    items = [
        ScoreRequest("countdown", "<a>1+2+3+4</a>", TRUTH),
        ScoreRequest("countdown", "<a>1+2+3+4</a>", TRUTH, finish_reason="length"),
        ScoreRequest("countdown", "<a>1</a>", TRUTH, {"index": 3}),
        ScoreRequest("countdown", "<a>1</a>", {"target": 10}),  # a broken row
    ]
    scores, _, extras, counts = manager.score(items)
    np.testing.assert_array_equal(scores, np.array([1.0, 0.0, 0.2, 0.0], dtype=np.float32))
    parts = [(1.0, 1.0), (0.0, 0.0), (0.0, 1.0)]
    assert extras == [*({"acc": acc, "format": form} for acc, form in parts), {}]
    assert counts == {"reward/timeouts": 0, "reward/crashes": 0, "reward/errors": 1, "reward/over_limits": 0}
    manager.close()


def test_unknown_data_source_names_the_known_ones_and_the_way_out() -> None:
    check_rewards(RewardConfig(), {"countdown"})
    with pytest.raises(InputError, match=r"'gsm8k'.*known: .*countdown, .*custom_reward_function\.path"):
        check_rewards(RewardConfig(), {"countdown", "gsm8k"})


@pytest.mark.parametrize(("suffix", "name"), [(":score", "score"), ("", "compute_score")])
def test_path_with_a_function_name(tmp_path: Path, suffix: str, name: str) -> None:
    path = tmp_path / "b.py"
    path.touch()
    custom = {"path": f"{path}{suffix}", "name": "compute_score"}
    config = RewardConfig.model_validate({"custom_reward_function": custom})
    assert custom_function(config) == (str(path), name)


FUNCTIONS = """
import asyncio, os, sys, time
from pathlib import Path

def one(data_source, solution_str, ground_truth, extra_info):
    return float(solution_str)

def parts(data_source, solution_str, ground_truth, extra_info):
    return {"score": 1.0, "format": 0.25, "length": len(solution_str), "pred": solution_str}

def branches(data_source, solution_str, ground_truth, extra_info):
    if solution_str == "dies":
        raise ValueError("no")
    if not solution_str:
        return 0.0
    result = {"score": 0.75, "acc": {"right": 1, "none": None, "text": "yes", "nan": float("nan")}.get(solution_str)}
    return result if solution_str != "bare" else {"score": 0.75}

def together(data_sources, solution_strs, ground_truths, extra_infos, scale):
    if "die" in solution_strs:
        os._exit(1)
    assert len(data_sources) == len(ground_truths) == len(extra_infos) == len(solution_strs)
    best = max(solution_strs)
    return [{"score": scale if text == best else 0.0, "size": len(solution_strs)} if text != "nan" else float("nan")
            for text in solution_strs]

under_way = 0

async def asks(data_source, solution_str, ground_truth, extra_info):
    global under_way
    if solution_str == "hangs":
        await asyncio.sleep(1000)
    if solution_str == "dies":
        await asyncio.sleep(0.05)
        os._exit(1)
    if solution_str == "blocks":
        time.sleep(1000)
    if solution_str == "raises":
        raise ValueError("no")
    under_way += 1
    most = under_way
    while solution_str == "meets" and most < 3:
        await asyncio.sleep(0.001)
        most = max(most, under_way)
    await asyncio.sleep(0.01)
    most = max(most, under_way)
    under_way -= 1
    return {"score": 1.0, "most": most}
"""


def manager_of(cfg: RewardConfig, max_response_length: int | None) -> RewardManager:
    name = cfg.reward_manager.name
    params = parameters(Config(reward=cfg), "reward", name)
    return REWARD_MANAGERS.get(name).function(cfg, params, max_response_length)


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., RewardManager]]:
    (tmp_path / "functions.py").write_text(FUNCTIONS)
    managers: list[RewardManager] = []

    def make(
        name: str, function: str, max_response_length: int | None = None, num_workers: int = 1, **kwargs: Any
    ) -> RewardManager:
        custom = {"path": f"{tmp_path / 'functions.py'}:{function}", "reward_kwargs": kwargs.pop("arguments", {})}
        cfg = RewardConfig.model_validate(
            {
                "reward_manager": {"name": name},
                "reward_kwargs": kwargs,
                "custom_reward_function": custom,
                "num_workers": num_workers,
            }
        )
        managers.append(manager_of(cfg, max_response_length))
        return managers[-1]

    yield make
    for manager in managers:
        manager.close()


def requests_for(*texts: str) -> list[ScoreRequest]:
    return [ScoreRequest("mine", text, None) for text in texts]


def test_dapo_adds_the_overlong_penalty(make: Callable[..., RewardManager]) -> None:
    """Limit 20, buffer 4, factor 2: nothing up to 16 tokens, then -0.5 a token, beyond the limit too (verl's)."""
    overlong = {"enable": True, "len": 4, "penalty_factor": 2.0, "log": True}
    manager = make("dapo", "one", 20, overlong_buffer_cfg=overlong)
    items = [ScoreRequest("mine", "1.0", None, response_length=length) for length in (0, 16, 17, 20, 22)]
    scores, _, extras, _ = manager.score([*items, ScoreRequest("mine", "no number", None, response_length=20)])
    assert scores.tolist() == [1.0, 1.0, 0.5, -1.0, -2.0, 0.0]
    assert [extra.get("overlong") for extra in extras] == [0.0, 0.0, 1.0, 1.0, 1.0, None]
    assert [extra.get("overlong_reward") for extra in extras] == [0.0, 0.0, -0.5, -2.0, -3.0, None]
    assert [extra.get("acc") for extra in extras] == [1.0] * 5 + [None]  # the score before the penalty
    # max_resp_len, when given, is the limit whatever the responses' is
    manager = make("dapo", "one", 20, max_resp_len=18, overlong_buffer_cfg=overlong | {"log": False})
    scores, _, extras, _ = manager.score(items[1:3])
    assert scores.tolist() == [0.0, -0.5] and extras == [{"acc": 1.0}] * 2


def test_a_result_without_an_accuracy_has_its_score(make: Callable[..., RewardManager], caplog: Any) -> None:
    """0 stands for no result only where scoring failed, and there it is NaN; a mixture is named once."""
    manager = make("naive", "branches")
    found = manager.score(requests_for("", "bare"))
    np.testing.assert_array_equal(found.acc, np.array([0, 0.75], np.float32))
    found = manager.score(requests_for("right", "none", "text", "nan", "dies", "bare"))
    np.testing.assert_array_equal(found.acc, np.array([1, 0.75, 0.75, 0.75, np.nan, 0.75], np.float32))
    assert [has_acc(extra) for extra in found.extras] == [True] + [False] * 5
    told = [record.getMessage() for record in caplog.records if "of data_source 'mine' some" in record.getMessage()]
    assert len(told) == 1
    manager = make("naive", "parts")
    assert manager.score(requests_for("a", "b")).acc.tolist() == [1.0, 1.0]
    assert "return acc in all results" not in caplog.text.replace(told[0], "")


@pytest.mark.parametrize("name", ["naive", "gdpo"])
def test_components_stay_with_the_sample(make: Callable[..., RewardManager], name: str) -> None:
    scores, _, extras, _ = make(name, "parts").score(requests_for("abc"))
    assert scores.tolist() == [1.0] and extras == [{"format": 0.25, "length": 3.0, "pred": "abc"}]


def test_batch_gives_all_of_a_collect_to_one_call(make: Callable[..., RewardManager]) -> None:
    manager = make("batch", "together", num_workers=2, arguments={"scale": 3.0})
    for key, item in enumerate(requests_for("a", "c", "b", "nan")):
        manager.submit(key, item)
    scores, _, extras, counts = manager.collect([2, 1])
    assert scores.tolist() == [0.0, 3.0] and extras == [{"size": 2.0}] * 2
    scores, _, extras, counts = manager.collect([3, 0])
    assert scores.tolist() == [0.0, 0.0] and extras == [{}, {"size": 2.0}] and counts["reward/errors"] == 1
    scores, _, _, counts = manager.score(requests_for("a", "die", "b"))
    assert scores.tolist() == [0.0] * 3 and counts["reward/crashes"] == 3
    assert manager.collect([])[0].shape == (0,)


def test_rate_limited_calls_overlap_up_to_the_limit(make: Callable[..., RewardManager]) -> None:
    manager = make("rate_limited", "asks", max_concurrent=3)
    scores, _, extras, _ = manager.score(requests_for(*["meets"] * 3, *["passes"] * 9))
    assert scores.tolist() == [1.0] * 12
    most = [extra["most"] for extra in extras]
    assert most[:3] == [3.0] * 3 and max(most) == 3.0


def test_rate_limited_failures_cost_their_own_samples(make: Callable[..., RewardManager]) -> None:
    pool_module.LATE_SECONDS, kept = 0.5, pool_module.LATE_SECONDS
    try:
        manager = make("rate_limited", "asks", max_concurrent=8, timeout=0.5)
        texts = ["fine", "hangs", "dies", "fine", "raises", "blocks", "fine"]
        scores, _, _, counts = manager.score(requests_for(*texts))
    finally:
        pool_module.LATE_SECONDS = kept
    assert scores.tolist() == [float(text == "fine") for text in texts]
    assert counts == {"reward/timeouts": 2, "reward/crashes": 1, "reward/errors": 1, "reward/over_limits": 0}


def test_rate_limited_keeps_to_the_pace(make: Callable[..., RewardManager]) -> None:
    manager = make("rate_limited", "one", max_concurrent=4, num_workers=2, max_rpm=1200)  # 20 at once, then 20 a second
    start = time.monotonic()
    assert manager.score(requests_for(*["1"] * 26))[0].tolist() == [1.0] * 26
    assert 0.3 <= time.monotonic() - start < 5


@pytest.mark.parametrize(
    ("reward", "said"),
    [
        ({"reward_manager": {"name": "batch"}}, "use naive, or name a function of lists"),
        (
            {"reward_manager": {"name": "dapo"}, "reward_kwargs": {"overlong_buffer_cfg": {"enable": True}}},
            r"len=0 with max_resp_len=8; expected 1 to max_resp_len",
        ),
        (
            {"reward_manager": {"name": "dapo"}, "reward_kwargs": {"overlong_buffer_cfg": {"enable": True, "len": 9}}},
            r"len=9 with max_resp_len=8",
        ),
    ],
)
def test_settings_that_do_not_go_together(reward: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        manager_of(RewardConfig.model_validate(reward), 8)


SLEEPS = """
import time

def compute_score(data_source, solution_str, ground_truth, extra_info):
    with open(__file__ + ".calls", "a") as file:
        file.write(solution_str + "\\n")
    time.sleep(float(solution_str))
    return 1.0
"""


@pytest.mark.parametrize(
    ("seconds", "timeout", "batch_timeout"),
    [
        (["1000"] * 6, 1000, 1.0),
        (["1000"] * 4 + ["0"] * 6, 1000, 3.0),
        (["1000", "1.1"] + ["0"] * 4, 3, 6.0),  # the second exceeds its share of 0.75 s, and runs again
    ],
)
def test_a_batch_ends_in_its_time_and_sleeping_scores_leave_some_for_the_others(
    tmp_path: Path, caplog: Any, seconds: list[str], timeout: float, batch_timeout: float
) -> None:
    (tmp_path / "sleeps.py").write_text(SLEEPS)
    custom = {"path": str(tmp_path / "sleeps.py")}
    reward = {"custom_reward_function": custom, "timeout": timeout, "batch_timeout": batch_timeout}
    manager = RewardManager(RewardConfig.model_validate(reward))
    started = time.monotonic()
    try:
        scores, acc, _, counts = manager.score(requests_for(*seconds))
    finally:
        manager.close()
    assert time.monotonic() - started < 25
    ends = [text != "1000" for text in seconds]
    assert scores.tolist() == [float(end) for end in ends]
    assert np.isnan(acc).tolist() == [not end for end in ends]
    assert counts["reward/timeouts"] == ends.count(False) and sum(counts.values()) == ends.count(False)
    assert "longer than its share of reward.batch_timeout" in caplog.text
    calls = (tmp_path / "sleeps.py.calls").read_text().splitlines()
    assert calls.count("1.1") == 2 * seconds.count("1.1")


def test_the_same_key_is_collected_as_often_as_submitted(make: Callable[..., RewardManager]) -> None:
    manager = make("naive", "one")
    for text in ("1", "2"):
        manager.submit("key", requests_for(text)[0])
    assert manager.submitted("key") == 2
    assert manager.collect(["key", "key"])[0].tolist() == [1.0, 2.0]
    assert manager.submitted("key") == 0
