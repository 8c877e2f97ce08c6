"""Answers to MATH problems: in a box, after 'Answer:', or as the library math-verify parses them."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache, partial
from typing import Any

from hpcrl.rewards.registry import as_text, as_text_or_number, reads
from hpcrl.rewards.scorers import limits

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


@reads(as_text)
def math_boxed(data_source: str, solution_str: str, ground_truth: str, **_: Any) -> float:
    """1 or 0.

    verl's `reward_score/math_reward.py` (Hendrycks et al. 2021, "Measuring Mathematical Problem Solving With the MATH
    Dataset", the released `math_equivalence`), quirks included: see `boxed_answer` and `math_spelling`.
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
    return last_box(text[max(text.rfind(r"\boxed"), 0) :])


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
    """Equal after `math_spelling`; where that cannot treat one of the two, equal as they are."""
    try:
        return math_spelling(answer) == math_spelling(truth)
    except UnusualSpelling:
        return answer == truth


def math_spelling(text: str, *, drop_percent: bool = False) -> str:
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


LAST_CHARACTERS = 300
LAST_CHARACTERS_OF_A_BOX = 100
NO_ANSWER = "[INVALID]"
ANSWER = re.compile(r"(?i)Answer\s*:\s*([^\n]+)")

# Lewkowycz et al. 2022, "Solving Quantitative Reasoning Problems with Language Models", appendix D.1: what is replaced,
# then what is taken away, in this order.
REPLACED = (
    ("an ", ""),
    ("a ", ""),
    (".$", "$"),
    (r"\$", ""),
    ("\\ ", ""),
    (" ", ""),
    ("mbox", "text"),
    (r",\text{and}", ","),
    (r"\text{and}", ","),
    (r"\text{m}", r"\text{}"),
)
REMOVED = (
    *"square ways integers dollars mph inches hours km units".split(),
    r"\ldots",
    *"sue points feet minutes digits cents degrees cm gm pounds meters meals edges students".split(),
    *"childrentickets multiples".split(),
    r"\text{s}",
    r"\text{.}",
    "\\text{\ns}",
    r"\text{}^2",
    r"\text{}^3",
    "\\text{\n}",
    r"\text{}",
    r"\mathrm{th}",
    r"^\circ",
    r"^{\circ}",
    r"\;",
    r",\!",
    "{,}",
    '"',
    r"\dots",
)
IN_DOLLARS = re.compile(r".*?\$(.*?)\$.*")
WRAPPERS = tuple(re.compile(rf"\\{name}\{{(.*?)\}}") for name in ("text", "textbf", "overline"))
BOX = re.compile(r"\\boxed\{(.*)\}")
MINERVA_FRACTION = re.compile(r"frac([^{])(.)")
MINERVA_ROOT = re.compile(r"sqrt([^{])")


@reads(as_text)
def math_dapo(
    data_source: str, solution_str: str, ground_truth: str, *, strict_box_verify: bool = False, **_: Any
) -> dict[str, float | str | bool | None]:
    r"""`score` 1 or -1, `acc` whether it is right, `pred` the answer that was found.

    verl's `reward_score/math_dapo.py` (Yu et al. 2025, "DAPO"; Lewkowycz et al. 2022 for the normalisation), quirks
    included: only the last 300 characters count, the last 100 for a box; an `Answer:` is compared normalised, and a
    box, which is looked at where there is no `Answer:`, as it is; `pred` is "[INVALID]" where there is neither, and
    None where `strict_box_verify`, which looks at boxes only, finds none.
    """
    text = solution_str[-LAST_CHARACTERS:]
    boxed = last_box(text[-LAST_CHARACTERS_OF_A_BOX:])
    if strict_box_verify:
        return result(boxed == ground_truth, boxed)
    answers = ANSWER.findall(text)
    answer = minerva_form(answers[-1]) if answers else NO_ANSWER
    if answer == NO_ANSWER and boxed is not None:
        return result(boxed == ground_truth, boxed)
    return result(answer == minerva_form(ground_truth), answer)


