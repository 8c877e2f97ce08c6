"""`hpcrl trace`: what is recorded, kept and read back, and the format that Perfetto reads."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcrl.observe.record.archive import read_records
from hpcrl.observe.trace.command import export
from hpcrl.observe.trace.perfetto import Slice, nested
from hpcrl.observe.trace.rank_trace import NEWEST, TraceFile, discard_from, discard_other_ranks
from hpcrl.observe.trace.records import Alignment, TraceFiles, encode, trace_path
from hpcrl.runtime.exits import InputError
from hpcrl.runtime.spans import MOST_EVENTS, WAIT, Beside, Counter, Events, Instant, Recorded, SpanRecorder, Transfer
from tests.observe.test_tools import synthetic_rows, write_run
from tests.trace_format import Trace, seconds_by_name

ROOT = Path(__file__).parents[2]
WALL = 1.7e9  # seconds since the epoch at time 0 of rank 0's clock
STEP = 10.0  # seconds from the begin of a step to that of the next


def clock_of(rank: int, at: float) -> float:
    """The rank's clock at a time of rank 0's: two ranks share a node, and the second node's clock is 3 ppm fast."""
    return at if rank < 2 else at + 5000.0 + 3e-6 * at


def write_rank(run: Path, rank: int, steps: range, *, slice_ns: int = 1, first_step: int = 1, **limit: int) -> None:
    """The trace file of a rank: in each step a command, with a wait for one second, and a transfer from 0 to each other
    rank."""
    file = TraceFile(trace_path(run, rank), first_step, **limit)
    measured = [Alignment(clock_of(rank, at), clock_of(rank, at) - at, 2e-6) for at in (0.0, 10_000.0)]
    for step in steps:
        file.append(encode_step(rank, step, slice_ns, measured))
    file.close()


def encode_step(rank: int, step: int, slice_ns: int, clock: list[Alignment], width: int = 0) -> dict[str, Any]:
    begin = STEP * step

    def at(seconds: float) -> float:
        return clock_of(rank, begin + seconds)

    command, name = 10 * step, "actor.update_actor"
    found = Events(at(-1.0), at(9.0), 1.0)
    found.spans = [
        Recorded(at(2.0), at(3.0), WAIT, 1.0, 0),
        Recorded(at(1.0), at(4.0), "forward-compute", 1.0, 0),
        Recorded(at(0.5), at(6.0), name, 1.0, command),
    ]
    found.spans += [Recorded(at(6 + n / 1e4), at(6 + n / 1e4 + 5e-5), "decode", 0.0, 0) for n in range(width)]
    others = [1, 2, 3] if rank == 0 else [rank]
    found.transfers = [Transfer(at(1.5), at(1.6), "columns", command, 0, other, 100 * other) for other in others]
    if rank == 0:
        found.spans.append(Recorded(at(0.0), at(8.0), "controller.step", 1.0, 0))
        found.instants = [Instant(at(7.0), "stopping: SIGTERM")]
    found.beside = [Beside(at(n), at(n + 1.5), "scorer 0", "score") for n in range(3)]  # one beside another
    found.counters = [Counter(at(5.0), "memory host", 2**30)]
    node = f"cn{rank // 2}"
    wall = WALL - (clock_of(rank, 0.0) - 0.0)
    return encode(found, step=step, rank=rank, node=node, slice_ns=slice_ns, wall=wall, clock=clock)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    folder.mkdir()
    for rank in range(4):
        write_rank(folder, rank, range(1, 5))
    return folder


def exported(run: Path, step: str | None, report=pytest.fail) -> Trace:
    out = run.parent / "trace.json"
    export(run, step, out, report=report)
    return Trace(out)


