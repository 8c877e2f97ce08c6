"""The built-in rule for each `data_source`."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from difflib import get_close_matches
from fnmatch import fnmatchcase
from functools import cache
from importlib.util import find_spec
from typing import Any, TypeAlias

from hpcrl.runtime.exits import InputError

# With verl's arguments: data_source, solution_str, ground_truth, extra_info; a rule ignores those that it does not use.
# Returns the score, or a dict with `score` and more to log (`acc` is the accuracy).
Scorer: TypeAlias = Callable[..., float | dict[str, Any]]

# Name or pattern of a data source -> function in scorers/; the dispatch of verl's `default_compute_score`, with
# those that it does not dispatch to: countdown, math_verify, sums, the drawn pictures, and the strict variants.
RULES = {
    "gsm8k_strict": "strict.gsm8k",
    "math_strict": "strict.boxed",
    "math_dapo_strict": "strict.math_dapo",
    "numina_strict": "strict.boxed",
    "geometry3k_strict": "strict.geometry3k",
    "searchR1_strict": "strict.search_r1",
    "code_strict": "code.compute_score_strict",
    "countdown": "countdown.compute_score",
    "sums": "short_answers.exact",
    "count_squares": "short_answers.exact",
    "left_of": "short_answers.exact",
    "two_digits": "short_answers.exact",
    "maze": "short_answers.exact",
    "openai/gsm8k": "short_answers.gsm8k",
    "lighteval/MATH": "math_answers.math_boxed",
    "DigitalLearningGmbH/MATH-lighteval": "math_answers.math_boxed",
    "HuggingFaceH4/MATH-500": "math_answers.math_boxed",
    "math_dapo": "math_answers.math_dapo",
    "math": "math_answers.math_dapo",
    "math_dapo_reasoning": "math_answers.math_dapo",
    "aime*": "math_answers.math_dapo",
    "numina_*": "numina.compute_score",
    "codecontests": "code.compute_score",
    "apps": "code.compute_score",
    "codeforces": "code.compute_score",
    "taco": "code.compute_score",
    "hiyouga/geometry3k": "grader.geometry3k",
    "searchR1_*": "short_answers.search_r1",
    "math_verify": "math_answers.math_verify",
}


def rule_for(data_source: str) -> tuple[str, str]:
    """(module, function) of the rule for a data source, which is not imported.

    Raises InputError for an unknown data source, and if the rule needs a package that is not installed.
    """
    for pattern, rule in RULES.items():
        if fnmatchcase(data_source, pattern):
            module, _, function = rule.partition(".")
            if function == "math_verify" and find_spec("math_verify") is None:
                raise InputError(
                    f"data_source {data_source!r} needs the package math-verify, which is not installed; "
                    "pip install 'hpcrl[math]'"
                )
            return f"{__package__}.scorers.{module}", function
    near = get_close_matches(data_source, RULES, n=1, cutoff=0.5)
    hint = f" (did you mean {near[0]!r}?)" if near else ""
    raise InputError(
        f"data_source {data_source!r} has no built-in reward rule{hint}; known: {', '.join(sorted(RULES))}; "
        "or name a function of your own in reward.custom_reward_function.path"
    )


@cache
def scorer_for(data_source: str) -> Scorer:
    """The rule for a data source, imported; errors as for `rule_for`."""
    module, function = rule_for(data_source)
    scorer: Scorer = getattr(importlib.import_module(module), function)
    return scorer


def check_ground_truth(data_source: str, ground_truth: Any, where: str) -> None:
    """Raise InputError, with the place, for a ground truth that the rule for the data source cannot use."""
    try:
        scorer_for(data_source).reader(ground_truth)  # type: ignore[attr-defined]
    except ValueError as error:
        found = "absent" if ground_truth is None else f"{str(ground_truth)[:80]!r} ({type(ground_truth).__name__})"
        raise InputError(
            f"{where}: reward_model.ground_truth is {found}, which the rule for data_source {data_source!r} cannot "
            f"use: {error}; change it, or name a function of your own in reward.custom_reward_function.path"
        ) from None
