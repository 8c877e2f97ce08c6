r"""Strict variants of verl's rules: the whole answer is one value, or one tuple of values, and equals the ground truth.

Numbers and expressions are compared by value, to 45 digits; everything else by its spelling, without layout. There are
no percentages, no rounding, no list of alternatives, and no second answer beside the first.
"""

from __future__ import annotations

import re
from typing import Any

from hpcrl.rewards.registry import as_text_or_number, reads
from hpcrl.rewards.scorers import algebra, limits, short_answers
from hpcrl.rewards.scorers.grader import has_form
from hpcrl.rewards.scorers.math_answers import closing_brace, last_box
from hpcrl.rewards.scorers.short_answers import CLOSE, OPEN, last_answer, normalised, targets

MAX_LENGTH, MAX_DEPTH = algebra.MAX_LENGTH, 16
LAYOUT = (
    *(
        (sign, "")
        for sign in (r"\left", r"\right", r"\!", r"\,", r"\;", r"\ ", r"\$", "$", r"^{\circ}", r"^\circ", "{,}")
    ),
    *((long, r"\frac") for long in (r"\dfrac", r"\tfrac")),
    *((sign, "*") for sign in (r"\cdot", r"\times")),
    (r"\%", "%"),
)
UNIT = re.compile(r"\s*\\(?:text|mathrm|mbox)\{(?!.*\b(?:or|and|to)\b)[A-Za-z. ]+\}(?:\^\{?[23]\}?)?$")
TEXT = re.compile(r"\\(?:text|mathrm|mbox)\{([^{}]*)\}")
NAME = re.compile(r"[A-Za-z]\s*=(?!=)\s*")
APART = re.compile(r"[\d.]\s+[\d.]|\d\s*\\frac")  # two numbers, or a mixed number: not one value for certain
THOUSANDS = re.compile(r"-?\d{1,3}(?:,\d{3})+(?:\.\d+)?")
COMMAND = re.compile(r"\\(frac|sqrt)(?![a-z])")
BRACKETS = {"(": ")]", "[": ")]"}
NUMBER = re.compile(r"####\s*(-?[\d.,]+)\s*")
ANSWER = re.compile(r"(?i:answer)\s*:[ \t]*([^\n]*)")


def same(answer: str, truth: str) -> bool:
    """Whether both are the same value, the same values in the same brackets, or the same text."""
    if limits.is_over(answer, MAX_LENGTH, MAX_DEPTH):
        return answer.strip() == truth.strip()
    given, expected = bare(answer), bare(truth)
    if not given or not expected:
        return False
    if without_spaces(given) == without_spaces(expected):
        return True
    ours, theirs = elements(given), elements(expected)
    if len(ours) != len(theirs) or (len(ours) > 1 and (given[0], given[-1]) != (expected[0], expected[-1])):
        return False
    return all(map(same_value, ours, theirs))


def bare(text: str) -> str:
    """The text without layout, one unit at the end, and the name in `x = 5`."""
    whole = TEXT.fullmatch(text.strip())
    text = whole[1] if whole else UNIT.sub("", text.strip())
    for before, after in LAYOUT:
        text = text.replace(before, after)
    text = text.strip()
    name = NAME.match(text)
    return text[name.end() :] if name else text


def without_spaces(text: str) -> str:
    """The text without spaces, but for those between two numbers."""
    return re.sub(r"(?<!\d)\s+|\s+(?!\d)", "", text)


def elements(text: str) -> list[str]:
    """The values of a tuple, an interval or a list; the text itself where it is one value."""
    inner = text[1:-1] if text[-1] in BRACKETS.get(text[0], "") and "," in text else text
    if THOUSANDS.fullmatch(inner):
        return [text]
    parts, level = [""], 0
    for character in inner:
        level += (character in limits.OPENING) - (character in limits.CLOSING)
        if character == "," and level == 0:
            parts.append("")
        else:
            parts[-1] += character
    return parts if level == 0 and len(parts) > 1 else [text]


def same_value(given: str, expected: str) -> bool:
    if without_spaces(given) == without_spaces(expected):
        return bool(given.strip())
    ours, theirs = expression(given), expression(expected)
    return ours is not None and theirs is not None and algebra.equal(ours, theirs)


