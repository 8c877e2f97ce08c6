"""Scores of finished responses, computed in scoring processes, by the reward manager that the config names."""

from __future__ import annotations

import logging
import os
import re
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple, TypeVar

from hpcrl.algorithms.parameters import NoParameters, Registry, np, param, parameters_of
from hpcrl.rewards.registry import rule_for
from hpcrl.rewards.score_worker import Source
from hpcrl.rewards.scorers.limits import STOPPED
from hpcrl.runtime.exits import InputError
from hpcrl.runtime.spans import spans
from hpcrl.sandbox.isolation import probe_in_child
from hpcrl.sandbox.process_pool import ProcessPool, RateLimit, TimeBudget
from hpcrl.sandbox.worker import Outcome

log = logging.getLogger(__name__)

FATES = ("timeouts", "crashes", "errors")
COUNTS = (*FATES, "over_limits")
WARNINGS = 3  # lines per batch that say why scores failed


@dataclass(frozen=True)
class CustomReward:
    path: str | None = param(None, help="Python file of a reward function of your own; null: by data_source")
    name: str = param("compute_score", help="function in that file")
    reward_kwargs: dict[str, str | int | float | bool] = param({}, help="extra arguments of the function")


@dataclass(frozen=True)
class Scoring:
    """Keys of `reward` that every manager reads."""

    custom_reward_function: CustomReward = param(CustomReward(), help="reward function of your own")
    memory_limit_mb: int | None = param(4096, gt=0, help="address space of a scoring process; null: any")
    num_workers: int = param(1, gt=0, help="scoring processes per rollout leader")
    timeout: float = param(10.0, gt=0, help="seconds for one score; then it is 0 and counted")
    batch_timeout: float | None = param(
        None,
        gt=0,
        help="seconds for all scores that a leader waits for; those that are too slow for it are 0 and counted; null: "
        "600, or a quarter of the seconds that they take if each of them times out",
    )
    format_score: float | None = param(
        None, help="score of an answer of the right form with the wrong value; null: the rule's own"
    )
    sandbox: Literal["required", "best_effort"] = param(
        "required",
        help="for code rewards, which run programs of the model: required: the job does not start where the kernel "
        "cannot isolate them; best_effort: there they run with limits of time and memory only",
    )


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


class Scores(NamedTuple):
    """The scores of some responses.

    score: float32 (N,), 0 if scoring failed. acc: float32 (N,), the scorer's `acc`, else its score; NaN if scoring
    failed. extras: other values that the scorer returned, `acc` too, {} if it failed. counts: number of failed scores,
    `reward/timeouts`, `reward/crashes`, `reward/errors`, and of answers that are wrong because they are beyond the
    limits of a built-in rule, `reward/over_limits`.
    """

    score: np.ndarray
    acc: np.ndarray
    extras: list[dict[str, float | str]]
    counts: dict[str, float]


class RewardManagerEntry(NamedTuple):
    name: str
    function: type[RewardManager]
    params: type


REWARD_MANAGERS: Registry[RewardManagerEntry] = Registry("reward.reward_manager.name", __name__)
M = TypeVar("M", bound="type[RewardManager]")


def register_reward_manager(*names: str, params: type = NoParameters) -> Callable[[M], M]:
    """Make `reward.reward_manager.name=<name>` use the decorated class.

    Args:
        params: a frozen dataclass (see `hpcrl.algorithms.parameters`). Its keys are `reward.<name>.<field>`.
    """

    def register(manager: M) -> M:
        parameters_of(params)
        for name in names:
            REWARD_MANAGERS.add(name, RewardManagerEntry(name, manager, params))
        return manager

    return register


