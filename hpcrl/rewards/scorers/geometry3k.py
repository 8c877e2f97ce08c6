r"""Geometry3K: the answer in the last \boxed{}, and a form with <think></think> before it."""

from __future__ import annotations

from typing import Any

from hpcrl.rewards.scorers.grader import same_answer
from hpcrl.rewards.scorers.math_boxed import closing_brace

NO_ANSWER = "None"


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: str,
    extra_info: dict[str, Any] | None = None,
    *,
    format_score: float = 0.1,
    **_: Any,
) -> float:
    """(1 - format_score) x right + format_score x form.

    verl's `reward_score/geo3k.py` over mathruler 0.1.0; see `grader.same_answer` for what is right. Quirk: without a
    box the answer is "None".
    """
    right = same_answer(boxed_answer(solution_str), ground_truth, "mathruler")
    return (1.0 - format_score) * right + format_score * has_form(solution_str)


def boxed_answer(text: str) -> str:
    start = text.rfind(r"\boxed{")
    end = closing_brace(text, start) if start >= 0 else -1
    return text[start + len(r"\boxed{") : end].strip() if end >= 0 else NO_ANSWER


def has_form(text: str) -> bool:
    r"""Whether it is `<think>...</think>...\boxed{...}...`; in linear time."""
    place = 0
    for part in ("<think>", "</think>", r"\boxed{", "}"):
        found = text.find(part, place)
        if found < 0 or (part == "<think>" and found > 0):
            return False
        place = found + len(part)
    return True
