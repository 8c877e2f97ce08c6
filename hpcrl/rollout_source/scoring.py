"""Scores of generated responses, by rules, by a reward model, or by both; and an early end if they all fail."""

from __future__ import annotations

from collections import Counter

import numpy as np

from hpcrl.algorithms.metrics import finish, merge
from hpcrl.batch.data_proto import DataProto
from hpcrl.config.schema import Config
from hpcrl.controller.controller import Controller
from hpcrl.rollout_source.background_task import BackgroundTask, Steps
from hpcrl.rollout_source.prompt_groups import metric_values
from hpcrl.runtime.exits import InputError
from hpcrl.telemetry.progress import PhaseTimers


def score(controller: Controller, batch: DataProto, *, with_model: bool) -> DataProto:
    """Wait for `scoring`."""
    return BackgroundTask(scoring(controller, batch, with_model=with_model), PhaseTimers()).get()


def scoring(controller: Controller, batch: DataProto, *, with_model: bool) -> Steps[DataProto]:
    """The batch with `token_level_scores`, `score`, `acc` and `extras`; with a model, `rm_score` is part of the score.

    Rules have run since the first response was finished; the model runs beside them.
    """
    if with_model:
        batch = batch.union((yield "reward", controller["reward"].compute_rm_score(batch)))
    return batch.union((yield "reward", controller["scorer"].score(batch)))


class FirstSamples:
    """Fails early if every score of the first samples failed: as many samples as a step has, or as are scored at once
    if these are more. Later ones may all fail, because a service that scores may be down for a while."""

    def __init__(self, config: Config) -> None:
        self.size = config.data.train_batch_size * config.rollout.n
        self.metric = config.algorithm.filter_groups.metric
        self.has_scores = False  # a score has not failed
        self.failed: Counter[str] = Counter()  # scores before that, by how they failed
        self.has_metric = False  # a sample had a number that the metric names
        self.num_without_metric = 0  # samples before that

    def check_scores(self, batch: DataProto) -> None:
        """InputError where all scores so far have failed."""
        if self.has_scores or not len(batch):
            return
        counts = finish(merge(batch.metrics))
        failed = {name: int(count) for name, count in counts.items() if name.startswith("reward/") and count}
        self.has_scores = sum(failed.values()) < len(batch)
        self.failed.update(failed)
        if not self.has_scores and self.failed.total() >= self.size:
            how = ", ".join(f"{name} {count}" for name, count in self.failed.items())
            raise InputError(
                f"all of the first {self.failed.total()} scores failed ({how}); logs/rank_*.log and "
                "logs/scorer_*.log say why; mend the scorer or its data"
            )

    def check_metric(self, batch: DataProto) -> None:
        """InputError where no sample so far has a number that filter_groups.metric names."""
        if self.has_metric:
            return
        self.num_without_metric += len(batch)
        values = metric_values(batch.samples, self.metric, required=self.num_without_metric >= self.size)
        self.has_metric = not np.isnan(values).all()