def result(right: bool, pred: str | None) -> dict[str, float | str | bool | None]:
    return {"score": 1.0 if right else -1.0, "acc": right, "pred": pred}


def last_box(text: str) -> str | None:
    start = text.rfind(r"\boxed{")
    end = closing_brace(text, start) if start >= 0 else -1
    return text[start + len(r"\boxed{") : end] if end >= 0 else None


def minerva_form(answer: str) -> str:
    """One spelling of an answer: the right side of its last equation, without units, articles, spaces and markup."""
    answer = answer.split("=")[-1]
    for before, after in REPLACED:
        answer = answer.replace(before, after)
    for expression in REMOVED:
        answer = answer.replace(expression, "")
    answer = IN_DOLLARS.sub(r"$\1$", answer)
    for wrapper in (*WRAPPERS, BOX):
        answer = wrapper.sub(r"\1", answer)
    answer = MINERVA_FRACTION.sub(r"frac{\1}{\2}", answer)
    answer = MINERVA_ROOT.sub(r"sqrt{\1}", answer).replace("$", "")
    without_commas = answer.replace(",", "")
    return (without_commas if without_commas.isdigit() else answer).strip()


# Of one answer that math-verify parses. Its parser takes seconds for brackets in brackets, and Python minutes and
# gigabytes for 9^{9^9}.
MAX_LENGTH = 1000
MAX_DEPTH = 32
MAX_BITS = 2.0**22
MAX_RUN = 10_000  # characters of a response that look like one number or sum; the library takes 1 KB for each
RUN = re.compile(r"[\d.\s+\-*×/^()÷]+")
SECONDS = 1.0  # CPU time of one response


@reads(as_text_or_number)
def math_verify(data_source: str, solution_str: str, ground_truth: str, **_: Any) -> float | dict[str, Any]:
    """1 if one of the answers that the library finds equals the ground truth, else 0.

    verl's `reward_score/math_verify.py`: the ground truth is read as LaTeX in a box, the response as LaTeX or as a
    plain expression. An answer beyond the limits above is wrong. The limit of CPU time, which replaces the library's
    5 s of the clock, needs the main thread of a process; what it cannot stop, the scoring process's own limit does.
    """
    verify, parse, expression, latex = library()
    box = last_box(solution_str)
    try:
        if (box is not None and limits.is_over(box, MAX_LENGTH, MAX_DEPTH)) or has_long_run(solution_str):
            return limits.stopped("over_limits")
        with limits.cpu_seconds(SECONDS):
            golden = parse(rf"\boxed{{{ground_truth}}}", (latex(),))
            answers = parse(solution_str, (expression(), latex()))
            return float(any(verify(truth, answer) for answer in answers for truth in golden))
    except limits.OverLimits:
        return limits.stopped("over_limits")
    except limits.OutOfTime:
        return limits.stopped("timeouts")


def has_long_run(text: str) -> bool:
    """Whether a part that looks like one number or sum has MAX_RUN characters; half of them may be enough."""
    step = MAX_RUN // 2
    return any(RUN.fullmatch(text, place, place + step) for place in range(0, len(text) - step + 1, step))


@cache
def library() -> tuple[Callable[..., Any], ...]:
    """`verify`, `parse` and the kinds of answers of math-verify, which parses no answer beyond the limits."""
    from math_verify import grader, parser

    def limited(parse: Callable[[str], Any]) -> Callable[[str], Any]:
        def within_limits(text: str) -> Any:
            limits.check(text, MAX_LENGTH, MAX_DEPTH, MAX_BITS)
            return parse(text)

        return within_limits

    parser.parse_latex_cached = limited(parser.parse_latex_cached)
    parser.parse_expr_cached = limited(parser.parse_expr_cached)
    parser.TIMEOUT_WARNING_SHOWN = grader.TIMEOUT_WARNING_SHOWN = True  # each says that it has no limit of its own
    verify, parse = partial(grader.verify, timeout_seconds=None), partial(parser.parse, parsing_timeout=None)
    return verify, parse, parser.ExprExtractionConfig, parser.LatexExtractionConfig
