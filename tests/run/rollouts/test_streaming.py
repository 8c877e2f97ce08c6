"""The bound on staleness, whatever finishes when: the trainer's side of a stream against replicas made of chance."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcrl.algorithms.metrics import Sum
from hpcrl.batch.data_proto import DataProto
from hpcrl.config.derive import Derived
from hpcrl.config.schema import Config
from hpcrl.controller.controller import Controller
from hpcrl.data.sampler import OrderedSampler
from hpcrl.observe.record.progress import PhaseTimers
from hpcrl.run.rollouts.source import RolloutContext, WeightSync
from hpcrl.run.rollouts.streaming import Streaming
from hpcrl.runtime.exits import InputError
from hpcrl.runtime.layout import Layout
from hpcrl.workers.response_stream import Finished

N = 2


class Done:
    """A future that is there."""

    is_ready = True

    def __init__(self, value: Any) -> None:
        self.value = value

    def get(self) -> Any:
        return self.value


class Replicas:
    """A controller whose replicas finish prompts in any order, under whatever weights the engine has by then."""

    def __init__(self, dp: int, seed: int, equal_scores: float, failed_scores: float = 0.0) -> None:
        self.random = random.Random(seed)
        self.equal_scores = equal_scores  # the share of prompts that dynamic sampling drops
        self.failed_scores = failed_scores  # the share of prompts that no score comes back for
        self.layout = Layout(tuple(range(1, dp + 1)))
        self.version = 0
        self.running: dict[int, tuple[int, list[int]]] = {}  # prompt -> replica, first version of each sample
        self.versions: dict[int, list[tuple[int, int]]] = {}
        self.most_live = 0
        self.listener: Any = None
        self.column = f"replica_of_{dp}"

    def __getitem__(self, role: str) -> Replicas:
        return self

    def generate_until_interrupted(self, sampling: object, version: int) -> None:
        assert version >= self.version
        self.version = version

    def submit(self, batch: DataProto) -> None:
        samples = batch.samples
        for prompt, replica in zip(samples["prompt"].tolist(), samples[self.column].tolist(), strict=True):
            assert self.running.setdefault(prompt, (replica, []))[0] == replica
        self.most_live = max(self.most_live, len(self.running) + len(self.versions))

    def listen(self) -> None:
        """Some prompts start, one is finished."""
        for _, (_, firsts) in self.random.sample(
            sorted(self.running.items()), self.random.randint(0, len(self.running))
        ):
            firsts[:] = firsts or [self.version] * N
        prompt = self.random.choice(sorted(self.running))
        replica, firsts = self.running.pop(prompt)
        self.versions[prompt] = [(first, self.version) for first in firsts or [self.version] * N]
        self.listener(self.layout.leaders[replica], Finished((prompt,), 0.0))

    def take_responses(self, batch: DataProto) -> Done:
        prompts = batch.samples["prompt"].tolist()[::N]
        versions = np.array([version for prompt in prompts for version in self.versions.pop(prompt)], np.int64)
        return Done(DataProto({}, {"weight_version_min": versions[:, 0], "weight_version_max": versions[:, 1]}))

    def score(self, batch: DataProto) -> Done:
        equal = [self.random.random() < self.equal_scores for _ in range(len(batch) // N)]
        score = np.array([0.5 if same else sample for same in equal for sample in range(N)], np.float32)
        extras = np.empty(len(batch), object)
        failed = np.repeat([self.random.random() < self.failed_scores for _ in equal], N)
        extras[:] = [{} if fails else {"steps": float(row)} for row, fails in enumerate(failed)]
        length = np.ones(len(batch), np.int32)
        acc = np.full(len(batch), np.nan, np.float32)
        return Done(
            DataProto(
                {},
                {"score": score, "acc": acc, "extras": extras, "response_length": length},
                {"metrics": [{"reward/errors": Sum(float(failed.sum()))}]},
            )
        )


class Weights(WeightSync):
    def update_to(self, version: int) -> None:
        self.version = version


def stream(replicas: Replicas, config: Config, total_steps: int, version: int) -> Streaming:
    timers = PhaseTimers()
    controller = cast(Controller, replicas)
    weights = Weights(controller, timers)
    weights.update_to(version)
    derived = cast(Derived, SimpleNamespace(needs_reward_baseline=False))
    sampler = OrderedSampler(1000, 0, False)
    return Streaming(RolloutContext(controller, config, derived, sampler, timers, (0,), weights, total_steps))


def take_step(source: Streaming, step: int) -> tuple[DataProto, dict[str, float]]:
    """The samples of a step, and the metrics that were logged with them."""
    logged: dict[str, float] = {}
    source.context.log = logged.update
    return source.next(step), logged


@settings(max_examples=100, deadline=None)
@given(
    threshold=st.integers(0, 3),
    batch_size=st.integers(1, 5),
    dp=st.integers(1, 3),
    max_num_seqs=st.sampled_from([1, 4, 100]),
    equal_scores=st.sampled_from([0.0, 0.4]),
    seed=st.integers(0, 10**6),
)
def test_no_sample_is_older_than_the_bound_and_none_is_lost(
    threshold: int, batch_size: int, dp: int, max_num_seqs: int, equal_scores: float, seed: int
) -> None:
    steps, resumed_after = 8, 4
    config = Config.model_validate(
        {
            "data": {"train_batch_size": batch_size},
            "rollout": {"n": N, "max_num_seqs": max_num_seqs},
            "async_training": {"mode": "bounded_staleness", "staleness_threshold": threshold},
            "algorithm": {"filter_groups": {"enable": equal_scores > 0}},
        }
    )
    replicas = Replicas(dp, seed, equal_scores)
    loop = stream(replicas, config, steps, 0)
    trained: list[int] = []
    dropped = 0.0
    for step in range(1, steps + 1):
        batch, metrics = take_step(loop, step)
        samples = batch.samples
        assert len(batch) == batch_size * N
        age = step - 1 - samples["weight_version_min"]
        assert age.max() <= threshold and age.min() >= 0
        assert metrics["training/off_policy/trajectory_staleness/max"] == age.max()
        assert samples["sample_index"].tolist() == list(range(N)) * batch_size
        trained += samples["row"].tolist()[::N]
        dropped += metrics.get("training/filter_groups/evicted_samples", 0.0) / N
        for _ in range(replicas.random.randint(0, min(5, len(replicas.running)))):
            replicas.listen()  # while the actor trains
        loop.update_weights(step)
        assert replicas.most_live <= (1 + threshold) * batch_size
        if step == resumed_after:  # a checkpoint without anything finished: what is under way is drawn again
            loop.finished.clear()
            waiting = [(prompt.row, prompt.epoch) for _, prompt in sorted(loop.prompts.items())]
            ready = loop.pool.surplus
            replicas = Replicas(dp, seed + 1, equal_scores)
            position, counts, number = loop.context.sampler.state_dict(), loop.pool.counts, loop.next_number
            loop = stream(replicas, config, steps, step)
            loop.context.sampler.load_state_dict(position)
            loop.again.extend(waiting)
            loop.pool.surplus, loop.pool.counts, loop.next_number = ready, counts, number
            loop.num_submitted = step * batch_size + len(loop._ready_versions())
    left = [prompt.row for prompt in loop.prompts.values()] + [row for row, _ in loop.again]
    left += np.unique(loop.pool.surplus.samples["row"]).tolist() if loop.pool.surplus is not None else []
    assert max(Counter(trained + left).values()) == 1
    assert len(trained) + len(left) + dropped == loop.context.sampler.state_dict()["position"]


def bounded(threshold: int, batch_size: int, **filtering: Any) -> Config:
    return Config.model_validate(
        {
            "data": {"train_batch_size": batch_size},
            "rollout": {"n": N},
            "async_training": {"mode": "bounded_staleness", "staleness_threshold": threshold},
            "algorithm": {"filter_groups": filtering},
        }
    )


@pytest.mark.parametrize(
    ("threshold", "batch_size", "num_late"),
    [(3, 4, 0), (2, 8, 4), (2, 4, 8), (0, 4, 8), (3, 2, 6)],  # 4 prompts of version 1 and 4 of version 2, after step 4
)
def test_a_resumed_run_trains_what_is_late_by_its_smaller_bound(
    caplog: pytest.LogCaptureFixture, threshold: int, batch_size: int, num_late: int
) -> None:
    loop = stream(Replicas(2, 0, 0.0), bounded(threshold, batch_size), 12, 4)
    kept = DataProto(
        {},
        {
            "prompt": np.repeat(np.arange(8), N).astype(np.int32),
            "row": np.repeat(np.arange(8), N),
            "epoch": np.zeros(8 * N, np.int64),
            "sample_index": np.tile(np.arange(N), 8),
            "weight_version_min": np.repeat([1, 2], 4 * N),
            "weight_version_max": np.repeat([1, 2], 4 * N),
        },
    )
    loop.pool.read = lambda folder, step: kept  # type: ignore[method-assign]
    loop.load({"sampler": {"position": 8}, "surplus": True}, Path(), 4)
    told = [record.getMessage() for record in caplog.records]
    assert [line.split(" will be older")[0] for line in told] == (
        [f"{num_late} of the 8 prompts that the checkpoint keeps"] if num_late else []
    )
    rows: list[int] = []
    for step in range(5, 5 + 8 // batch_size):
        rows += take_step(loop, step)[0].samples["row"].tolist()[::N]
        loop.update_weights(step)
    assert rows == list(range(8))


@pytest.mark.parametrize("seed", range(5))
def test_prompts_whose_scores_failed_are_dropped_like_those_that_do_not_differ(seed: int) -> None:
    replicas = Replicas(2, seed, 0.0, failed_scores=0.3)
    loop = stream(replicas, bounded(1, 4, enable=True, metric="steps"), 4, 0)
    dropped = 0.0
    for step in range(1, 5):
        batch, metrics = take_step(loop, step)
        assert all("steps" in extra for extra in batch.samples["extras"])
        dropped += metrics["training/filter_groups/evicted_samples"]
        loop.update_weights(step)
    assert dropped > 0


@pytest.mark.parametrize("filtering", [{}, {"enable": True, "metric": "steps"}])
def test_a_scorer_that_never_works_ends_the_job_after_a_step_of_samples(filtering: dict[str, Any]) -> None:
    loop = stream(Replicas(2, 0, 0.0, failed_scores=1.0), bounded(1, 4, **filtering), 4, 0)
    with pytest.raises(InputError, match=r"all of the first 8 scores failed \(reward/errors 8\)"):
        loop.next(1)