@register_reward_manager("naive", "gdpo")
class RewardManager:
    """Scores by the rule for each `data_source`, or by reward.custom_reward_function if that names a file.

    A scorer gets verl's arguments, with `finish_reason` added to `extra_info`, and is called once per response. All
    values that it returns stay in the extras, where the gdpo estimator finds its components. A manager of your own
    extends this class; `shape` is what it usually changes.
    """

    is_batched: ClassVar[bool] = False  # one call of the scorer for all responses of a `collect`

    def __init__(
        self, cfg: Scoring, params: Any = None, max_response_length: int | None = None, log_path: str | None = None
    ) -> None:
        """Make the pool of scorers.

        Args:
            params: an instance of the manager's parameter dataclass.
            max_response_length: tokens of a response at most.
            log_path: file for what scorers print; None drops it.
        """
        self.params = params
        self._has_rules = cfg.custom_reward_function.path is None
        self._returns: defaultdict[str, set[bool]] = defaultdict(set)  # data source -> whether results have an acc
        self._requests: defaultdict[Hashable, deque[tuple[ScoreRequest, int | None]]] = defaultdict(deque)
        self._pool = self.make_pool(cfg, log_path)

    def make_pool(self, cfg: Scoring, log_path: str | None) -> ProcessPool:
        """The scoring processes."""
        source = source_of(cfg, is_batched=self.is_batched)
        budget = TimeBudget(cfg.batch_timeout, cfg.num_workers, "reward.batch_timeout")
        has_budget = cfg.batch_timeout is not None or not self.is_batched  # one call has a timeout for the whole batch
        return ProcessPool(
            source,
            cfg.num_workers,
            cfg.timeout,
            memory_limit_mb=cfg.memory_limit_mb,
            budget=budget if has_budget else None,
            log_path=log_path,
            on_answer=_record,
        )

    def shape(self, result: dict[str, Any], request: ScoreRequest) -> None:
        """Change what the scorer returned for a response, in place: `score`, and further values."""

    def submit(self, key: Hashable, request: ScoreRequest) -> None:
        """Start scoring a response. Does not wait. A key may be submitted several times and collected as often."""
        number = None if self.is_batched else self._pool.submit(_arguments(request))
        self._requests[key].append((request, number))

    def submitted(self, key: Hashable) -> int:
        """How many scores of this key can still be collected."""
        return len(self._requests[key]) if key in self._requests else 0

    def is_ready(self, key: Hashable) -> bool:
        """Whether `collect` would not wait for this key.

        Always true for a batched manager, which scores in `collect`.
        """
        return all(number is None or self._pool.has(number) for _, number in self._requests[key])

    def pump(self) -> None:
        """Send queued responses to free processes. Does not wait."""
        self._pool.pump()

    def collect(self, keys: Iterable[Hashable]) -> Scores:
        """Wait for the scores of submitted responses, and return them in the order of `keys`."""
        submissions = [self._take(key) for key in keys]
        requests = [request for request, _ in submissions]
        if self.is_batched:
            outcomes = self._score_batch(requests)
        else:
            outcomes = [self._pool.take(number) for _, number in submissions if number is not None]
        _warn_of_failures(outcomes)
        results: list[dict[str, Any]] = [
            outcome.result if outcome.fate == "ok" else {"score": 0.0} for outcome in outcomes
        ]
        acc = np.full(len(results), np.nan, np.float32)
        for index, (outcome, request, result) in enumerate(zip(outcomes, requests, results, strict=True)):
            if outcome.fate == "ok":
                acc[index] = self._accuracy(result, request)
                self.shape(result, request)
        scores = np.array([result.pop("score") for result in results], dtype=np.float32)
        counted: Counter[str] = Counter(outcome.fate for outcome in outcomes)
        if self._has_rules:
            counted.update(result.pop(STOPPED) for result in results if STOPPED in result)
        return Scores(scores, acc, results, {f"reward/{name}": float(counted[name]) for name in COUNTS})

    def score(self, items: Sequence[ScoreRequest]) -> Scores:
        """Submit and collect."""
        keys = [object() for _ in items]
        for key, item in zip(keys, items, strict=True):
            self.submit(key, item)
        return self.collect(keys)

    def close(self) -> None:
        """Kill the scoring processes. May be called twice."""
        self._pool.close()

    def _accuracy(self, result: Mapping[str, Any], request: ScoreRequest) -> float:
        """The result's `acc`, else its score. Logs once if a data source has results with and without one."""
        source, given = request.data_source, has_acc(result)
        known = self._returns[source]
        if given not in known:
            known.add(given)
            if len(known) == 2:
                log.warning(
                    "reward: of data_source %r some results have an `acc` (a number without a dict is its own) and "
                    "some have none; their score is taken as their acc: return acc in all results, or in none",
                    source,
                )
        return float(result["acc"] if given else result["score"])

    def _take(self, key: Hashable) -> tuple[ScoreRequest, int | None]:
        waiting = self._requests[key]
        submission = waiting.popleft()
        if not waiting:
            del self._requests[key]
        return submission

    def _score_batch(self, requests: list[ScoreRequest]) -> list[Outcome]:
        if not requests:
            return []
        each = [_arguments(request) for request in requests]
        lists = {f"{name}s": [arguments[name] for arguments in each] for name in each[0]}
        whole = self._pool.take(self._pool.submit(lists, weight=len(requests)))
        return whole.result if whole.fate == "ok" else [whole] * len(requests)


