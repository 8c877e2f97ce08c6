"""Countdown: make the target from the given numbers, each used exactly once; the answer stands alone in <a></a>."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

from hpcrl.rewards.scorers.arithmetic import ExpressionError, evaluate

# `fullmatch`, not `$`, which would allow a newline at the end.
ANSWER = re.compile(r"<a>([0-9+\-*/()]+)</a>")


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: dict[str, Any],
    extra_info: dict[str, Any] | None = None,
    *,
    format_score: float = 0.1,
    **_: Any,
) -> dict[str, float]:
    """1 for a right answer, `format_score` when only tags and expression parse, 0 otherwise; `acc` is 1 or 0.

    `format` is 1 where tags and expression parse, right or not: the other part of the reward, for gdpo.

    `ground_truth` is {"numbers": [...], "target": n}. A response that did not end by itself scores 0: that is one whose
    `extra_info["finish_reason"]` is there and is not "stop" (RewardManager puts it there).
    """
    numbers, target = Counter(ground_truth["numbers"]), ground_truth["target"]
    finish_reason = (extra_info or {}).get("finish_reason", "stop")
    answer = ANSWER.fullmatch(solution_str)
    if answer is None or finish_reason != "stop":
        return {"score": 0.0, "acc": 0.0, "format": 0.0}
    try:
        found = evaluate(answer[1])
    except ExpressionError:
        return {"score": 0.0, "acc": 0.0, "format": 0.0}
    right = found.value == target and Counter(found.numbers) == numbers
    return {"score": 1.0 if right else format_score, "acc": float(right), "format": 1.0}