def test_a_step_of_four_ranks_on_two_nodes(run: Path) -> None:
    (run / "stragglers.jsonl").write_text('{"step": 2, "rank": 3, "node": "cn1", "phase": "a.b", "ratio": 1.5}\n{"st')
    trace = exported(run, "2")
    assert sorted(trace.processes.values()) == ["node cn0", "node cn1"]
    assert {"rank 0", "rank 3", "rank 3 scorer 0", "rank 3 scorer 0 (2)"} <= set(trace.threads.values())
    for rank in range(4):
        track = trace.slices[f"rank {rank}"]
        seconds = seconds_by_name(track)
        assert seconds["actor.update_actor"] == pytest.approx(5.5) and seconds[WAIT] == pytest.approx(1.0)
        (update,) = [event for event in track if event["name"] == "actor.update_actor"]
        # a clock that is 5,000 s ahead and drifts by 3 us per second is where rank 0's is
        assert update["ts"] == pytest.approx(0.5e6, abs=1.0)
        assert update["args"] == {"waited_ms": 1000.0, "command": 20}
        (wait,) = [event for event in track if event["name"] == WAIT]
        assert (wait["cat"], wait["cname"], update["cat"]) == (WAIT, "grey", "command")
    assert sorted(flow.end["args"]["bytes"] for flow in trace.flows) == [100, 200, 300]
    for flow in trace.flows:
        sender, receiver = (trace.threads[event["pid"], event["tid"]] for event in flow)
        assert (sender, receiver) == ("rank 0", f"rank {flow.end['args']['destination']}")
        assert 0 <= flow.end["ts"] - flow.start["ts"] <= 0.2e6
    assert {event["name"] for event in trace.of("i")} == {"stopping: SIGTERM", "straggler in a.b: 1.5 times the median"}
    assert {event["args"]["GiB"] for event in trace.of("C")} == {1.0}
    assert trace.metadata["source"] == "trace/" and trace.metadata["steps"] == "2"
    assert trace.metadata["largest_clock_error_us"] == 2.0 and not trace.metadata["ranks_without_records"]


def test_steps_of_several_slices_are_in_one_file_by_wall_time(run: Path) -> None:
    for rank in range(4):
        path = trace_path(run, rank)
        discard_from(path, 3)  # as the second slice does, which begins again after step 2
        file = TraceFile(path, 3)
        for step in (3, 4):
            record = encode_step(rank, step, 2, [Alignment(clock_of(rank, 0), clock_of(rank, 0), 1e-6)])
            file.append(record | {"wall": record["wall"] + 3600 * 10**9})
        file.close()
    trace = exported(run, "2:3")
    starts = [event["ts"] for event in trace.slices["rank 3"] if event["name"] == "actor.update_actor"]
    assert starts[1] - starts[0] == pytest.approx((3600 + STEP) * 1e6, abs=100.0)
    assert exported(run, None).metadata["steps"] == "4"  # the newest


def test_torn_and_missing_files_leave_the_rest(run: Path) -> None:
    whole = trace_path(run, 1).read_bytes()
    trace_path(run, 1).write_bytes(whole[: int(len(whole) * 0.6)])  # killed in its third record
    trace_path(run, 2).unlink()
    reports: list[str] = []
    assert exported(run, "2", reports.append).metadata["ranks_without_records"] == {}
    trace = exported(run, "3", reports.append)
    assert {"rank 0", "rank 3"} <= set(trace.threads.values()) and "rank 1" not in trace.threads.values()
    assert trace.metadata["ranks_without_records"] == {"3": [1]}
    assert reports and all("rank_00001.log: record 2" in line and "torn or damaged" in line for line in reports)
    trace_path(run, 0).unlink()
    assert "rank 3" in exported(run, "2", reports.append).threads.values()
    trace_path(run, 1).write_bytes(b"\0" * 100)
    trace_path(run, 3).write_text("not a trace")
    with pytest.raises(InputError, match="neither metrics.jsonl nor"):
        export(run, "2", run / "trace.json", report=reports.append)


def test_a_run_without_a_trace_shows_its_phases_in_sequence(tmp_path: Path) -> None:
    rows = synthetic_rows(30)
    run = write_run(tmp_path / "old", rows)
    (run / "stragglers.jsonl").write_text('{"step": 20, "rank": 7, "node": "n", "phase": "a.b", "ratio": 2.0}\n')
    trace = exported(run, "20")
    row = next(row for row in rows if row["step"] == 20)
    phases = trace.slices["phases in sequence"]
    expected = {key.removeprefix("timing_s/"): value for key, value in row.items() if key.startswith("timing_s/")}
    del expected["step"]
    assert dict(seconds_by_name(phases)) == pytest.approx(expected, abs=1e-6)
    assert all(event["depth"] == 0 for event in phases)
    assert trace.metadata["source"] == "metrics.jsonl" and "No trace of these steps" in trace.metadata["note"]
    assert [event["name"] for event in trace.of("i")] == ["rank 7: straggler in a.b: 2.0 times the median"]
    assert exported(run, None).metadata["steps"] == "30"


