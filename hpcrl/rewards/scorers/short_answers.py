"""Short answers: a whole text, a number after '####', or a text in <answer></answer>."""

from __future__ import annotations

import re
import string
from typing import Any, Literal

from hpcrl.rewards.registry import as_text, as_texts, reads
from hpcrl.runtime.exits import InputError

LAST_CHARACTERS = 300
MARKED = re.compile(r"#### (-?[0-9.,]+)")
NUMBER = re.compile(r"-?[0-9.,]+")


@reads(as_text)
def exact(data_source: str, solution_str: str, ground_truth: str, **_: Any) -> float:
    """1 if the response is the ground truth, without regard to white space around it; else 0, and for an empty one."""
    return float(solution_str.strip() == ground_truth.strip() != "")


@reads(as_text)
def gsm8k(
    data_source: str,
    solution_str: str,
    ground_truth: str,
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
    numbers = (MARKED if method == "strict" else NUMBER).findall(solution_str[-LAST_CHARACTERS:])
    if not numbers:
        return 0.0
    if method == "strict":
        answer = numbers[-1].replace(",", "")
    else:  # the last number that is more than a full stop; a full stop if there is nothing else
        answer = next((number for number in reversed(numbers) if number != "."), numbers[0])
    return score if answer == ground_truth else format_score


OPEN, CLOSE = "<answer>", "</answer>"
MANY_TAGS = 10
ARTICLES = re.compile(r"\b(?:a|an|the)\b")
NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


def targets(value: Any) -> list[str]:
    """The texts in {"target": text or texts}."""
    try:
        return as_texts(value["target"])
    except (TypeError, KeyError, ValueError):
        raise ValueError("expected {target: a text, or a list of texts}") from None


@reads(targets)
def search_r1(
    data_source: str,
    solution_str: str,
    ground_truth: list[str],
    *,
    format_score: float = 0.0,
    score: float = 1.0,
    **_: Any,
) -> float:
    """`score` for an exact match, a quarter of it when a tag occurs more than ten times, `format_score` for another
    answer, 0 without tags.

    verl's `reward_score/search_r1_like_qa_em.py`. Exact match as in SQuAD (Rajpurkar et al. 2016): lower case, no ASCII
    punctuation, no English articles, single spaces.
    """
    answer = last_answer(solution_str)
    if answer is None:
        return 0.0
    if normalised(answer) not in map(normalised, ground_truth):
        return format_score
    many = max(solution_str.count(OPEN), solution_str.count(CLOSE)) > MANY_TAGS
    return score / 4 if many else score


def last_answer(text: str) -> str | None:
    """The text in the last complete pair of tags; an open tag inside a pair is text. Linear in the length."""
    answer, place = None, 0
    while (start := text.find(OPEN, place)) >= 0 and (end := text.find(CLOSE, start)) >= 0:
        answer = text[start + len(OPEN) : end].strip()
        place = end + len(CLOSE)
    return answer


def normalised(text: str) -> str:
    return " ".join(ARTICLES.sub(" ", text.lower().translate(NO_PUNCTUATION)).split())
