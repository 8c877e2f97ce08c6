"""The built-in rule for each `data_source`, and what rules accept as a ground truth.

Each rule declares beside its scorer what it accepts, and one of the functions here reads it.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from difflib import get_close_matches
from fnmatch import fnmatchcase
from functools import cache, wraps
from importlib.util import find_spec
from typing import Any, TypeAlias, TypeVar

from hpcrl.runtime.exits import InputError

Score = TypeVar("Score")
Reader = Callable[[Any], Any]  # returns what the scorer gets; ValueError says what it expects


def reads(reader: Reader) -> Callable[[Callable[..., Score]], Callable[..., Score]]:
    """Give the decorated scorer what `reader` returns for its ground truth, and keep it as the attribute `reader`."""

    def decorate(scorer: Callable[..., Score]) -> Callable[..., Score]:
        @wraps(scorer)
        def scored(data_source: str, solution_str: str, ground_truth: Any, *args: Any, **options: Any) -> Score:
            return scorer(data_source, solution_str, reader(ground_truth), *args, **options)

        scored.reader = reader  # type: ignore[attr-defined]
        return scored

    return decorate


def as_text(value: Any) -> str:
    """Text, or an integer as text."""
    if is_integer(value):
        return str(value)
    if not isinstance(value, str):
        raise ValueError("expected text, or an integer")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ValueError("it has half of a surrogate pair; expected Unicode text") from None
    return value


def as_text_or_number(value: Any) -> str:
    """Text, or a number as text."""
    if isinstance(value, float) and math.isfinite(value):
        return str(value)
    try:
        return as_text(value)
    except ValueError:
        raise ValueError("expected text, or a finite number") from None


def as_texts(value: Any) -> list[str]:
    """A text, or several; integers as text."""
    try:
        texts = [as_text(it) for it in (value if isinstance(value, list) else [value])]
    except ValueError:
        texts = []
    if not texts:
        raise ValueError("expected a text, or a list of them that is not empty")
    return texts


def is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def is_whole(value: Any) -> bool:
    """An integer, or a float of the same value, as pandas writes integers beside missing ones."""
    return is_integer(value) or (isinstance(value, float) and value.is_integer())


# With verl's arguments: data_source, solution_str, ground_truth, extra_info; a rule ignores those that it does not use.
# Returns the score, or a dict with `score` and more to log (`acc` is the accuracy).
Scorer: TypeAlias = Callable[..., float | dict[str, Any]]

# Name or pattern of a data source -> function in scorers/; the dispatch of verl's `default_compute_score`, with
# those that it does not dispatch to: countdown, math_verify, sums, the drawn pictures, reasoning_gym, the strict ones.
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
    "reasoning_gym/*": "reasoning_gym.compute_score",
}
# Rule -> the package that it needs, as imported, and the extra that installs it
PACKAGES = {
    "math_answers.math_verify": ("math_verify", "math"),
    "reasoning_gym.compute_score": ("reasoning_gym", "reasoning-gym"),
}


def rule_for(data_source: str) -> tuple[str, str]:
    """(module, function) of the rule for a data source, which is not imported.

    Raises InputError for an unknown data source, and if the rule needs a package that is not installed.
    """
    for pattern, rule in RULES.items():
        if fnmatchcase(data_source, pattern):
            module, _, function = rule.partition(".")
            package, extra = PACKAGES.get(rule, ("hpcrl", ""))
            if find_spec(package) is None:
                raise InputError(
                    f"data_source {data_source!r} needs the package {package.replace('_', '-')}, which is not "
                    f"installed; pip install 'hpcrl[{extra}]'"
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
