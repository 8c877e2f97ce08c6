"""Built-in rules through the manager."""

from __future__ import annotations

import numpy as np
import pytest

from hpcrl.config.schema import RewardConfig
from hpcrl.launch.exits import InputError
from hpcrl.rewards.manager import RewardManager, ScoreRequest, check_rewards, split_path

TRUTH = {"numbers": [1, 2, 3, 4], "target": 10}


def test_countdown_scores_extras_and_counts() -> None:
    manager = RewardManager(RewardConfig(format_score=0.2))
    items = [
        ScoreRequest("countdown", "<a>1+2+3+4</a>", TRUTH),
        ScoreRequest("countdown", "<a>1+2+3+4</a>", TRUTH, finish_reason="length"),
        ScoreRequest("countdown", "<a>1</a>", TRUTH, {"index": 3}),
        ScoreRequest("countdown", "<a>1</a>", {"target": 10}),  # a broken row
    ]
    scores, extras, counts = manager.score(items)
    np.testing.assert_array_equal(scores, np.array([1.0, 0.0, 0.2, 0.0], dtype=np.float32))
    np.testing.assert_array_equal(extras["acc"], np.array([1, 0, 0, np.nan], dtype=np.float32))
    assert counts == {"reward/timeouts": 0, "reward/crashes": 0, "reward/errors": 1}
    manager.close()


def test_unknown_data_source_names_the_known_ones_and_the_way_out() -> None:
    check_rewards(RewardConfig(), {"countdown"})
    with pytest.raises(InputError, match=r"'gsm8k'.*known: countdown; .*custom_reward_function\.path"):
        check_rewards(RewardConfig(), {"countdown", "gsm8k"})


def test_path_with_a_function_name() -> None:
    assert split_path("a/b.py:score", "compute_score") == ("a/b.py", "score")
    assert split_path("a/b.py", "compute_score") == ("a/b.py", "compute_score")
