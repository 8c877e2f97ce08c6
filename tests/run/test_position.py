"""Where a run is in its training data: slices with batches of any size take the rows that one slice takes."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcrl.cli import load_job
from hpcrl.data.sampler import OrderedSampler
from hpcrl.run.start import Start

NUM_ROWS = 23
FRESH = Start(0, None, {}, None)
Slices = list[tuple[int, int]]  # rows per step, steps


def job_at(name: str, rows_per_step: int, start: Start, epochs: int = 3) -> Any:
    """A job with NUM_ROWS rows that has read its inputs and continues from `start`."""
    made = load_job(name)
    own = {"batch_size": rows_per_step, "total_epochs": epochs}
    training = {"data": {"train_batch_size": rows_per_step}, "trainer": {"total_epochs": epochs}}
    job = made(
        SimpleNamespace(rank=0), made.schema().model_validate(training if name == "train" else {name: own}), 0, 0
    )
    job.order = OrderedSampler(NUM_ROWS, 5, True)
    job.inputs = SimpleNamespace(prompts={"train": range(NUM_ROWS)})
    job.saved_state.set_start(start)
    return job


def after(job: Any, step: int, **more: Any) -> Start:
    """The start that a checkpoint of `step` is."""
    return Start(step, None, json.loads(json.dumps({**more, **job.saved_state.position(step)})), None)


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 3)), min_size=1, max_size=5), st.integers(1, 9))
def test_slices_take_the_rows_of_one_slice_whatever_their_batch_sizes(slices: Slices, last: int) -> None:
    run, start, taken = SimpleNamespace(log=lambda metrics: None), FRESH, [np.zeros(0, np.int64)]
    for rows_per_step, steps in slices:
        job = job_at("sft", rows_per_step, start)
        taken += [job.next_rows(run, np.ones(NUM_ROWS)) for _ in range(min(steps, job.total_steps() - start.step))]
        start = after(job, start.step + max(0, min(steps, job.total_steps() - start.step)))
        assert start.state["consumed_rows"] == len(np.concatenate(taken))
    job = job_at("sft", last, start)
    taken += [job.next_rows(run, np.ones(NUM_ROWS)) for _ in range(start.step, job.total_steps())]
    rows = np.concatenate(taken)
    assert rows.tolist() == OrderedSampler(NUM_ROWS, 5, True).next_rows(len(rows))[0].tolist()
    assert 3 * NUM_ROWS - last < len(rows) <= 3 * NUM_ROWS, "the epochs end where they would have"


@pytest.mark.parametrize("name", ["train", "sft", "preference", "rm"])
def test_total_steps_count_the_rows_that_are_left(name: str) -> None:
    assert job_at(name, 5, FRESH).total_steps() == 13  # 69 rows
    kept = {"sampler": {}} if name == "train" else {}  # with its own position, that of the prompts drawn
    start = after(job_at(name, 5, FRESH), 6, **kept)
    assert start.state["consumed_rows"] == 30
    assert job_at(name, 5, start).total_steps() == 13
    assert job_at(name, 3, start).total_steps() == 6 + 13
    assert job_at(name, 3, after(job_at(name, 3, start), 8, **kept)).total_steps() == 6 + 13
    assert job_at(name, 5, start, epochs=1).total_steps() == 4, "fewer than were done"


@pytest.mark.parametrize(
    ("step", "state", "rows_per_step", "expected"),
    [
        (3, {"consumed_rows": 8}, 4, 12),  # supervised jobs left out the newest step
        (3, {"consumed_pairs": 8}, 2, 12),  # and had four rows per step, whatever the config has now
        (1, {"consumed_rows": 0}, 4, 4),
        (3, {}, 4, 12),
        (3, {"sampler": {"position": 40}}, 4, 12),  # prompts drawn and dropped
    ],
)
def test_checkpoints_of_earlier_versions(step: int, state: dict[str, Any], rows_per_step: int, expected: int) -> None:
    start = Start(step, None, state, None)
    assert start.consumed_rows(rows_per_step) == expected
    assert "sampler" in state or job_at("sft", rows_per_step, start).order.position == expected
