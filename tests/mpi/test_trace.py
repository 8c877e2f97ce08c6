"""The trace of real runs: it accounts for the whole step on each rank, has what ranks sent, and changes no number."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from hpcrl.observe.trace.command import export
from hpcrl.observe.trace.records import ClockAligner, TraceFiles, trace_path
from hpcrl.run.time_budget import TimeBudget
from hpcrl.runtime.mpi import barrier, wait
from tests.mpi.lab import Lab, metrics, on
from tests.mpi.test_async import APART, GRPO
from tests.trace_format import Event, Trace

SPLIT = {**on(2), "actor": {"tp": 2}, "ref": {"tp": 2}, "rollout": {"tp": 1}}  # so that rows and weights move


def logged(run: Path, step: int) -> dict[str, float]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return next(line for line in lines if line["step"] == step)


def trace_of(world, run: Path, step: str, report=pytest.fail) -> Trace:
    """The exported trace, on every rank."""
    out = run / f"trace_{step.replace(':', '_')}.json"
    if world.rank == 0:
        export(run, step, out, report=report)
    world.barrier()
    return Trace(out)


def bounds(trace: Trace) -> tuple[float, float]:
    """Where the step begins and ends, in microseconds."""
    (step,) = [event for event in trace.slices["rank 0"] if event["name"] == "controller.step"]
    return step["ts"], step["ts"] + step["dur"]


def clipped(events: list[Event], begin: float, end: float) -> float:
    """Seconds of the events between two times."""
    return sum(max(0.0, min(e["ts"] + e["dur"], end) - max(e["ts"], begin)) for e in events) / 1e6


class StopInStep:
    """A signal that arrives while this step generates."""

    def __init__(self, step: int) -> None:
        self.steps_left = step

    def reason_to_stop(self, *phases: str) -> str | None:
        self.steps_left -= phases[0] == "old_log_prob"
        return "SIGTERM, before old_log_prob" if phases[0] == "old_log_prob" and self.steps_left == 0 else None


@pytest.mark.ci_world(2)
@pytest.mark.world(2)
def test_waiting_and_work_are_the_step_and_numbers_stay(world, lab: Lab) -> None:
    steps = {"total_training_steps": 3, "save_freq": 3}
    plain = lab.run("untraced", SPLIT, trainer={**steps, "trace_steps": "none"})
    run = lab.run("traced", SPLIT, trainer=steps)
    assert metrics(run) == metrics(plain)
    assert not (plain / "trace").exists()
    assert sorted(path.name for path in (run / "trace").iterdir()) == ["rank_00000.log", "rank_00001.log"]

    trace, line = trace_of(world, run, "2"), logged(run, 2)
    begin, end = bounds(trace)
    assert (end - begin) / 1e6 == pytest.approx(line["timing_s/step"], rel=0.05)
    work: dict[str, list[float]] = {}
    for rank in range(2):
        track = trace.slices[f"rank {rank}"]
        outer = [event for event in track if event["depth"] == 0]
        waits = [event for event in track if event["cat"] == "wait"]
        working = [event for event in outer if event["cat"] != "wait"]
        waited_inside = sum(event["args"].get("waited_ms", 0.0) for event in working) / 1e3
        waiting = clipped([event for event in outer if event["cat"] == "wait"], begin, end) + waited_inside
        working_seconds = clipped(working, begin, end) - waited_inside
        assert waiting + working_seconds == pytest.approx(line["timing_s/step"], rel=0.05)
        assert waiting == pytest.approx(clipped(waits, begin, end), rel=0.1, abs=5e-3)  # what is drawn
        for event in track:
            if event["cat"] == "command":
                own = event["dur"] / 1e6 - event["args"]["waited_ms"] / 1e3
                work.setdefault(event["name"], [0.0, 0.0])[rank] += own
    for name in ("actor.update_actor", "critic.update_critic", "rollout.generate"):
        busy = [line[f"perf/busy_s/{name}/{which}"] for which in ("min", "max")]
        assert sorted(work[name]) == pytest.approx(busy, rel=0.05, abs=5e-3)
    names = {event["name"] for event in trace.slices["rank 1"]}
    assert {"actor.compute_log_prob", "forward-compute", "optimizer", "decode"} <= names
    assert any("scorer 0" in name for name in trace.threads.values())
    assert any(counter["args"]["GiB"] > 0.05 for counter in trace.of("C"))

    # what the planner and the controller count as sent
    sent: dict[str, int] = {"refit": 0, "columns": 0}
    for flow in trace.flows:
        assert flow.start["args"] == flow.end["args"]
        ends = [trace.threads[event["pid"], event["tid"]] for event in flow]
        assert ends == [f"rank {flow.end['args'][end]}" for end in ("source", "destination")]
        sent[flow.end["cat"]] += flow.end["args"]["bytes"]
    assert sent["refit"] == line["perf/bytes/update_weights"] > 0
    moved = {name: count for name, count in line.items() if name.startswith("perf/bytes/")}
    del moved["perf/bytes/update_weights"]
    assert sent["columns"] == sum(moved.values()) > 0

    last = trace_of(world, run, "3")  # followed by a save
    assert {"rank 0 save actor", "rank 1 save critic", "rank 0 commit"} <= set(last.threads.values())


@pytest.mark.ci_world(2)
@pytest.mark.world(2)
def test_a_stopped_and_resumed_run(world, lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """The trace has the request to stop, the torn file of a rank loses one record only, and the next slice goes on."""
    options = {"total_training_steps": 4}
    with monkeypatch.context() as patch:
        patch.setattr(TimeBudget, "reason_to_stop", StopInStep(3).reason_to_stop)
        run = lab.run("resumed_trace", SPLIT, trainer=options)
    stopped = trace_of(world, run, "2")  # with what follows it: the step that was stopped, and the save
    assert [event["name"] for event in stopped.of("i")] == ["stopping: SIGTERM, before old_log_prob"]
    for rank in range(2):
        names = [event["name"] for event in stopped.slices[f"rank {rank}"]]
        assert names.count("rollout.generate") == 2 and names.count("actor.update_actor") == 1
    assert "rank 1 save actor" in stopped.threads.values()
    if world.rank == 0:
        path = trace_path(run, 1)
        path.write_bytes(path.read_bytes()[:-20])
        reports: list[str] = []
        export(run, "2", run / "torn.json", report=reports.append)
        assert len(reports) == 1 and "rank_00001.log" in reports[0]
        assert "rank 1" in Trace(run / "torn.json").threads.values()
    world.barrier()
    lab.run("resumed_trace", SPLIT, trainer=options)
    files = TraceFiles(run, pytest.fail)
    assert files.steps == [1, 2, 3, 4] and files.ranks == [0, 1]
    assert len({files.window(step).slice_ns for step in files.steps}) == 2
    trace = trace_of(world, run, "1:4")
    for rank in range(2):
        assert [event["name"] for event in trace.slices[f"rank {rank}"]].count("actor.update_actor") == 4


@pytest.mark.ci_world(2)
@pytest.mark.world(2)
def test_every_second_step_of_supervised_training(world, lab: Lab) -> None:
    run = lab.run_sft("traced_sft", sft={"batch_size": 8, "total_training_steps": 5}, trainer={"trace_steps": 2})
    assert TraceFiles(run, pytest.fail).steps == [1, 2, 4]
    trace = trace_of(world, run, "4")
    assert {"data.load", "actor.update"} <= {event["name"] for event in trace.slices["rank 1"]}
    assert not any(flow.start["cat"] == "refit" for flow in trace.flows)


@pytest.mark.slow
@pytest.mark.world(4)
def test_a_command_that_never_ends_is_in_the_trace_of_each_step(world, lab: Lab) -> None:
    options = {"total_training_steps": 4}
    run = lab.run("traced_stream", APART, async_training={"mode": "bounded_staleness"}, algorithm=GRPO, trainer=options)
    trace = trace_of(world, run, "3")
    begin, end = bounds(trace)
    for rank in range(4):
        outer = [event for event in trace.slices[f"rank {rank}"] if event["depth"] == 0]
        assert clipped(outer, begin, end) == pytest.approx((end - begin) / 1e6, rel=0.05)


@pytest.mark.ci_world(2)
@pytest.mark.world(2, 4)
def test_clocks_of_other_kernels_are_measured(world) -> None:
    """Every rank claims a kernel of its own, and a clock that is ahead by its rank."""
    comm = world.comm

    def clock() -> float:
        return time.perf_counter() + 1000.0 * world.rank

    barrier(comm)
    found = ClockAligner(comm, clock, f"kernel {world.rank}").measure()
    assert abs(found.offset - 1000.0 * world.rank) <= found.error + 1e-6
    assert found.error < 0.05 and abs(found.at - clock()) < 60.0
    same = ClockAligner(comm).measure()
    assert (same.offset, same.error) == (0.0, 0.0)
    wait(comm.Ibarrier())