def test_old_steps_are_thinned_alike_on_all_ranks(tmp_path: Path) -> None:
    limit, run = 400_000, write_run(tmp_path / "run", synthetic_rows(1000))
    for rank, width in ((0, 30), (1, 90)):
        file = TraceFile(trace_path(run, rank), 1, largest_bytes=limit)
        for step in range(1, 1001):
            file.append(encode_step(rank, step, 1, [Alignment(0.0, 0.0, 0.0)], width))
        file.close()
        assert trace_path(run, rank).stat().st_size <= 1.05 * limit
    of_rank = [[record["step"] for record in read_records(trace_path(run, rank), pytest.fail)] for rank in (0, 1)]
    for kept in of_rank:
        assert kept[-NEWEST:] == list(range(1001 - NEWEST, 1001))
        old = [step for step in kept if step + 1 not in kept][:-1]  # the newest ones follow one another
        assert len(old) > 20 and all(step % old[0] == 0 for step in old) and old[0].bit_count() == 1
    assert len(set(of_rank[0]) & set(of_rank[1])) > NEWEST + 20
    assert TraceFiles(run, pytest.fail).steps == of_rank[0]
    assert exported(run, "3").metadata["source"] == "metrics.jsonl"  # a step that was dropped


def test_a_resumed_run_drops_the_records_of_steps_that_it_repeats(run: Path) -> None:
    path = trace_path(run, 0)
    whole = path.read_bytes()
    path.write_bytes(whole[:-10])  # and the last record is torn
    write_rank(run, 0, range(4, 6), slice_ns=2, first_step=3)
    assert TraceFiles(run, pytest.fail).steps == [1, 2, 4, 5]
    write_rank(run, 0, range(1, 2), slice_ns=3, first_step=1)
    assert TraceFiles(run, pytest.fail).steps == [1]

    discard_other_ranks(run, 3, num_ranks=2)  # the run continues on two ranks
    kept = [[record["step"] for record in read_records(trace_path(run, rank), pytest.fail)] for rank in (1, 2, 3)]
    assert kept == [[1, 2, 3, 4], [1, 2], [1, 2]]


@pytest.mark.parametrize(
    ("step", "line"),
    [
        ("9", r"has no step 9; expected one of 1-4"),
        ("x", "--step x: expected a number of a step, or A:B"),
        ("3:1", "the first step is after the last one"),
    ],
)
def test_what_is_not_there_is_one_line(run: Path, step: str, line: str) -> None:
    with pytest.raises(InputError, match=line):
        export(run, step, run / "trace.json")
    assert not (run / "trace.json").exists()


