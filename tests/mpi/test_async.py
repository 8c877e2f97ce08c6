"""Asynchronous modes: generation on ranks of its own, while the actor trains."""

from __future__ import annotations

import errno
import json
import os
import shutil
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hpcrl.batch.data_proto import DataProto
from hpcrl.observe.read.archive import read_samples, read_step
from hpcrl.observe.record.archive import RolloutLog, step_path
from hpcrl.workers.actor import ActorWorker
from hpcrl.workers.response_stream import ResponseStream
from hpcrl.workers.rollout import RolloutWorker
from tests.mpi.lab import Lab, metrics
from tests.mpi.test_environments import ENVIRONMENT

pytestmark = pytest.mark.world(4)

APART = {
    "pools": {"train": "1", "generate": "2-3"},
    **dict.fromkeys(("actor", "ref", "critic"), {"pool": "train"}),
    "rollout": {"pool": "generate"},
}
TP2 = {**APART, "rollout": {"pool": "generate", "tp": 2}}
GRPO = {"adv_estimator": "grpo"}


def run(lab: Lab, name: str, mode: str, *, steps: int = 4, placement: dict[str, Any] = APART, **sections: Any) -> Path:
    options = {
        "algorithm": {**GRPO, **sections.pop("algorithm", {})},
        "async_training": {"mode": mode, **sections.pop("async_training", {})},
        "trainer": {"total_training_steps": steps, **sections.pop("trainer", {})},
    }
    return lab.run(name, placement, **options, **sections)


