"""Scores of finished responses, computed in scoring processes, by the manager that the config names."""

from __future__ import annotations

import logging
import os
import re
from collections import defaultdict, deque
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from hpcrl.rewards.registry import rule_for
from hpcrl.rewards.score_worker import Source
from hpcrl.runtime.exits import InputError
from hpcrl.sandbox.process_pool import ProcessPool, RateLimit
from hpcrl.sandbox.worker_process import Outcome

if TYPE_CHECKING:
    from hpcrl.config.schema import RewardConfig


def overlong_reward(response_length: int, max_resp_len: int, buffer_len: int, penalty_factor: float) -> float:
    """What is added to the score, <= 0; lengths in tokens, tool tokens and the end-of-sequence token included.

    0 up to max_resp_len - buffer_len tokens, then linear down to -penalty_factor at max_resp_len. As in verl, and
    unlike the paper, it goes on falling beyond max_resp_len.
    """
    exceeded = response_length - (max_resp_len - buffer_len)
    return min(-exceeded / buffer_len * penalty_factor, 0.0)


def numbers_of(
    samples: Mapping[str, np.ndarray], key: str, setting: str, missing: float = 0.0, required: bool = True
) -> np.ndarray:
    """float64 (N,): `score`, or what the scorer returned under `key`; `missing` where a sample has no such number, for
    example because its scoring failed.

    InputError where no sample has one and that is `required`; `setting` is what names the key in the template.
    """
    if key == "score":
        return samples["score"].astype(np.float64)
    extras = samples["extras"].tolist()
    found = [extra.get(key) for extra in extras]
    is_number = [isinstance(value, (int, float)) and value == value for value in found]
    if required and not any(is_number):
        seen = sorted({name for extra in extras for name in extra})
        raise InputError(
            f"{setting} names {key!r}, and no sample has a number of that name; the scorer returns "
            f"{', '.join(['score', *seen])}"
        )
    return np.array([value if number else missing for value, number in zip(found, is_number, strict=True)], np.float64)


log = logging.getLogger(__name__)

FATES = ("timeouts", "crashes", "errors")
WARNINGS = 3  # lines per batch that say why scores failed


@dataclass(frozen=True)
class ScoreRequest:
    """A response to score.

    finish_reason: "stop" if it ended with the end-of-sequence token, "length" if it was truncated. response_length: in
    tokens; only the dapo manager reads it.
    """

    data_source: str
    solution_str: str
    ground_truth: Any
    extra_info: dict[str, Any] | None = None
    finish_reason: str = "stop"
    response_length: int = 0


class RewardManager:
    """Scores by the rule for each `data_source`, or by reward.custom_reward_function if that names a file.

    A scorer gets verl's arguments, with `finish_reason` added to `extra_info`. reward.reward_manager.name is one of:

    naive: one call per response.
    gdpo: the same; every component that the scorer returns stays in the extras, where the gdpo estimator finds it.
    dapo: the same, then `overlong_reward` is added.
    batch: one call of a custom function for all responses of a collect: (data_sources, solution_strs, ground_truths,
        extra_infos), lists, to a list of results. When that call fails, all of them have failed.
    rate_limited: as naive, at most max_concurrent at once and max_rpm requests and max_tpm tokens a minute, timeout
        reward_kwargs.timeout. Calls of a coroutine function share a process; others have num_workers processes.
    """

    def __init__(self, cfg: RewardConfig, max_response_length: int | None = None, log_path: str | None = None) -> None:
        """`max_response_length`: tokens, the default of reward_kwargs.max_resp_len. `log_path`: file for what scorers
        print; None drops it."""
        self._cfg = cfg
        self._max_resp_len = cfg.reward_kwargs.max_resp_len or max_response_length
        check_manager(cfg, self._max_resp_len)
        self._batched = cfg.reward_manager.name == "batch"
        self._requests: defaultdict[Hashable, deque[tuple[ScoreRequest, int | None]]] = defaultdict(deque)
        limited = cfg.reward_manager.name == "rate_limited"
        kwargs = cfg.reward_kwargs
        self._pool = ProcessPool(
            source_of(cfg),
            cfg.num_workers,
            kwargs.timeout if limited else cfg.timeout,
            memory_limit_mb=cfg.memory_limit_mb,
            limit=RateLimit.per_minute(
                kwargs.max_concurrent, kwargs.max_rpm, kwargs.max_tpm, kwargs.estimated_tokens_per_request
            )
            if limited
            else None,
            log_path=log_path,
        )

    def submit(self, key: Hashable, request: ScoreRequest) -> None:
        """Start scoring a response. Does not wait. A key may be submitted several times and collected as often."""
        number = None if self._batched else self._pool.submit(_arguments(request))
        self._requests[key].append((request, number))

    def submitted(self, key: Hashable) -> int:
        """How many scores of this key can still be collected."""
        return len(self._requests[key]) if key in self._requests else 0

    def is_ready(self, key: Hashable) -> bool:
        """Whether `collect` would not wait for this key.

        Always true for the batch manager, which scores in `collect`.
        """
        return all(number is None or self._pool.has(number) for _, number in self._requests[key])

    def pump(self) -> None:
        """Send queued responses to free processes. Does not wait."""
        self._pool.pump()

    def collect(self, keys: Iterable[Hashable]) -> tuple[np.ndarray, list[dict[str, float | str]], dict[str, float]]:
        """Wait for the scores of submitted responses; returns (scores, extras, counts) in the order of `keys`.

        scores: float32 (N,), 0 if scoring failed. extras: other values that the scorer returned, {} if it failed.
        counts: number of failed scores, `reward/timeouts`, `reward/crashes`, `reward/errors`.
        """
        found = [self._take(key) for key in keys]
        requests = [request for request, _ in found]
        if self._batched:
            outcomes = self._score_batch(requests)
        else:
            outcomes = [self._pool.take(number) for _, number in found if number is not None]
        _warn_of_failures(outcomes)
        results: list[dict[str, Any]] = [
            outcome.result if outcome.fate == "ok" else {"score": 0.0} for outcome in outcomes
        ]
        if self._cfg.reward_manager.name == "dapo" and self._cfg.reward_kwargs.overlong_buffer_cfg.enable:
            for outcome, request, result in zip(outcomes, requests, results, strict=True):
                if outcome.fate == "ok":
                    self._shape(result, request.response_length)
        scores = np.array([result.pop("score") for result in results], dtype=np.float32)
        counts = {f"reward/{fate}": float(sum(outcome.fate == fate for outcome in outcomes)) for fate in FATES}
        return scores, results, counts

    def score(self, items: Sequence[ScoreRequest]) -> tuple[np.ndarray, list[dict[str, float | str]], dict[str, float]]:
        """Submit and collect."""
        keys = [object() for _ in items]
        for key, item in zip(keys, items, strict=True):
            self.submit(key, item)
        return self.collect(keys)

    def close(self) -> None:
        """Kill the scoring processes. May be called twice."""
        self._pool.close()

    def _take(self, key: Hashable) -> tuple[ScoreRequest, int | None]:
        waiting = self._requests[key]
        found = waiting.popleft()
        if not waiting:
            del self._requests[key]
        return found

    def _score_batch(self, requests: list[ScoreRequest]) -> list[Outcome]:
        if not requests:
            return []
        each = [_arguments(request) for request in requests]
        lists = {f"{name}s": [arguments[name] for arguments in each] for name in each[0]}
        whole = self._pool.take(self._pool.submit(lists, weight=len(requests)))
        return whole.result if whole.fate == "ok" else [whole] * len(requests)

    def _shape(self, result: dict[str, Any], response_length: int) -> None:
        overlong = self._cfg.reward_kwargs.overlong_buffer_cfg
        assert self._max_resp_len is not None
        added = overlong_reward(response_length, self._max_resp_len, overlong.len, overlong.penalty_factor)
        result["score"] += added
        if overlong.log:
            result |= {"overlong_reward": added, "overlong": float(added < 0)}


