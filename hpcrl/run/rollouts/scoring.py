"""Groups of samples of a prompt, and their scores, collected while rank 0 waits for something else."""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Mapping
from typing import Any, Generic, TypeAlias, TypeVar

import numpy as np

from hpcrl.algorithms.metrics import finish, merge
from hpcrl.batch.data_proto import DataProto
from hpcrl.config.schema import Config, RewardConfig
from hpcrl.controller.controller import Controller, Future
from hpcrl.observe.record.progress import PhaseTimers
from hpcrl.rewards.manager import FATES, numbers_of
from hpcrl.runtime.exits import InputError

T = TypeVar("T")

# Yields one future after the other, each with the name of the phase that waits for it, and is sent their values.
Steps: TypeAlias = Generator[tuple[str, Future[Any]], Any, T]


class BackgroundTask(Generic[T]):
    """Runs a generator of futures. It begins at once; with `in_background` it advances whenever rank 0 waits.

    Only `get` waits, and only its waiting counts as time of a phase.
    """

    def __init__(self, steps: Steps[T], timers: PhaseTimers) -> None:
        self._steps = steps
        self._timers = timers
        self._phase = ""
        self._future: Future[Any] | None = None
        self._is_stepping = False
        self._value: T
        self._step(None)

    def in_background(self, controller: Controller) -> BackgroundTask[T]:
        controller.background = self.advance
        return self

    def advance(self) -> None:
        """Run as far as possible without waiting."""
        while not self._is_stepping and self._future is not None and self._future.is_ready:
            self._step(self._future.get())

    def get(self) -> T:
        while self._future is not None:
            with self._timers(self._phase):
                value = self._future.get()
            self._step(value)
        return self._value

    def _step(self, value: Any) -> None:
        self._is_stepping = True
        try:
            self._phase, self._future = self._steps.send(value)
        except StopIteration as end:
            self._future, self._value = None, end.value
        finally:
            self._is_stepping = False


def differing(batch: DataProto, metric: str) -> np.ndarray:
    """bool (N,): rows of prompts whose samples differ in `metric`, and of prompts with one sample. Samples without that
    number do not count.

    verl tests whether the standard deviation is 0; rounding can make it 1e-17 for equal values, so the largest and the
    smallest value are compared here.
    """
    values = metric_values(batch.samples, metric, required=False)
    _, group, size = np.unique(batch.samples["prompt"], return_inverse=True, return_counts=True)
    largest, smallest = np.full(len(size), -np.inf), np.full(len(size), np.inf)
    known = ~np.isnan(values)
    np.maximum.at(largest, group[known], values[known])
    np.minimum.at(smallest, group[known], values[known])
    return ((largest > smallest) | (size == 1))[group]


def metric_values(samples: Mapping[str, np.ndarray], metric: str, *, required: bool) -> np.ndarray:
    """float64 (N,): the score for `reward`, otherwise what the scorer returned under that key; NaN where there is none,
    and where the environment failed.

    Raises InputError if no sample has one and it is `required`.
    """
    key = "score" if metric in ("reward", "seq_reward", "seq_final_reward") else metric
    values = numbers_of(samples, key, "algorithm.filter_groups.metric", required=required)
    return np.where(samples["finish_reason"] == "error", np.nan, values) if "finish_reason" in samples else values


def numbered(batch: DataProto, step: int) -> DataProto:
    """The samples as those of a step, with their prompts numbered from 0."""
    prompts, prompt = np.unique(batch.samples["prompt"], return_inverse=True)
    places: dict[str, np.ndarray] = {
        "prompt": prompt.astype(np.int32),
        "position": np.arange(len(batch), dtype=np.int64),
    }
    meta = {"split": "train", "step": step, "num_prompts": len(prompts)}
    return DataProto(batch.tokens, batch.samples | places, meta)


def num_prompts(batch: DataProto) -> int:
    return len(np.unique(batch.samples["prompt"]))


def score(controller: Controller, batch: DataProto, cfg: RewardConfig, timers: PhaseTimers | None = None) -> DataProto:
    """Run `scoring` and wait for it."""
    return BackgroundTask(scoring(controller, batch, cfg), timers or PhaseTimers()).get()


