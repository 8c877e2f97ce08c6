"""Whether an answer says the same as the ground truth: the same spelling, or the same value."""

from __future__ import annotations

import re
from typing import Literal

from hpcrl.rewards.scorers import algebra
from hpcrl.rewards.scorers.latex_text import NotLatex, latex_text
from hpcrl.rewards.scorers.math_boxed import UnusualSpelling
from hpcrl.rewards.scorers.math_boxed import normalised as math_spelling

# Which of the two programs that verl uses is followed; they differ in a few spellings.
Flavour = Literal["mathruler", "prime"]

TEXT = re.compile(r"\\text\{(.+?)\}$")
UNITS = "degree cm centimeter meter mile second minute hour day week month year foot feet inch yard".split()
UNIT_PATTERNS = {
    "mathruler": [re.compile(rf"{unit}(?:es)?s? *(?:\^[0-9]+)?") for unit in UNITS],
    "prime": [re.compile(rf"{unit}(?:es)?s? *(?:\^[0-9]+)?") for unit in [*UNITS, "liter"]],
}
WORDS = (
    (r"\%", "%"),
    (r"\$", "$"),
    ("$", ""),
    ("%", ""),
    (" or ", " , "),
    (" and ", " , "),
    ("million", "*10^6"),
    ("billion", "*10^9"),
    ("trillion", "*10^12"),
)
SIGNS = (("√", "sqrt"), ("π", "pi"), ("∞", "inf"), ("∪", "U"), ("·", "*"), ("×", "*"))
THOUSANDS = re.compile(r"(\d),(\d\d\d)($|\D)")
FRACTION = re.compile(r"-?[0-9]+.?/0*[1-9][0-9]*.?$")
BRACKETS = "()[]"
# sympy, on which both rely, might hang on these.
TOWERS = re.compile(r"\^[{(]|\^[0-9]+\^|\^[0-9][0-9]+")


def same_answer(answer: str, truth: str, flavour: Flavour) -> bool:
    """Equal as MATH answers, or after `plain`, or element by element as values.

    The rules of mathruler 0.1.0 and of verl's `reward_score/prime_math` (both after Lightman et al. 2023, "Let's Verify
    Step by Step", the released PRM800K grader), quirks included: the ground truth decides how strict it is, for a
    whole number is only equal to a whole number, and a fraction that is not reduced is not equal to the reduced one.
    They ask sympy whether the difference simplifies to 0; here both sides are evaluated to 60 digits at fixed points of
    their letters, without sympy and `eval`. That is the same but for expressions that are equal and that sympy does not
    simplify, and for decimals, which are exact here and binary there; complex numbers are never equal here.
    """
    if math_form(answer, flavour) == math_form(truth, flavour):
        return True
    found, expected = plain(answer, flavour), plain(truth, flavour)
    if found == expected:
        return True
    if not found:
        return False
    found_parts, expected_parts = parts(found), parts(expected)
    if len(found_parts) != len(expected_parts):
        return False
    if len(expected_parts) > 1 and (found[0], found[-1]) != (expected[0], expected[-1]):
        return False
    return all(map(same_element, found_parts, expected_parts))


def math_form(answer: str, flavour: Flavour) -> str:
    answer = answer.strip()
    text = TEXT.match(answer)
    try:
        answer = text[1].strip() if text else answer
        return math_spelling(answer, drop_percent=flavour == "mathruler")
    except UnusualSpelling:
        return answer


def plain(answer: str, flavour: Flavour) -> str:
    """An answer in lower case without units, LaTeX, and thousands commas, and a whole number in digits."""
    text = TEXT.match(answer)
    answer = text[1] if text else answer
    for before, after in WORDS:
        answer = answer.replace(before, after)
    for unit in UNIT_PATTERNS[flavour]:
        answer = unit.sub("", answer)
    answer = re.sub(r"\^ *\\circ", "", answer)
    if answer.startswith("{") and answer.endswith("}"):
        answer = answer[1:-1]
    answer = re.sub(r",\\! *", "", answer)
    number = whole_number(answer)
    if number is not None:
        answer = str(round(number))
    if "\\" in answer:
        answer = without_latex(answer)
    answer = re.sub("- *", "-", answer)
    answer = re.sub("([0-9]) +([0-9])", r"\1+\2", answer)
    if flavour == "mathruler":
        answer = answer.translate(str.maketrans("", "", " {}"))
    answer = answer.lower()
    if whole_number(without_thousands(answer)) is not None:
        answer = str(int(float(answer.replace(",", ""))))
    return answer


def without_latex(answer: str) -> str:
    """As plain text; unchanged where it is not LaTeX."""
    try:
        text = latex_text(re.sub(r"\\[td]?frac", r" \\frac", answer))
    except NotLatex:
        return answer
    for before, after in SIGNS:
        text = text.replace(before, after)
    return text.strip()


def whole_number(text: str) -> float | None:
    """The number that the text is, if that is whole to 1e-7."""
    try:
        number = float(text)
        return number if abs(number - round(number)) <= 1e-7 else None
    except (ValueError, OverflowError):
        return None


def without_thousands(text: str) -> str:
    """1,234 as 1234; a comma between other numbers stays."""
    while (shorter := THOUSANDS.sub(r"\1\2\3", text)) != text:
        text = shorter
    return text


def parts(text: str) -> list[str]:
    """The elements of a tuple or an interval; the text itself where it is neither."""
    text = without_thousands(text)
    if not text:
        return []
    inner = text[1:-1]
    if len(text) > 2 and text[0] in BRACKETS and text[-1] in BRACKETS and not any(sign in inner for sign in BRACKETS):
        return [part.strip() for part in inner.split(",")]
    return [text]


def same_element(found: str, expected: str) -> bool:
    if FRACTION.match(found) and FRACTION.match(expected):
        return found == expected
    if (whole_number(without_thousands(found)) is None) != (whole_number(without_thousands(expected)) is None):
        return False
    difference = f"({expected})-({found})"
    letters = {sign for sign in difference.replace("sqrt", "").replace("frac", "") if sign.isalpha()}
    if len(letters) > 2 or TOWERS.search(difference):
        return False
    return algebra.equal(found.replace("^", "**"), expected.replace("^", "**"))