@register_reward_manager("batch")
class BatchRewardManager(RewardManager):
    """One call of a custom function for all responses of a `collect`.

    Its arguments are lists, (data_sources, solution_strs, ground_truths, extra_infos), and it returns a list of
    results. When the call fails, all of them have failed.
    """

    is_batched = True

    def make_pool(self, cfg: Scoring, log_path: str | None) -> ProcessPool:
        if cfg.custom_reward_function.path is None:
            raise InputError(
                "reward.reward_manager.name=batch, and the built-in rules score one response at a time; use naive, or "
                "name a function of lists in reward.custom_reward_function.path"
            )
        return super().make_pool(cfg, log_path)


@dataclass(frozen=True)
class OverlongBuffer:
    enable: bool = param(False, help="dapo: penalise responses that come near the limit")
    len: int = param(0, ge=0, help="tokens before the limit over which the penalty grows")
    penalty_factor: float = param(1.0, ge=0, help="penalty at the limit")
    log: bool = param(False, help="keep overlong_reward and overlong with each sample")


@dataclass(frozen=True)
class Dapo:
    overlong_buffer_cfg: OverlongBuffer = param(OverlongBuffer(), help="DAPO's shaping of over-long responses")
    max_resp_len: int | None = param(None, gt=0, help="the limit, in tokens; null: data.max_response_length")


@register_reward_manager("dapo", params=Dapo)
class DapoRewardManager(RewardManager):
    """One call per response, then `overlong_reward` is added."""

    params: Dapo

    def __init__(
        self, cfg: Scoring, params: Dapo, max_response_length: int | None = None, log_path: str | None = None
    ) -> None:
        self.limit = params.max_resp_len or max_response_length or 0
        overlong = params.overlong_buffer_cfg
        if overlong.enable and not 0 < overlong.len <= self.limit:
            raise InputError(
                f"reward.reward_kwargs: overlong_buffer_cfg.len={overlong.len} with max_resp_len={self.limit}; "
                "expected 1 to max_resp_len tokens, or overlong_buffer_cfg.enable=false"
            )
        super().__init__(cfg, params, max_response_length, log_path)

    def shape(self, result: dict[str, Any], request: ScoreRequest) -> None:
        overlong = self.params.overlong_buffer_cfg
        if not overlong.enable:
            return
        added = overlong_reward(request.response_length, self.limit, overlong.len, overlong.penalty_factor)
        result["score"] += added
        if overlong.log:
            result |= {"overlong_reward": added, "overlong": float(added < 0)}


def overlong_reward(response_length: int, max_resp_len: int, buffer_len: int, penalty_factor: float) -> float:
    """DAPO's penalty (arXiv 2503.14476, equation 13), <= 0, which is added to the score.

    Lengths in tokens, tool tokens and the end-of-sequence token included. 0 up to max_resp_len - buffer_len tokens,
    then linear down to -penalty_factor at max_resp_len. As in verl, and unlike the paper, it falls further beyond
    max_resp_len.
    """
    exceeded = response_length - (max_resp_len - buffer_len)
    return min(-exceeded / buffer_len * penalty_factor, 0.0)


@dataclass(frozen=True)
class RateLimited:
    max_concurrent: int = param(1, gt=0, help="rate_limited: requests at once, per leader")
    max_rpm: int | None = param(None, gt=0, help="rate_limited: requests per minute, per leader; null: any")
    max_tpm: int | None = param(None, gt=0, help="rate_limited: tokens per minute, per leader; null: any")
    estimated_tokens_per_request: int = param(2000, gt=0, help="rate_limited: tokens that a request counts for")
    timeout: float = param(300.0, gt=0, help="rate_limited: seconds for one request")


@register_reward_manager("rate_limited", params=RateLimited)
class RateLimitedRewardManager(RewardManager):
    """One call per response, with limits on how many run at once and on requests and tokens per minute.

    Calls of a coroutine function share a process; others have num_workers processes.
    """

    params: RateLimited

    def make_pool(self, cfg: Scoring, log_path: str | None) -> ProcessPool:
        params = self.params
        return ProcessPool(
            source_of(cfg, at_once=params.max_concurrent, timeout=params.timeout),
            cfg.num_workers,
            params.timeout,
            memory_limit_mb=cfg.memory_limit_mb,
            limit=RateLimit(params.max_concurrent, params.max_rpm, params.max_tpm, params.estimated_tokens_per_request),
            log_path=log_path,
            on_answer=_record,
        )


@dataclass(frozen=True)
class RewardKwargsParameters(Dapo, RateLimited):
    """The parameters of all built-in managers, as verl has them in `reward.reward_kwargs`."""


