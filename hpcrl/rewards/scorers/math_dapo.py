r"""DAPO's mathematics: the last `Answer: ...`, or else a box, against the ground truth; 1 or -1."""

from __future__ import annotations

import re
from typing import Any

from hpcrl.rewards.scorers.math_boxed import closing_brace

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
BARE_FRACTION = re.compile(r"frac([^{])(.)")
BARE_ROOT = re.compile(r"sqrt([^{])")


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: str,
    extra_info: dict[str, Any] | None = None,
    *,
    strict_box_verify: bool = False,
    **_: Any,
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
    found = normalised(answers[-1]) if answers else NO_ANSWER
    if found == NO_ANSWER and boxed is not None:
        return result(boxed == ground_truth, boxed)
    return result(found == normalised(ground_truth), found)


def result(right: bool, pred: str | None) -> dict[str, float | str | bool | None]:
    return {"score": 1.0 if right else -1.0, "acc": right, "pred": pred}


def last_box(text: str) -> str | None:
    start = text.rfind(r"\boxed{")
    end = closing_brace(text, start) if start >= 0 else -1
    return text[start + len(r"\boxed{") : end] if end >= 0 else None


def normalised(answer: str) -> str:
    """One spelling of an answer: the right side of its last equation, without units, articles, spaces and markup."""
    answer = answer.split("=")[-1]
    for before, after in REPLACED:
        answer = answer.replace(before, after)
    for expression in REMOVED:
        answer = answer.replace(expression, "")
    answer = IN_DOLLARS.sub(r"$\1$", answer)
    for wrapper in (*WRAPPERS, BOX):
        answer = wrapper.sub(r"\1", answer)
    answer = BARE_FRACTION.sub(r"frac{\1}{\2}", answer)
    answer = BARE_ROOT.sub(r"sqrt{\1}", answer).replace("$", "")
    without_commas = answer.replace(",", "")
    return (without_commas if without_commas.isdigit() else answer).strip()
