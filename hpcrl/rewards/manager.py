"""Scores of finished responses: built-in rules in this process, a custom function in processes of its own."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from hpcrl.launch.exits import InputError
from hpcrl.rewards.pool import Outcome, ScorePool, warn_of_failures
from hpcrl.rewards.registry import scorer_for
from hpcrl.rewards.score_worker import describe, plain

if TYPE_CHECKING:
    from hpcrl.config.schema import RewardConfig

FATES = ("timeouts", "crashes", "errors")


@dataclass(frozen=True)
class ScoreRequest:
    """One response; `finish_reason` is "stop" when its end-of-sequence token ended it, "length" when it was cut off."""

    data_source: str
    solution_str: str
    ground_truth: Any
    extra_info: dict[str, Any] | None = None
    finish_reason: str = "stop"


class RewardManager:
    """Scores by `data_source`, or all by reward.custom_reward_function when that names a file.

    A scorer gets verl's arguments; `extra_info` has `finish_reason` added.
    """

    def __init__(self, cfg: RewardConfig) -> None:
        self._cfg = cfg
        self._pool: ScorePool | None = None
        custom = cfg.custom_reward_function
        if custom.path is not None:
            path, name = custom_function(cfg)
            self._pool = ScorePool(path, name, custom.reward_kwargs, cfg.num_workers, cfg.timeout)

    def score(self, items: Sequence[ScoreRequest]) -> tuple[np.ndarray, dict[str, np.ndarray], dict[str, float]]:
        """Returns (scores, extras, counts), rows in the order of `items`.

        scores: float32 (N,), 0 where scoring failed. extras: what else the scorer returned, each (N,): float32 with
        NaN where missing, or an object array of strings where any value is text. counts: how many scores failed,
        `reward/timeouts`, `reward/crashes`, `reward/errors`.
        """
        requests = [
            {
                "data_source": item.data_source,
                "solution_str": item.solution_str,
                "ground_truth": item.ground_truth,
                "extra_info": {**(item.extra_info or {}), "finish_reason": item.finish_reason},
            }
            for item in items
        ]
        if self._pool is not None:
            outcomes = self._pool.score(requests)
        else:
            outcomes = [self._by_rule(request) for request in requests]
        warn_of_failures(outcomes)
        scores = np.array([outcome.result.get("score", 0.0) for outcome in outcomes], dtype=np.float32)
        counts = {f"reward/{fate}": float(sum(outcome.fate == fate for outcome in outcomes)) for fate in FATES}
        return scores, extra_columns([outcome.result for outcome in outcomes]), counts

    def close(self) -> None:
        """Ends the scoring processes. Harmless when called twice."""
        if self._pool is not None:
            self._pool.close()

    def _by_rule(self, request: dict[str, Any]) -> Outcome:
        scorer = scorer_for(request["data_source"])
        try:
            return Outcome("ok", plain(scorer(**request, format_score=self._cfg.format_score)))
        except Exception as error:  # a row whose ground truth is not what the rule expects
            return Outcome("errors", {}, f"rule for {request['data_source']}: {describe(error)}")


def check_rewards(cfg: RewardConfig, data_sources: Iterable[str]) -> None:
    """Refuses, at the start of a run, a custom function's file that is not there, or data sources that nothing scores
    (InputError)."""
    if cfg.custom_reward_function.path is not None:
        custom_function(cfg)
        return
    for data_source in sorted(set(data_sources)):
        scorer_for(data_source)


def custom_function(cfg: RewardConfig) -> tuple[str, str]:
    """(file, function) of the configured custom function; InputError where there is no such file."""
    path, name = split_path(cfg.custom_reward_function.path or "", cfg.custom_reward_function.name)
    if not os.path.isfile(path):
        raise InputError(
            f"reward.custom_reward_function.path={path}: no such file; expected a Python file with a function {name!r}"
        )
    return path, name


def split_path(path: str, name: str) -> tuple[str, str]:
    """(file, function) of `file.py:function`, or of a file and the function named apart."""
    short = re.fullmatch(r"(.+\.py):(\w+)", path)
    return (short[1], short[2]) if short else (path, name)


def extra_columns(results: list[dict[str, float | str]]) -> dict[str, np.ndarray]:
    """All keys but `score` as columns over all results."""
    names = sorted({name for result in results for name in result} - {"score"})
    columns: dict[str, np.ndarray] = {}
    for name in names:
        values = [result.get(name) for result in results]
        if any(isinstance(value, str) for value in values):
            columns[name] = np.array(["" if value is None else str(value) for value in values], dtype=object)
        else:
            columns[name] = np.array([np.nan if value is None else value for value in values], dtype=np.float32)
    return columns