def scoring(controller: Controller, batch: DataProto, cfg: RewardConfig) -> Steps[DataProto]:
    """The batch with `token_level_scores`, `score`, `acc` and `extras`; those of a reward model and of a judge,
    `rm_score` and `judge_score`, are parts of the score.

    Rules have been running since the first response was finished; the models run at the same time.
    """
    called = []
    if cfg.judge.enable:
        called.append(("judge", controller["judge"].judge(batch)))
    if cfg.reward_model.enable:
        called.append(("reward", controller["reward"].compute_rm_score(batch)))
    for phase, future in called:
        batch = batch.union((yield phase, future))
    return batch.union((yield "reward", controller["scorer"].score(batch)))


def failed_scores(batch: DataProto) -> dict[str, int]:
    """`reward/<how>` -> number of the batch's scores that failed in that way."""
    counts = finish(merge(batch.metrics)) if batch.metrics else {}
    failed = {name: int(counts[name]) for fate in FATES if (name := f"reward/{fate}") in counts}
    environments = int((batch.samples["finish_reason"] == "error").sum()) if "finish_reason" in batch.samples else 0
    return failed | ({"environments": environments} if environments else {})


MOST_SHOWN = 5  # values of a metric in an error


class FirstSamples:
    """Ends the job early if every score of the first samples failed. These are as many samples as a step has, or as are
    scored at once if that is more. Later ones may all fail, because a scoring service may be down for a while."""

    def __init__(self, config: Config) -> None:
        self.size = config.data.train_batch_size * config.rollout.n
        self.metric = config.algorithm.filter_groups.metric
        self.has_scores = False  # a score has not failed
        self.failed: Counter[str] = Counter()  # scores before that, by how they failed
        self.has_metric = False  # a sample had a number that the metric names
        self.num_without_metric = 0  # samples before that

    def check_scores(self, batch: DataProto) -> None:
        """Raise InputError if all scores so far have failed."""
        if self.has_scores or not len(batch):
            return
        failed = failed_scores(batch)
        self.has_scores = sum(failed.values()) < len(batch)
        self.failed.update(failed)
        if not self.has_scores and self.failed.total() >= self.size:
            how = ", ".join(f"{name} {count}" for name, count in self.failed.items() if count)
            raise InputError(
                f"all of the first {self.failed.total()} scores failed ({how}); logs/rank_*.log and "
                "logs/scorer_*.log have the reasons; fix the scorer, the environment or the data"
            )

    def check_metric(self, batch: DataProto) -> None:
        """Raise InputError if no sample so far has the number of filter_groups.metric."""
        if self.has_metric:
            return
        self.num_without_metric += len(batch)
        values = metric_values(batch.samples, self.metric, required=self.num_without_metric >= self.size)
        self.has_metric = not np.isnan(values).all()


class DroppedPrompts:
    """Ends the job if filter_groups keeps none of many prompts in a row. Prompts with a failed score do not count,
    because a scoring service may be down for a while."""

    def __init__(self, config: Config) -> None:
        filtering = config.algorithm.filter_groups
        self.metric, self.most = filtering.metric, filtering.max_dropped_prompts
        self._start()

    def _start(self) -> None:
        self.count = 0  # prompts since the last one that was kept
        self.values: Counter[float | None] = Counter()  # of their samples; None: no number

    def check(self, batch: DataProto, is_kept: np.ndarray) -> None:
        """Count the prompts of a filtered batch. Raises InputError if there are too many.

        Args:
            is_kept: bool (N,).
        """
        if is_kept.any():
            self._start()
            return
        samples = batch.samples
        is_scored = ~np.isin(samples["prompt"], samples["prompt"][np.isnan(samples["acc"])])
        self.count += len(np.unique(samples["prompt"][is_scored]))
        values = metric_values(samples, self.metric, required=False)[is_scored]
        self.values.update(None if np.isnan(value) else value for value in values.tolist())
        if 0 < self.most <= self.count:
            shown = ", ".join(
                f"{'no number' if value is None else f'{value:g}'} in {count} samples"
                for value, count in self.values.most_common(MOST_SHOWN)
            )
            raise InputError(
                f"of the last {self.count} prompts none has samples that differ in {self.metric!r} ({shown}), so "
                "algorithm.filter_groups dropped all of them; use easier or harder prompts, a larger rollout.n or "
                "another metric, or raise algorithm.filter_groups.max_dropped_prompts (0: continue without an end)"
            )