def asks_rules(cfg: RewardConfig) -> bool:
    """Whether the score uses rules or a custom function; otherwise it is the reward model's only."""
    return not cfg.reward_model.enable or cfg.reward_model.rule_weight != 0


def check_rewards(cfg: RewardConfig, data_sources: Iterable[str]) -> None:
    """Check the rewards at the start of a run.

    Raises InputError if the custom function's file does not exist, or if a data source has no rule.
    """
    if not asks_rules(cfg):
        return
    if cfg.custom_reward_function.path is not None:
        custom_function(cfg)
        return
    for data_source in sorted(set(data_sources)):
        rule_for(data_source)


def check_manager(cfg: RewardConfig, max_resp_len: int | None) -> None:
    """Raise InputError for settings of the manager that exclude each other."""
    if cfg.reward_manager.name == "batch" and cfg.custom_reward_function.path is None:
        raise InputError(
            "reward.reward_manager.name=batch, and the built-in rules score one response at a time; use naive, or name "
            "a function of lists in reward.custom_reward_function.path"
        )
    overlong = cfg.reward_kwargs.overlong_buffer_cfg
    if cfg.reward_manager.name != "dapo" or not overlong.enable:
        return
    if max_resp_len is None or not 0 < overlong.len <= max_resp_len:
        raise InputError(
            f"reward.reward_kwargs: overlong_buffer_cfg.len={overlong.len} with max_resp_len={max_resp_len}; expected "
            "1 to max_resp_len tokens, or overlong_buffer_cfg.enable=false"
        )


def source_of(cfg: RewardConfig) -> Source:
    """The source that the scoring processes load."""
    custom, name = cfg.custom_reward_function, cfg.reward_manager.name
    if custom.path is None:
        return Source(kwargs={} if cfg.format_score is None else {"format_score": cfg.format_score})
    path, function = custom_function(cfg)
    return Source(
        os.path.abspath(path),
        function,
        custom.reward_kwargs,
        batched=name == "batch",
        at_once=cfg.reward_kwargs.max_concurrent if name == "rate_limited" else None,
        timeout=cfg.reward_kwargs.timeout,
    )


def custom_function(cfg: RewardConfig) -> tuple[str, str]:
    """(file, function) of the configured custom function. Raises InputError if there is no such file."""
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


def _warn_of_failures(outcomes: Sequence[Outcome]) -> None:
    """Log why scores failed, a few lines for each batch."""
    failed = [outcome for outcome in outcomes if outcome.fate != "ok"]
    for outcome in failed[:WARNINGS]:
        log.warning("reward: a response scored 0 (%s): %s", outcome.fate, outcome.why)
    if len(failed) > WARNINGS:
        log.warning("reward: %d more responses scored 0", len(failed) - WARNINGS)


def _arguments(request: ScoreRequest) -> dict[str, Any]:
    """The keyword arguments of a scorer."""
    return {
        "data_source": request.data_source,
        "solution_str": request.solution_str,
        "ground_truth": request.ground_truth,
        "extra_info": {**(request.extra_info or {}), "finish_reason": request.finish_reason},
    }
