"""NuminaMath: the last thing that looks like an answer, as PRIME grades it: by spelling, value, or numbers."""

from __future__ import annotations

import math
import re
from typing import Any

from hpcrl.rewards.registry import as_text_or_number, reads
from hpcrl.rewards.scorers import algebra, limits
from hpcrl.rewards.scorers.grader import same_answer
from hpcrl.rewards.scorers.math_answers import closing_brace

BEFORE_THE_ANSWER = ("answer:", "answer is", "answers are")
AFTER_THE_ANSWER = ("is answer", "is the answer", "are answers", "are the answers")
LAST_WORDS = ("be ", "is ", "are ", "=", ": ", "get ", "be\n", "is\n", "are\n", ":\n", "get\n")
DOLLARS = re.compile(r"\$\d+(\.\d+)?")
PERCENT = re.compile(r"(\d+(?:\.\d+)?)\\?%$")
PI = re.compile(r"(\d?)\\pi")
INTERVALS = (
    (re.compile(r"Interval\((.*)\)$"), r"[\1]"),
    (re.compile(r"Interval\.Ropen\((.*)\)$"), r"[\1)"),
    (re.compile(r"Interval\.Lopen\((.*)\)$"), r"(\1]"),
    (re.compile(r"Interval\.open\((.*)\)$"), r"(\1)"),
)
POINT = re.compile(r"Point.*?\((.*).$")
TOLERANCE = 1e-4
MAX_CHARACTERS = 1000
MAX_DEPTH = 8  # tuples in tuples


@reads(as_text_or_number)
def compute_score(data_source: str, solution_str: str, ground_truth: str, **_: Any) -> float | dict[str, Any]:
    r"""1 or 0.

    verl's `reward_score/prime_math` (Cui et al. 2025, "PRIME"; Gou et al. 2024, "ToRA", for `same_numbers`), which
    evaluates text of the model with Python's `eval` and with sympy; here it is parsed, see `grader.same_answer`. Quirks
    kept: a number equals its hundredth and its hundredfold; \pi may be 3.14; the last comparison, of expressions to
    1e-4, is never true, for 0.9.1 enters a decorator as a context manager. Not kept: a matrix as a Python list.
    """
    answer, truth = last_answer(solution_str), ground_truth
    if same_answer(answer, truth, "prime"):
        return 1.0
    try:
        values_of_pi = (math.pi, 3.14) if r"\pi" in answer or r"\pi" in truth else (math.pi,)
        if any(same_numbers(answer, truth, pi) for pi in values_of_pi):
            return 1.0
    except (ValueError, OverflowError):  # a number in another base that is no number
        pass
    return limits.marked(0.0, last_box(solution_str), algebra.MAX_LENGTH, algebra.MAX_DEPTH)


def last_answer(text: str) -> str:
    """A response without the words before and after the answer, its box and a last sentence."""
    for marker in BEFORE_THE_ANSWER:
        text = after_last(marker, text)
    for marker in AFTER_THE_ANSWER:
        place = text.lower().rfind(marker)
        text = text[:place].strip() if place >= 0 else text
    text = last_box(text) or text
    if ". " in text:
        text = text.rpartition(". ")[0].strip()
    for marker in LAST_WORDS:
        text = after_last(marker, text)
    return text


def after_last(marker: str, text: str) -> str:
    place = text.lower().rfind(marker)
    return text[place + len(marker) :].strip() if place >= 0 else text


def last_box(text: str) -> str | None:
    r"""What the last `\boxed`, or else the last `\fbox`, holds; the brace need not follow at once."""
    start = text.rfind(r"\boxed")
    if start < 0:
        start = text.rfind(r"\fbox")
    end = closing_brace(text, start) if start >= 0 else -1
    return text[text.find("{", start) + 1 : end].strip() if end >= 0 else None


def same_numbers(answer: str, expected: str, pi: float = math.pi, depth: int = 0) -> bool:
    """Equal as text, as numbers to 1e-4 (as they are, or one as a percentage), or element by element."""
    left, right = number_or_text(answer, pi), number_or_text(expected, pi)
    if isinstance(left, str):
        left = left[:MAX_CHARACTERS]
    if isinstance(left, str) and isinstance(right, str):
        if left.strip().lower() == right.strip().lower() or left.replace(" ", "") == right.replace(" ", ""):
            return True
    a, b = as_float(left), as_float(right)
    if a is not None and b is not None:
        return any(math.isclose(candidate, a, rel_tol=TOLERANCE) for candidate in (b / 100, b, b * 100))
    if left == "":
        return False
    return same_texts(str(left).strip(), str(right).strip(), depth)


def same_texts(answer: str, expected: str, depth: int) -> bool:
    for interval, brackets in INTERVALS:
        if interval.match(answer):
            answer = interval.sub(brackets, answer)
            break
    if without_brackets(answer, expected):
        return True
    if not expected or depth > MAX_DEPTH:
        return False
    if answer and answer[0] in "([" and answer[-1] in ")]" and (answer[0], answer[-1]) == (expected[0], expected[-1]):
        if same_lists(answer[1:-1].split(","), expected[1:-1].split(","), depth):
            return True
    if "," in answer and "," in expected:
        left, right = answer.split(","), expected.split(",")
        if len(left) == len(right):
            return same_lists([part.strip() for part in left], [part.strip() for part in right], depth)
    point = POINT.match(answer)
    if point and expected[0] == "(" and expected[-1] == ")":
        if same_lists(point[1].split(","), expected[1:-1].split(","), depth):
            return True
    return False


def same_lists(answers: list[str], expected: list[str], depth: int) -> bool:
    if len(answers) != len(expected):
        return False
    return all(same_numbers(a, b, depth=depth + 1) for a, b in zip(answers, expected, strict=True))


def without_brackets(answer: str, expected: str) -> bool:
    """Equal but for brackets that one of the two may lack."""
    if (answer.startswith("[") and answer.endswith("]") and not expected.startswith("(")) or (
        answer.startswith("(") and answer.endswith(")") and not expected.startswith("[")
    ):
        answer, expected = answer.strip("[]()"), expected.strip("[]()")
    no_brackets = str.maketrans("", "", "{}()")
    return answer.translate(no_brackets) == expected.translate(no_brackets)


def number_or_text(text: str, pi: float) -> float | str:
    r"""A text without `$` or percent; the whole number before the `_` of a base; the value of a product with `\pi`."""
    if DOLLARS.match(text):
        return text[1:]
    if percent := PERCENT.match(text):
        return percent[1]
    if "_" in text:
        return int(float(text.partition("_")[0]))
    if r"\pi" in text:
        text = PI.sub(lambda digit: f"{digit[1]}*{pi}" if digit[1] else f"1*{pi}", text)
        if not algebra.has_letters(text):
            try:
                return float(algebra.value(text))
            except (algebra.NotAnExpression, ArithmeticError):
                pass
    return text


def as_float(value: float | str) -> float | None:
    try:
        return float(str(value).replace("{,}", "").replace(",", ""))
    except ValueError:
        return None
