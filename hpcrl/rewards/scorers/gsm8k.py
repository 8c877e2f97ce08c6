"""GSM8K: the number after the last `####`, or the last number of all, must be the ground truth, as text."""

from __future__ import annotations

import re
from typing import Any, Literal

from hpcrl.runtime.exits import InputError

LAST_CHARACTERS = 300
MARKED = re.compile(r"#### (-?[0-9.,]+)")
NUMBER = re.compile(r"-?[0-9.,]+")


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: str,
    extra_info: dict[str, Any] | None = None,
    *,
    method: Literal["strict", "flexible"] = "strict",
    format_score: float = 0.0,
    score: float = 1.0,
    **_: Any,
) -> float:
    """`score` for the right number, `format_score` for another one, 0 without any.

    verl's `reward_score/gsm8k.py`, quirks included: only the last 300 characters count; "#### 12." is the number "12."
    and wrong; "strict" drops thousands commas and "flexible" does not; for "flexible" a lone comma is a number.
    """
    if method not in ("strict", "flexible"):
        raise InputError(f"gsm8k: method={method!r}; expected 'strict' or 'flexible'")
    found = strict_answer(solution_str) if method == "strict" else flexible_answer(solution_str)
    if found is None:
        return 0.0
    return score if found == ground_truth else format_score


def strict_answer(text: str) -> str | None:
    numbers = MARKED.findall(text[-LAST_CHARACTERS:])
    return numbers[-1].replace(",", "") if numbers else None


def flexible_answer(text: str) -> str | None:
    """The last number that is more than a full stop; a full stop where there is nothing else."""
    numbers = NUMBER.findall(text[-LAST_CHARACTERS:])
    if not numbers:
        return None
    return next((number for number in reversed(numbers) if number != "."), numbers[0])
