r"""MATH: the last \boxed answer equals the ground truth after both have been brought to one spelling."""

from __future__ import annotations

import re
from typing import Any

# What two spellings of one answer differ in, in the order in which it is taken away.
SPELLINGS = (
    ("\n", ""),
    (r"\!", ""),
    ("\\\\", "\\"),
    ("tfrac", "frac"),
    ("dfrac", "frac"),
    (r"\left", ""),
    (r"\right", ""),
    (r"^{\circ}", ""),
    (r"^\circ", ""),
    (r"\$", ""),
)
UNIT = r"\text{ "
BARE_FRACTION = re.compile(r"(0|-?[1-9][0-9]*)/(0|-?[1-9][0-9]*)")
ROOT_OF_NOTHING = re.compile(r"\\sqrt(?:\\sqrt|\Z)")
BARE_ROOT = re.compile(r"\\sqrt([^{])")


class UnusualSpelling(ValueError):
    """The rules do not apply to this text."""


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any] | None = None, **_: Any
) -> float:
    """1 or 0.

    verl's `reward_score/math_reward.py` (Hendrycks et al. 2021, "Measuring Mathematical Problem Solving With the MATH
    Dataset", the released `math_equivalence`), quirks included: see `boxed_answer` and `normalised`.
    """
    answer = boxed_answer(solution_str)
    return float(answer is not None and same(answer, ground_truth))


def boxed_answer(text: str) -> str | None:
    r"""What the last `\boxed{...}` holds, or what follows the last `\boxed ` up to the next dollar sign.

    Quirks of verl: one `\boxed ` with a space anywhere wins over all with braces; `\fbox` is never an answer; a last
    `\boxed` that is not closed, or has no brace at once, is none, whatever stands before it.
    """
    if r"\boxed " in text:
        return text.rpartition(r"\boxed ")[2].partition("$")[0]
    start = text.rfind(r"\boxed")
    end = closing_brace(text, start) if start >= 0 else -1
    if end < 0 or not text.startswith(r"\boxed{", start):
        return None
    return text[start + len(r"\boxed{") : end]


def closing_brace(text: str, start: int) -> int:
    """The place of the brace that closes the first one after `start`; -1 where there is none."""
    depth = 0
    for place in range(start, len(text)):
        if text[place] == "{":
            depth += 1
        elif text[place] == "}":
            depth -= 1
            if depth == 0:
                return place
    return -1


def same(answer: str, truth: str) -> bool:
    """Equal after `normalised`; where that cannot treat one of the two, equal as they are."""
    try:
        return normalised(answer) == normalised(truth)
    except UnusualSpelling:
        return answer == truth


def normalised(text: str, *, drop_percent: bool = False) -> str:
    r"""One spelling of an answer: no layout commands, units, degrees, percent, spaces or short `k=`; braces around what
    `\frac` and `\sqrt` take; a leading zero; `a/b` of whole numbers, and 0.5, as `\frac`.

    `drop_percent` drops a percent sign without backslash too, as mathruler does and verl does not. Raises
    UnusualSpelling for two units, and for `\frac` or `\sqrt` of nothing. Quirks: 0.5 is the only decimal that equals a
    fraction; `\frac{1}2` keeps its form; values are not compared.
    """
    for before, after in SPELLINGS:
        text = text.replace(before, after)
    if text.count(UNIT) > 1:
        raise UnusualSpelling(text)
    text = text.partition(UNIT)[0].replace(r"\%", "")
    if drop_percent:
        text = text.replace("%", "")
    text = text.replace(" .", " 0.").replace("{.", "{0.")
    if text.startswith("."):
        text = "0" + text
    name, equals, value = text.partition("=")
    if equals and "=" not in value and len(name) <= 2:
        text = value
    if ROOT_OF_NOTHING.search(text):
        raise UnusualSpelling(text)
    text = braced_fractions(BARE_ROOT.sub(r"\\sqrt{\1}", text).replace(" ", ""))
    if text == "0.5":
        return r"\frac{1}{2}"
    bare = BARE_FRACTION.fullmatch(text)
    return rf"\frac{{{bare[1]}}}{{{bare[2]}}}" if bare else text


def braced_fractions(text: str) -> str:
    r"""`\frac12` and `\frac1{2}` with both braces; unchanged where one `\frac` has a single character after it."""
    head, *pieces = text.split(r"\frac")
    braced = [head]
    for piece in pieces:
        if not piece:
            raise UnusualSpelling(text)
        if piece[0] != "{":
            if len(piece) == 1:
                return text
            denominator = "{" if piece[1] == "{" else f"{{{piece[1]}}}"
            piece = f"{{{piece[0]}}}{denominator}{piece[2:]}"
        braced.append(piece)
    return r"\frac".join(braced)