def check_rewards(cfg: Scoring, data_sources: Iterable[str]) -> None:
    """Check the rewards at the start of a run.

    Raises InputError if the custom function's file does not exist, if a data source has no rule, or if a rule runs
    programs that the kernel does not isolate.
    """
    if cfg.custom_reward_function.path is not None:
        custom_function(cfg)
        return
    modules = {data_source: rule_for(data_source)[0] for data_source in sorted(set(data_sources))}
    programs = [data_source for data_source, module in modules.items() if module.endswith((".code", ".reasoning_gym"))]
    if programs and cfg.sandbox == "required" and not (isolation := probe_in_child()).complete:
        raise InputError(
            f"data_source {programs[0]!r} runs what the model wrote, and this kernel does not isolate it "
            f"({isolation.why_not}); allow user namespaces with mounts, and seccomp filters (`hpcrl check`), or let "
            "it run as you with reward.sandbox=best_effort"
        )


def source_of(cfg: Scoring, *, is_batched: bool = False, at_once: int | None = None, timeout: float = 10.0) -> Source:
    """The source that the scoring processes load."""
    custom = cfg.custom_reward_function
    if custom.path is None:
        given = {"format_score": cfg.format_score, "sandbox": None if cfg.sandbox == "required" else cfg.sandbox}
        return Source(kwargs={name: value for name, value in given.items() if value is not None})
    path, function = custom_function(cfg)
    return Source(
        os.path.abspath(path), function, custom.reward_kwargs, batched=is_batched, at_once=at_once, timeout=timeout
    )


def is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and value == value


def has_acc(result: Mapping[str, Any]) -> bool:
    """Whether a scorer's result, or its extras, have an accuracy."""
    return is_number(result.get("acc"))


def numbers_of(samples: Mapping[str, np.ndarray], key: str, setting: str, *, required: bool = True) -> np.ndarray:
    """float64 (N,): `score`, or what the scorer returned under `key`; NaN where a sample has no such number, for
    example because its scoring failed. Without an `acc`, the score is the accuracy (`Scores`).

    InputError where no sample has one and that is `required`; `setting` is what names the key in the template.
    """
    if key == "score":
        return samples["score"].astype(np.float64)
    extras = samples["extras"].tolist()
    values = [extra.get(key) for extra in extras]
    given = np.array([is_number(value) for value in values], bool)
    if required and not given.any():
        seen = sorted({name for extra in extras for name in extra})
        raise InputError(
            f"{setting} names {key!r}, and no sample has a number with this name; the scorer returns "
            f"{', '.join(['score', *seen])}"
        )
    numbers = np.array([value if here else np.nan for value, here in zip(values, given, strict=True)], np.float64)
    if key == "acc":
        taken = ~given & ~np.isnan(samples["acc"])
        numbers[taken] = samples["acc"][taken]
    return numbers


def custom_function(cfg: Scoring) -> tuple[str, str]:
    """(file, function) of the configured custom function; the path may be `file.py:function`. Raises InputError if
    there is no such file."""
    path, name = cfg.custom_reward_function.path or "", cfg.custom_reward_function.name
    if short := re.fullmatch(r"(.+\.py):(\w+)", path):
        path, name = short.groups()
    if not os.path.isfile(path):
        raise InputError(
            f"reward.custom_reward_function.path={path}: no such file; expected a Python file with a function {name!r}"
        )
    return path, name


def _warn_of_failures(outcomes: Sequence[Outcome]) -> None:
    """Log why scores failed, a few lines for each batch."""
    reasons = Counter((outcome.fate, outcome.why) for outcome in outcomes if outcome.fate != "ok")
    for (fate, why), count in reasons.most_common(WARNINGS):
        log.warning("reward: %s scored 0 (%s): %s", "a response" if count == 1 else f"{count} responses", fate, why)
    if num_others := reasons.total() - sum(count for _, count in reasons.most_common(WARNINGS)):
        log.warning("reward: %d more responses scored 0", num_others)


def _record(process: int, began: float, ended: float) -> None:
    """Record the scoring of a response in this rank's trace."""
    spans.add_beside(f"scorer {process}", "score", began, ended)


def _arguments(request: ScoreRequest) -> dict[str, Any]:
    """The keyword arguments of a scorer."""
    return {
        "data_source": request.data_source,
        "solution_str": request.solution_str,
        "ground_truth": request.ground_truth,
        "extra_info": {**(request.extra_info or {}), "finish_reason": request.finish_reason},
    }
