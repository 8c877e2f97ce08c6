"""The rule of rows of `hpcrl data reasoning_gym`: the package's own `score_answer` (extra `reasoning-gym`)."""

from __future__ import annotations

import inspect
import json
import re
import secrets
from collections.abc import Callable
from functools import cache
from typing import Any

from hpcrl.rewards.registry import as_text, reads
from hpcrl.sandbox.program import run_python

PREFIX = "reasoning_gym/"  # of data sources
EVALUATES = re.compile(r"\b(eval|exec|parse_expr|sympify)\(")  # sympy's parser evaluates, too
# No answer has these, and with them evaluated text could read the right answer, or print a score of its own.
REACHES = re.compile(r"__|\b(breakpoint|eval|exec|getattr|globals|import|locals|open|print|vars)\b")
PROGRAM = """
import json, sys
from reasoning_gym import get_score_answer_fn
task, answer, entry, mark = json.load(sys.stdin)
print(mark + str(float(get_score_answer_fn(task)(answer, entry))))
"""


@reads(as_text)
def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: str,
    extra_info: dict[str, Any],
    *,
    sandbox: str = "required",
    **_: Any,
) -> dict[str, float]:
    """Score the last complete <answer>, or else what follows the thoughts, from 0 to 1; only 1 is right.

    Scorers that evaluate the answer as Python run in a sandbox, about a second each, unless `sandbox` is "none". Raises
    SandboxUnavailable where the kernel cannot isolate them, unless it is "best_effort".

    Args:
        ground_truth: the answer that the package wrote, "" if it wrote none.
        extra_info: has `metadata` as JSON.
    """
    opened, last = solution_str.rpartition("</answer>")[0].rpartition("<answer>")[1:]
    answer = (last if opened else solution_str.rpartition("</think>")[2]).strip()
    entry = {"question": "", "answer": ground_truth or None, "metadata": json.loads(extra_info["metadata"])}
    task = data_source.removeprefix(PREFIX)
    if evaluates(task) and REACHES.search(answer):
        score = 0.0
    elif sandbox != "none" and evaluates(task):
        score = isolated_score(task, answer, entry, best_effort=sandbox == "best_effort")
    else:
        score = float(scorer_of(task)(answer, entry))
    return {"score": score, "acc": float(score == 1)}


@cache
def scorer_of(task: str) -> Callable[[str, dict[str, Any]], float]:
    from reasoning_gym import get_score_answer_fn

    scorer: Callable[[str, dict[str, Any]], float] = get_score_answer_fn(task)
    return scorer


@cache
def evaluates(task: str) -> bool:
    """Whether the file of the scorer evaluates text as Python, which may be the model's."""
    return EVALUATES.search(inspect.getsource(inspect.getmodule(scorer_of(task)))) is not None  # type: ignore[arg-type]


def isolated_score(task: str, answer: str, entry: dict[str, Any], *, best_effort: bool) -> float:
    mark = secrets.token_hex(16)
    ran = run_python(PROGRAM, json.dumps([task, answer, entry, mark]), best_effort=best_effort)
    _, printed, score = ran.stdout.rpartition(mark)
    return min(max(float(score), 0.0), 1.0) if printed and ran.fate == "ok" else 0.0