def test_the_command_needs_neither_torch_nor_mpi_and_little_time(tmp_path: Path) -> None:
    """Of 1,000 steps on 4 ranks, in a process of its own."""
    run = tmp_path / "run"
    for rank in range(4):
        file = TraceFile(trace_path(run, rank), 1)
        for step in range(1, 1001):
            file.append(encode_step(rank, step, 1, [Alignment(0.0, 0.0, 0.0)], 250))
        file.close()
    program = f"""
import resource, sys
from hpcrl import cli
try:
    cli.main(["trace", {str(run)!r}, "--step", "990", "--out", {str(tmp_path / "trace.json.gz")!r}])
except SystemExit as end:
    assert end.code == 0
assert not {{"torch", "mpi4py"}} & set(sys.modules)
used = resource.getrusage(resource.RUSAGE_SELF)
most = next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1]
print(used.ru_utime + used.ru_stime, most)  # not ru_maxrss, which counts the process that started this one
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    said, numbers = done.stdout.splitlines()
    assert said.startswith(f"{tmp_path / 'trace.json.gz'}: step 990") and said.endswith("https://ui.perfetto.dev")
    seconds, kilobytes = map(float, numbers.split())
    assert seconds < 5 and kilobytes < 500e3
    assert len(Trace(tmp_path / "trace.json.gz").of("X")) > 4 * 250


@st.composite
def programs(draw: Any, depth: int = 3) -> list[Any]:
    """A tree of what a rank does: seconds of work, waits that may contain commands, ranges, and takes."""
    kinds = ["work", "wait", "range", "take"] if depth else ["work", "take"]
    steps = draw(st.lists(st.sampled_from(kinds), max_size=4))
    return [(kind, draw(programs(depth - 1)) if kind in ("wait", "range") else []) for kind in steps]


def run_program(recorder: SpanRecorder, now: list[float], program: list[Any], taken: list[Events], waits: bool) -> None:
    for kind, inner in program:
        if kind == "work":
            now[0] += 1.0
        elif kind == "take":
            taken.append(recorder.take())
        elif kind == "range":
            with recorder.span(f"range {len(taken)}"):
                run_program(recorder, now, inner, taken, waits)
        else:
            if not waits:  # as `wait_for_ranks`, whose inner calls are no waits of their own
                recorder.begin_wait(now[0])
            now[0] += 1.0
            run_program(recorder, now, inner, taken, True)
            if not waits:
                recorder.end_wait(now[0])


@settings(deadline=None, max_examples=200)
@given(program=programs())
def test_spans_nest_and_waits_are_counted_once(program: list[Any]) -> None:
    now, taken = [0.0], list[Events]()
    recorder = SpanRecorder(lambda: now[0])
    recorder.start()
    run_program(recorder, now, program, taken, False)
    taken.append(recorder.take())
    assert taken[-1].ended == now[0] and sum(one.ended - one.began for one in taken) == now[0]
    spans = [span for one in taken for span in one.spans]
    slices = [Slice(round(one.began * 1e9), -round(one.ended * 1e9), one.name, "", {}) for one in spans]
    assert sorted(one[:2] for one in nested(slices)) == sorted(one[:2] for one in slices)  # none was cut
    assert sum(span.waited for span in spans if span.name == WAIT) == sum(one.waited for one in taken)
    assert all(0 <= span.waited <= span.ended - span.began for span in spans)


def test_a_step_of_very_many_spans_keeps_the_longest() -> None:
    now = [0.0]
    recorder = SpanRecorder(lambda: now[0])
    recorder.start()
    with recorder.span("rollout.generate", command=7):
        for number in range(20 * MOST_EVENTS):
            with recorder.span("decode"):
                now[0] += 1e-3 if number % 100 else 1.0
            recorder.begin_wait(now[0])
            now[0] += 1e-4
            recorder.end_wait(now[0])
    found = recorder.take()
    assert len(found.spans) <= MOST_EVENTS and found.num_dropped > MOST_EVENTS and found.shortest > 1e-4
    assert sum(span.ended - span.began == pytest.approx(1.0) for span in found.spans) >= 20 * MOST_EVENTS // 100
    (generate,) = [span for span in found.spans if span.name == "rollout.generate"]
    assert generate.waited == found.waited == pytest.approx(20 * MOST_EVENTS * 1e-4)
    assert recorder.take().shortest == 0.0  # of the next step everything is kept again


def test_nothing_is_recorded_before_the_start() -> None:
    recorder = SpanRecorder()
    with recorder.span("a", command=3):
        recorder.begin_wait(0.0)
        recorder.end_wait(1.0)
        recorder.add_transfer("columns", 0, 1, 10, 0.0, 1.0)
        recorder.add_beside("save", "write", 0.0, 1.0)
    found = recorder.take()
    assert not (found.spans or found.transfers or found.beside or found.waited)


def test_a_file_that_cannot_be_written_costs_a_warning(run: Path, monkeypatch, caplog) -> None:
    path = trace_path(run, 0)
    file = TraceFile(path, 5)
    clock = [Alignment(0.0, 0.0, 0.0)]
    file.append(encode_step(0, 5, 1, clock))

    def full(self: Any, record: Any) -> None:
        self._file.write(b"half of a rec")
        self._file.flush()
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("hpcrl.observe.record.archive.RecordLog.append", full)
        for step in (6, 7):
            file.append(encode_step(0, step, 1, clock))
    file.append(encode_step(0, 8, 1, clock))
    file.close()
    assert [record.getMessage() for record in caplog.records] == [
        "the trace cannot be written: [Errno 28] No space left on device; the run continues and tries again"
    ]
    assert TraceFiles(run, pytest.fail).steps == [1, 2, 3, 4, 5, 8]


def test_names_of_a_trace_are_data(run: Path) -> None:
    """A node or a plugin's method may have any name."""
    record = encode_step(0, 5, 2, [Alignment(0.0, 0.0, 0.0)])
    file = TraceFile(trace_path(run, 0), 5)
    file.append(record | {"node": '</script>"\\\n\u2028'})
    file.close()
    assert 'node </script>"\\\n\u2028' in exported(run, "5").processes.values()
    assert json.loads((run.parent / "trace.json").read_text())


def test_a_picture(run: Path) -> None:
    export(run, "2", run / "trace.json", run / "trace.png")
    assert (run / "trace.png").read_bytes().startswith(b"\x89PNG")