def expression(text: str) -> str | None:
    """LaTeX in the grammar of `algebra`, with each fraction and root in brackets; None where it is not one value."""
    if THOUSANDS.fullmatch(text.strip()):
        return text.replace(",", "")
    if APART.search(text) or "=" in text or "%" in text:
        return None
    while commands := list(COMMAND.finditer(text)):
        command = commands[-1]  # nothing follows it that has arguments of its own
        first, end = argument(text, command.end())
        if command[1] == "sqrt":
            value = f"sqrt({first})"
        else:
            second, end = argument(text, end)
            value = f"(({first})/({second}))"
        if end < 0:
            return None
        text = text[: command.start()] + value + text[end:]
    text = text.replace(r"\ln", " ln ").replace(r"\pi", " pi ").replace("π", " pi ").replace("^", "**")
    return None if "\\" in text else text.replace("{", "(").replace("}", ")")


def argument(text: str, place: int) -> tuple[str, int]:
    """An argument of a command and the place after it; the place is -1 where there is none."""
    while 0 <= place < len(text) and text[place] == " ":
        place += 1
    if not 0 <= place < len(text):
        return "", -1
    if text[place] != "{":
        return text[place], place + 1 if text[place].isalnum() else -1
    end = closing_brace(text, place)
    return text[place + 1 : end], end + 1 if end >= 0 else -1


def scored(answer: str | None, truth: str) -> float | dict[str, Any]:
    if answer is not None and same(answer, truth):
        return 1.0
    return limits.marked(0.0, answer, MAX_LENGTH, MAX_DEPTH)


@reads(as_text_or_number)
def boxed(data_source: str, solution_str: str, ground_truth: str, **_: Any) -> float | dict[str, Any]:
    r"""1 if the last `\boxed{...}`, which must be closed, holds the ground truth, else 0."""
    return scored(last_box(solution_str), ground_truth)


@reads(as_text_or_number)
def geometry3k(data_source: str, solution_str: str, ground_truth: str, *, format_score: float = 0.1, **_: Any) -> float:
    """(1 - format_score) x right + format_score x form, as `grader.geometry3k`."""
    box = last_box(solution_str)
    right = box is not None and same(box, ground_truth)
    return (1.0 - format_score) * right + format_score * has_form(solution_str)


@reads(as_text_or_number)
def math_dapo(data_source: str, solution_str: str, ground_truth: str, **_: Any) -> dict[str, Any]:
    """`score` 1 or -1, `acc`, and `pred`: all of the line after the last `Answer:`, or of a box in it."""
    lines = ANSWER.findall(solution_str)
    pred = lines[-1].strip().removesuffix(".") if lines else None
    if pred and pred.startswith(r"\boxed{") and closing_brace(pred, 0) == len(pred) - 1:
        pred = last_box(pred)
    right = pred is not None and same(pred, ground_truth)
    return {"score": 1.0 if right else -1.0, "acc": right, "pred": pred}


@reads(as_text_or_number)
def gsm8k(
    data_source: str,
    solution_str: str,
    ground_truth: str,
    *,
    format_score: float = 0.0,
    score: float = 1.0,
    **_: Any,
) -> float:
    """`score` for the right number after the only `####`, with nothing after it; `format_score` for another one."""
    place = solution_str.rfind("####")
    match = NUMBER.fullmatch(solution_str, max(place, 0))
    if match is None or solution_str.count("####") > 1:
        return 0.0
    return score if same(match[1].removesuffix("."), ground_truth) else format_score


@reads(targets)
def search_r1(data_source: str, solution_str: str, ground_truth: list[str], **options: Any) -> float:
    """As `short_answers.search_r1`, for one pair of tags with an answer of more than articles and punctuation."""
    answer = last_answer(solution_str)
    if not answer or not normalised(answer) or solution_str.count(OPEN) > 1 or solution_str.count(CLOSE) > 1:
        return 0.0
    return short_answers.search_r1(data_source, solution_str, {"target": ground_truth}, **options)
