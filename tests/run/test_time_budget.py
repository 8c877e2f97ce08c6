"""When a slice of a run is left, and when one is not begun."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from hpcrl.observe.record.progress import PhaseTimers
from hpcrl.run.time_budget import TimeBudget, check_progress
from hpcrl.runtime.exits import InputError
from hpcrl.runtime.launcher import end_of_allocation

END = 1000.0


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def make(folder: Path, clock: Clock, ends_at: float | None = END, signals: tuple[str, ...] = ()) -> TimeBudget:
    timers = PhaseTimers(clock)
    for phase, seconds in {"gen": 100.0, "update_actor": 50.0, "save_checkpoint": 20.0}.items():
        timers.took(phase, seconds)
    requested = lambda: signals[0] if signals else None  # noqa: E731
    return TimeBudget(folder, timers, requested=requested, ends_at=ends_at, margin=30.0, clock=clock)


@pytest.mark.parametrize(
    ("now", "saves", "phases", "leaves"),
    [
        (850.0, 1, ("gen",), False),  # 100 + 20 + 30 are left
        (850.1, 1, ("gen",), True),
        (850.0, 2, ("gen",), True),  # a save is under way, and another one has to follow
        (900.0, 1, ("update_actor",), False),
        (850.0, 1, ("gen", "update_actor"), True),
        (949.0, 1, ("never measured",), False),
    ],
)
def test_a_phase_begins_where_it_fits_with_a_save(tmp_path, now, saves, phases, leaves) -> None:
    clock = Clock()
    part = make(tmp_path, clock)
    part.num_saves = lambda: saves
    clock.now = now
    reason = part.reason_to_stop(*phases)
    assert (reason or "").startswith("the allocation ends in") == leaves == (reason is not None)


def test_a_signal_stops_the_run_before_the_next_phase(tmp_path) -> None:
    budget = make(tmp_path, Clock(), ends_at=None, signals=("SIGURG on rank 3 (n1)",))
    assert budget.reason_to_stop("reward") == "SIGURG on rank 3 (n1), before reward"


def test_later_slices_know_what_was_measured(tmp_path) -> None:
    clock = Clock()
    part = make(tmp_path, clock)
    with part.timers("step"):
        clock.now = 170.0
    part.write_times()
    times = json.loads((tmp_path / "times.json").read_text())
    assert (times["step_s"], times["save_s"]) == (170.0, 20.0)
    again = TimeBudget(tmp_path, timers := PhaseTimers(), requested=lambda: None, ends_at=END, margin=30.0, clock=clock)
    clock.now = 900.0
    assert "gen and a save take 2m00s" in str(again.reason_to_stop("gen"))
    timers.took("gen", 20.0)
    assert again.reason_to_stop("gen") is None  # an exception once is not planned with for ever


def test_two_slices_without_progress_end_a_chain(tmp_path) -> None:
    def start(job: str, restart: int, step: int) -> None:
        check_progress(tmp_path, step, None, 0.0, {"SLURM_JOB_ID": job, "SLURM_RESTART_COUNT": str(restart)})

    for restart, step in enumerate((-1, -1, 5, 5, 6, 6)):
        start("7", restart, step)
    start("7", 5, 6)  # a person tries again in the same allocation
    with pytest.raises(InputError, match="the last 2 slices of job 7 began with the checkpoint of step 6, and so does"):
        start("7", 6, 6)
    start("8", 0, 6)  # submitted anew
    assert json.loads((tmp_path / "slices.json").read_text())[-1] == {
        "job": "8",
        "restart": 0,
        "step": 6,
        "ends_at": None,
    }
    check_progress(tmp_path, 6, None, 0.0, {})  # no batch system: nothing starts it again by itself


def test_a_slice_too_short_for_a_step_and_a_save_is_refused(tmp_path) -> None:
    now = time.time()
    check_progress(tmp_path, -1, now + 1, 60.0, {})  # nothing is known yet
    (tmp_path / "times.json").write_text('{"step_s": 500.0, "save_s": 100.0}')
    check_progress(tmp_path, 3, now + 700, 60.0, {})
    with pytest.raises(InputError, match=r"a step and a save of this run took 10m00s, and 60 s are kept free"):
        check_progress(tmp_path, 3, now + 650, 60.0, {})


def test_the_end_is_what_the_template_or_slurm_says() -> None:
    assert end_of_allocation({"HPCRL_END_TIME": "1700000000", "SLURM_JOB_END_TIME": "1"}) == 1.7e9
    assert end_of_allocation({"SLURM_JOB_END_TIME": "1700000000"}) == 1.7e9
    assert end_of_allocation({}) is None