def lines(run: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def samples(run: Path, steps: int) -> dict[int, dict[str, np.ndarray]]:
    return {step: read_samples(step_path(run / "rollouts", step)) for step in range(1, steps + 1)}


@pytest.mark.slow
@pytest.mark.parametrize("filtering", [pytest.param(False, marks=pytest.mark.exhaustive), True])
def test_one_step_off_resumed_equals_uninterrupted_bitwise(world, lab: Lab, filtering: bool) -> None:
    name, options = f"one_step_off_{filtering}", dict[str, Any]()
    if filtering:
        options = {"algorithm": {"filter_groups": {"enable": True}}, "data": {"gen_batch_size": 8}}
    straight = run(lab, f"{name}_straight", "one_step_off", **options)
    for steps in (2, 4):
        halted = run(lab, f"{name}_halted", "one_step_off", steps=steps, trainer={"save_freq": 2}, **options)
    expected, found = metrics(straight), metrics(halted)
    assert sorted(found) == [1, 2, 3, 4]
    for step, line in expected.items():
        assert found[step] == line, f"step {step}"
        age = min(step - 1, 1)
        assert line["training/off_policy/trajectory_staleness/min"] == age
        assert line["training/off_policy/trajectory_staleness/max"] <= age + filtering  # a surplus waits a step longer
        assert line["rollout_corr/rollout_is_mean"] > 0  # corrected, though nobody asked
    for step, columns in samples(halted, 4).items():
        assert columns["weight_version_max"].max() == max(step - 2, 0)


def test_samples_that_a_full_disk_does_not_take_cost_the_checkpoint_and_not_the_run(
    world, lab: Lab, monkeypatch
) -> None:
    """The samples of the next step, which leaders write into a checkpoint."""

    class FullDisk(RolloutLog):
        def __init__(self, path) -> None:
            super().__init__(path)
            self.is_full = "step_00000002.tmp" in str(path)

        def append_sample(self, tokens, samples) -> None:
            if self.is_full:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            super().append_sample(tokens, samples)

    monkeypatch.setattr("hpcrl.workers.records.RolloutLog", FullDisk)
    folder = run(lab, "full_disk", "one_step_off", steps=3, trainer={"save_freq": 1})
    assert [line.get("perf/failed_saves") for line in lines(folder)] == [None, None, 1.0]
    kept = sorted(path.name for path in (folder / "checkpoints").iterdir())
    assert kept == ["latest", "step_00000001", "step_00000003"]


def test_generation_goes_on_while_the_actor_trains(world, lab: Lab, monkeypatch) -> None:
    """The first update does not end before step 2 draws tokens, and these are not drawn before that update has begun:
    modes that take turns would wait for ever."""
    folder = lab.folder / "meeting"
    if world.rank == 0:
        folder.mkdir()
    world.barrier()
    update, generate, on_step = ActorWorker.update_actor, RolloutWorker.generate, RolloutWorker._on_step
    steps = []

    def met(name: str, on_wait: Callable[[], None] = lambda: None) -> bool:
        give_up = time.monotonic() + 60
        while not (folder / name).exists() and time.monotonic() < give_up:
            on_wait()
            time.sleep(0.001)
        return (folder / name).exists()

    def meet_generation(self: ActorWorker, batch: DataProto) -> Any:
        (folder / "updating").touch()
        assert met("generating")
        return update(self, batch)

    def note_step(self: RolloutWorker, batch: DataProto, sampling: Any) -> DataProto:
        steps.append(batch.meta_info["step"])
        return generate(self, batch, sampling)

    def meet_update(self: RolloutWorker) -> None:
        on_step(self)
        if steps[-1] == 2:
            assert met("updating", lambda: on_step(self))  # which sends the rows that the update waits for
            (folder / "generating").touch()

    meet_generation.registration = update.registration  # type: ignore[attr-defined]
    note_step.registration = generate.registration  # type: ignore[attr-defined]
    monkeypatch.setattr(ActorWorker, "update_actor", meet_generation)
    monkeypatch.setattr(RolloutWorker, "generate", note_step)
    monkeypatch.setattr(RolloutWorker, "_on_step", meet_update)
    run(lab, "overlap", "one_step_off", steps=2)


RANDOM_LENGTHS = {"data": {"max_response_length": 40}}


@pytest.mark.parametrize(
    ("threshold", "partial"),
    [(1, True), pytest.param(3, False, marks=pytest.mark.slow), pytest.param(3, True, marks=pytest.mark.exhaustive)],
)
def test_no_sample_is_older_than_the_bound(world, lab: Lab, threshold: int, partial: bool) -> None:
    """Random lengths: an untrained model stops where it likes. See also tests/run/rollouts/test_streaming.py."""
    found = run(
        lab,
        f"stream_{threshold}_{partial}",
        "bounded_staleness",
        steps=6,
        placement=APART if partial and threshold == 1 else TP2,
        async_training={"staleness_threshold": threshold, "partial_rollout": partial},
        **RANDOM_LENGTHS,
    )
    ages, seen = [], []
    for step, columns in samples(found, 6).items():
        ages += (step - 1 - columns["weight_version_min"]).tolist()
        seen += list(zip(columns["uid"].tolist(), columns["sample_index"].tolist(), strict=True))
        assert len(columns["uid"]) == 24
        assert (columns["weight_version_max"] >= columns["weight_version_min"]).all()
        if not partial:
            assert (columns["weight_version_max"] == columns["weight_version_min"]).all()
    assert 0 <= min(ages) and 0 < max(ages) <= threshold
    assert len(set(seen)) == len(seen)
    for line in lines(found):
        assert all(value is not None for key, value in line.items() if key.endswith(("grad_norm", "pg_loss")))
        assert 0 <= line["fully_async/trainer/idle_ratio"] <= 1 and 0 <= line["fully_async/rollouter/idle_ratio"] <= 1


@pytest.mark.slow
def test_threshold_0_is_synchronous(world, lab: Lab) -> None:
    found = run(lab, "stream_sync", "bounded_staleness", steps=2, async_training={"staleness_threshold": 0}, data=BIG)
    expected = run(lab, "sync_apart", "sync", steps=2, data=BIG)
    for step in (1, 2):
        tokens, columns, _ = read_step(step_path(found / "rollouts", step))
        other_tokens, other, _ = read_step(step_path(expected / "rollouts", step))
        assert columns["uid"].tolist() == other["uid"].tolist()
        assert columns["sample_index"].tolist() == other["sample_index"].tolist()
        same = [
            np.array_equal(mine, others)
            for mine, others in zip(_rows(tokens["input_ids"]), _rows(other_tokens["input_ids"]), strict=True)
        ]
        assert np.mean(same) >= 0.99


BIG = {"train_batch_size": 64}


def _rows(column: tuple[np.ndarray, np.ndarray]) -> list[np.ndarray]:
    return np.split(column[0], column[1][1:-1])


@pytest.mark.parametrize(
    ("placement", "acts"),
    [
        pytest.param(APART, False, id="dp2"),
        pytest.param(TP2, False, id="tp2", marks=pytest.mark.slow),
        pytest.param(TP2, True, id="tp2_environment"),
        pytest.param(APART, True, id="dp2_environment", marks=pytest.mark.exhaustive),
    ],
)
def test_interrupted_responses_go_on_under_new_weights(
    world, lab: Lab, monkeypatch, placement: dict[str, Any], acts: bool
) -> None:
    """Once the first step has its prompts, replicas wait for the refit in the middle of others. Environments answer
    over it."""
    pump, finished = ResponseStream._pump, Counter[int]()

    def wait_for_refit(self: ResponseStream) -> None:
        before = set(self._unreported)
        pump(self)
        finished[0] += len(before - set(self._unreported))
        if self._version == 0 and self._running and finished[0] >= 4 // self.worker.layout.dp:
            give_up = time.monotonic() + 60
            while not self.worker.context.poll():
                assert time.monotonic() < give_up
                time.sleep(0.001)

    monkeypatch.setattr(ResponseStream, "_pump", wait_for_refit)
    name = f"partial_{placement['rollout'].get('tp', 1)}_{acts}"
    found = run(
        lab,
        name,
        "bounded_staleness",
        steps=6,
        placement=placement,
        async_training={"staleness_threshold": 4},
        data={"train_batch_size": 4, "max_response_length": 96},
        actor={"ppo_mini_batch_size": 4, "ppo_max_token_len_per_gpu": 512, "optim": {"lr": 0.0}},
        **(acting(lab) if acts else {}),
    )
    spans = np.concatenate([c["weight_version_max"] - c["weight_version_min"] for c in samples(found, 6).values()])
    assert spans.max() > 0
    assert sum(line["fully_async/partial/total_partial_num"] for line in lines(found)) == (spans > 0).sum()
    for line in lines(found):  # weights that never change: what was drawn in parts fits together
        assert line["training/rollout_log_probs_diff_max"] < 1e-4
    if acts:
        assert sum(line.get("env/steps", 0) for line in lines(found)) >= 2 * 6 * 4
        assert max(line.get("training/num_sequences/max", 0) for line in lines(found)) == 2


def acting(lab: Lab) -> dict[str, Any]:
    """Sections of a job with an environment that begins new conversations."""
    (lab.folder / "e.py").write_text(ENVIRONMENT)
    environment = {"path": str(lab.folder / "e.py"), "name": "Echo"}
    return {
        "rollout": {"multi_turn": {"enable": True, "environment": environment}},
        "reward": {"custom_reward_function": {"path": None}},
    }


@pytest.mark.slow
def test_conversations_that_no_refit_interrupts(world, lab: Lab) -> None:
    """A refit waits for their ends, environments included."""
    options = {"staleness_threshold": 2, "partial_rollout": False}
    found = run(lab, "acts_whole", "bounded_staleness", async_training=options, **acting(lab), **RANDOM_LENGTHS)
    for columns in samples(found, 4).values():
        assert (columns["weight_version_max"] == columns["weight_version_min"]).all()
        assert len(columns["uid"]) == 24 and columns["num_turns"].max() > 1


@pytest.mark.slow
@pytest.mark.parametrize("filtering", [False, True])
def test_no_prompt_is_lost_or_trained_twice(world, lab: Lab, filtering: bool) -> None:
    """Over a resume, too: all prompts of the order up to some place are trained, dropped, or waiting."""
    name, steps = f"whole_{filtering}", 6
    for is_resumed in (False, True):
        found = run(
            lab,
            name,
            "bounded_staleness",
            steps=steps,
            async_training={"staleness_threshold": 2},
            trainer={"save_freq": 3},
            algorithm={"filter_groups": {"enable": filtering}},
            **RANDOM_LENGTHS,
        )
        if not is_resumed:  # as if it had been killed in step 4
            if world.rank == 0:
                shutil.rmtree(found / "checkpoints" / "step_00000006")
            world.barrier()
            halted = json.loads((found / "checkpoints" / "step_00000003" / "trainer.json").read_text())
            assert halted["under_way"]  # those of step 6 were submitted a moment before
    trained = [uid for columns in samples(found, steps).values() for uid in columns["uid"].tolist()]
    assert set(Counter(trained).values()) == {2}  # rollout.n
    state = json.loads((found / "checkpoints" / "step_00000006" / "trainer.json").read_text())
    surplus = found / "checkpoints" / "step_00000006" / "surplus"
    ready = read_samples(step_path(surplus, steps))["uid"].tolist() if state["surplus"] else []
    assert not set(trained) & set(ready)
    drawn = state["sampler"]["position"]
    counted = len(set(trained)) + len(set(ready)) + len(state["under_way"])
    evicted = sum(line.get("training/filter_groups/evicted_samples", 0) for line in lines(found)) + state["seen"][1]
    assert counted + evicted / 2 == drawn


@pytest.mark.slow
def test_validation_pauses_generation(world, lab: Lab) -> None:
    """Of one_step_off, with a step that what is left over of another one fills."""
    filtering = {"algorithm": {"filter_groups": {"enable": True}}, "data": {"gen_batch_size": 32}}
    for mode, options in (("one_step_off", filtering), ("bounded_staleness", {})):
        found = run(
            lab,
            f"validated_{mode}",
            mode,
            steps=3,
            data={"val_files": [str(lab.data / "val.parquet")], "val_max_samples": 8, **options.get("data", {})},
            algorithm=options.get("algorithm", {}),
            trainer={"test_freq": 1},
        )
        shown = lines(found)
        assert [line["step"] for line in shown] == [0, 1, 2, 3]
        assert all(any(name.startswith("val-core/") for name in line) for line in shown)
        assert any(line.get("train/num_gen_batches") == 0 for line in shown) == (options is filtering)
