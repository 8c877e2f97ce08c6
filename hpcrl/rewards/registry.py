"""Which built-in rule scores which `data_source`."""

from __future__ import annotations

import importlib
from difflib import get_close_matches
from fnmatch import fnmatchcase
from functools import cache
from importlib.util import find_spec
from typing import Any, Protocol

from hpcrl.runtime.exits import InputError

FUNCTION = "compute_score"


class Scorer(Protocol):
    """verl's signature; returns the score, or a dict with `score` and more to log (`acc` is the accuracy).

    What a rule does not know among the further arguments, it ignores.
    """

    def __call__(
        self,
        data_source: str,
        solution_str: str,
        ground_truth: Any,
        extra_info: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> float | dict[str, Any]: ...


# Name or pattern of a data source -> module in scorers/; the dispatch of verl's `default_compute_score`, with
# countdown and math_verify, which it does not dispatch to.
RULES = {
    "countdown": "countdown",
    "openai/gsm8k": "gsm8k",
    "lighteval/MATH": "math_boxed",
    "DigitalLearningGmbH/MATH-lighteval": "math_boxed",
    "HuggingFaceH4/MATH-500": "math_boxed",
    "math_dapo": "math_dapo",
    "math": "math_dapo",
    "math_dapo_reasoning": "math_dapo",
    "aime*": "math_dapo",
    "numina_*": "numina",
    "codecontests": "code",
    "apps": "code",
    "codeforces": "code",
    "taco": "code",
    "hiyouga/geometry3k": "geometry3k",
    "searchR1_*": "search_r1",
    "math_verify": "math_verify",
}


def rule_for(data_source: str) -> tuple[str, str]:
    """(module, function) of the rule for a data source, which is not imported.

    InputError for an unknown one, and for one whose package is not installed.
    """
    for pattern, module in RULES.items():
        if fnmatchcase(data_source, pattern):
            if module == "math_verify" and find_spec("math_verify") is None:
                raise InputError(
                    f"data_source {data_source!r} needs the package math-verify, which is not installed; "
                    "pip install 'hpcrl[math]'"
                )
            return f"{__package__}.scorers.{module}", FUNCTION
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
