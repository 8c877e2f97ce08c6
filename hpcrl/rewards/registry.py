"""Which built-in rule scores which `data_source`."""

from __future__ import annotations

from typing import Any, Protocol

from hpcrl.launch.exits import InputError
from hpcrl.rewards import countdown


class Scorer(Protocol):
    """verl's signature; returns the score, or a dict with `score` and more to log (`acc` is the accuracy)."""

    def __call__(
        self,
        data_source: str,
        solution_str: str,
        ground_truth: Any,
        extra_info: dict[str, Any] | None = None,
        *,
        format_score: float,
    ) -> float | dict[str, float]: ...


SCORERS: dict[str, Scorer] = {"countdown": countdown.compute_score}


def scorer_for(data_source: str) -> Scorer:
    """The rule for a data source; an unknown one is an input error."""
    if data_source not in SCORERS:
        raise InputError(
            f"data_source {data_source!r} has no built-in reward rule; known: {', '.join(sorted(SCORERS))}; "
            "or name a function of your own in reward.custom_reward_function.path"
        )
    return SCORERS[data_source]
