"""What is read from the folders of runs: slices and their ends, warnings, samples, curves; and what is damaged."""

from __future__ import annotations

import base64
import json
import os
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from hpcrl.observe.read.recorded_run import read_recorded_run, read_recorded_runs
from hpcrl.observe.read.samples import read_step_samples
from hpcrl.observe.report.charts import curves_of, evenly_spaced, group_seeds, phases_of
from hpcrl.observe.report.page import json_in_html, page_data
from hpcrl.observe.report.sample_choice import SampleChoice, far_apart, pack
from hpcrl.runtime.exits import write_exit
from tests.observe.stories import (
    NODES,
    WORDS,
    write_hostile_run,
    write_long_run,
    write_run_with_kills,
    write_samples,
    write_seeds,
)
from tests.observe.written_runs import write_config, write_events, write_log, write_metrics


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    return write_run_with_kills(tmp_path_factory.mktemp("runs") / "killed")


def test_the_story_of_kills_and_requeues(killed):
    run = read_recorded_run(killed)
    assert [attempt.outcome for attempt in run.attempts] == ["stopped", "killed", "hang", "running"]
    assert [attempt.requeued for attempt in run.attempts] == [True, True, True, False]
    assert [attempt.resumed_at for attempt in run.attempts] == [None, 20, 30, 40]
    assert [attempt.last_step for attempt in run.attempts] == [20, 33, 45, 52]
    assert [attempt.lost_steps for attempt in run.attempts] == [0, 3, 5, None]
    assert [attempt.saved for attempt in run.attempts] == [[10, 20], [30], [40], []]
    assert [(attempt.job, attempt.restart) for attempt in run.attempts] == [("17", number) for number in range(4)]
    assert [attempt.nodes for attempt in run.attempts] == list(NODES)
    stopped, dead, hang, _ = run.attempts
    assert "the allocation ends in 55s" in stopped.reason and "asking for restart 1" in stopped.reason
    assert "NODE FAILURE" in dead.reason and "srun's exit code 137" in dead.reason
    assert hang.reason.startswith("rank 6 on n3 is in actor.update_actor, no progress for 612 s")
    assert run.state == "running" and run.total_steps == 200
    assert [(saved.step, saved.gib) for saved in run.checkpoints] == [(30, 3.0), (40, 3.0)]
    assert [(slow.step, slow.rank, slow.node) for slow in run.stragglers] == [(32, 5, "n3"), (36, 5, "n3")]
    assert len(run.hangs) == 1 and run.hangs[0].startswith("# Hang: rank 6")


def test_warnings_are_grouped_without_their_numbers(killed):
    groups = {group.text: group for group in read_recorded_run(killed).warnings}
    slow = groups["rank 5 on n3 is 41% slower than its peers in actor.update_actor, in 7 of the last 10 steps"]
    assert (slow.count, slow.first, slow.last) == (2, "2026-11-25 11:12:00", "2026-11-25 12:05:00")
    several = groups["metrics of rank 1 took 1.5e-3 s"]
    assert several.count == 2 and several.ranks == {1, 2}
    assert not any("derived values" in text for text in groups)


@pytest.mark.parametrize(
    "gone", ["logs", "tensorboard", "slices.json", "slurm-17.out", "metrics.jsonl", "config.yaml", "checkpoints"]
)
def test_a_run_of_which_a_part_was_copied(killed, tmp_path, gone):
    run = tmp_path / "killed"
    shutil.copytree(killed, run)
    shutil.rmtree(run / gone) if (run / gone).is_dir() else (run / gone).unlink()
    found = read_recorded_run(run)
    assert len(found.attempts) == 4
    assert [attempt.resumed_at for attempt in found.attempts] == [None, 20, 30, 40]
    if gone == "slices.json":
        assert [attempt.job for attempt in found.attempts] == ["17"] * 4
    if gone == "tensorboard":
        assert [attempt.last_step for attempt in found.attempts] == [20, None, None, None]
    json_in_html(page_data([found]))


@pytest.mark.parametrize(
    ("code", "outcome"), [(0, "done"), (85, "stopped"), (86, "hang"), (87, "failed"), (2, "failed"), (None, "killed")]
)
def test_the_end_of_the_last_start(tmp_path, code, outcome):
    run = tmp_path / "run"
    write_metrics(run, [{"step": 1, "critic/score/mean": 0.5}])
    write_log(run, 0, [("10:00:00", "INFO", "derived values on 2 ranks"), ("10:00:01", "INFO", "step 1 of 9 begins")])
    if code is not None:
        (run / "exit.json").write_text(
            json.dumps({"code": code, "rank": 1, "role": "actor", "phase": "gen", "error": "E" * code})
        )
    else:
        old = time.time() - 3600
        os.utime(run / "metrics.jsonl", (old, old))
    found = read_recorded_run(run)
    assert found.state == outcome
    assert code in (0, None) or f"exit code {code}" in found.attempts[-1].reason


def test_a_failed_rank_ends_an_earlier_start(tmp_path):
    run = tmp_path / "run"
    write_metrics(run, [{"step": 1, "critic/score/mean": 0.5}])
    begin = [("10:00:00", "INFO", "derived values on 2 ranks"), ("10:00:01", "INFO", "step 1 of 9 begins")]
    write_log(
        run, 0, [*begin, ("11:00:00", "INFO", "derived values on 2 ranks"), ("11:00:01", "INFO", "step 1 of 9 begins")]
    )
    write_log(run, 1, [("10:30:00", "ERROR", "rank 1 ends the job\nTraceback (most recent call last):\nKeyError: 'x'")])
    first, second = read_recorded_run(run).attempts
    assert (first.outcome, first.reason) == ("failed", "rank 1: KeyError: 'x'")
    assert second.outcome == "running"


def test_a_log_of_an_older_version(tmp_path):
    """Without a line for the first step and without a save, the event file shows what the start did."""
    run = tmp_path / "run"
    write_metrics(run, [{"step": step, "critic/score/mean": 0.5} for step in (1, 2, 3)])
    write_log(run, 0, [("10:00:00", "INFO", "derived values on 2 ranks"), ("10:01:00", "INFO", "step 3: val 0.5")])
    write_events(run, 1_790_000_000, "n0", range(1, 4))
    write_exit(run, 0)
    (only,) = read_recorded_run(run).attempts
    assert (only.outcome, only.first_step, only.last_step, only.nodes) == ("done", 1, 3, "n0")


def test_seeds_are_joined_and_other_configs_are_not(tmp_path):
    runs = read_recorded_runs([str(path) for path in write_seeds(tmp_path)])
    groups = group_seeds(runs)
    assert groups == [("grpo (3 seeds)", [0, 1, 2]), ("dapo (3 seeds)", [3, 4, 5])]
    first, _ = curves_of(runs, groups, ["critic/score/mean", "val-core/maths/acc/mean@1"])
    values = np.array([[row["critic/score/mean"] for row in run.log.rows.values()] for run in runs[:3]])
    np.testing.assert_allclose(first["values"]["critic/score/mean"], values.mean(0), rtol=1e-6)
    np.testing.assert_allclose(first["band"]["critic/score/mean"], values.std(0), rtol=1e-6)
    write_config(runs[1].folder, run__seed=1, actor__clip_ratio=0.3)
    again = read_recorded_runs([str(run.folder) for run in runs])
    assert [members for _, members in group_seeds(again)] == [[0, 2], [1], [3, 4, 5]]
    assert [members for _, members in group_seeds(again, by_name=True)] == [[0, 1, 2], [3, 4, 5]]
    table = {row["key"]: row["values"] for row in page_data(again)["config"] if row["differs"]}
    assert table["actor.clip_ratio"] == ["0.2", "0.3", "0.2", "0.28", "0.28", "0.28"]


def test_phases_add_up_to_the_step(tmp_path):
    run = read_recorded_run(write_long_run(tmp_path / "run", 40))
    found = phases_of(run.log)
    total = np.sum(
        [values for phase, values in found["seconds"].items() if phase not in ("testing", "save_checkpoint")], 0
    )
    np.testing.assert_allclose(total, [row["timing_s/step"] for row in run.log.rows.values()], rtol=1e-5)
    assert list(found["seconds"])[:2] == ["gen", "update_actor"]


def test_samples_are_chosen_by_the_rule(tmp_path):
    run = tmp_path / "run"
    write_config(run)
    write_samples(run, range(10, 110, 10), prompts=8)
    data = SampleChoice(run, 10**7).data()
    steps = sorted({sample["step"] for sample in data["samples"] if sample["why"] != ["followed"]})
    assert steps == list(range(10, 110, 10))
    for step in steps:
        recorded = [sample.score for sample in read_step_samples(run, step)]
        chosen = [sample for sample in data["samples"] if sample["step"] == step]
        best, worst = ([one["score"] for one in chosen if why in one["why"]] for why in ("best", "worst"))
        assert sorted(best) == pytest.approx(sorted(recorded)[-2:])
        assert sorted(worst) == pytest.approx(sorted(recorded)[:2])
        assert sum("random" in one["why"] for one in chosen) == 4
    improved = [entry for entry in data["followed"] if entry["kind"] == "most improved"]
    gains = [entry["visits"][-1][1] - entry["visits"][0][1] for entry in improved]
    assert gains == sorted(gains, reverse=True) and gains[0] > 0.4
    small = SampleChoice(run, 20_000).data()
    assert 0 < len(json.dumps(small["samples"])) < 25_000
    assert {sample["step"] for sample in small["samples"]} >= {100}
    assert SampleChoice(run, 10**7).data() == data


def test_a_chosen_sample_is_the_recorded_one(tmp_path):
    run = tmp_path / "run"
    write_config(run)
    write_samples(run, range(1, 2))
    entry = SampleChoice(run, 10**7).data()["samples"][0]
    sample = read_step_samples(run, 1)[entry["row"]]
    assert entry["text"] == "".join(sample.token_texts) and entry["text"].endswith("<end>")
    assert entry["lengths"] == [len(text) for text in sample.token_texts]
    for name, values in (("advantage", sample.advantages), ("entropy", sample.entropies)):
        column = entry["columns"][name]
        steps = np.frombuffer(base64.b64decode(column["data"]), "<u2")
        np.testing.assert_allclose(column["low"] + steps / 65534 * (column["high"] - column["low"]), values, atol=1e-4)
    assert set(WORDS) > {entry["text"][: entry["lengths"][0]]}


def test_columns_with_nan_and_equal_values():
    assert pack(np.array([2.0, 2.0])) == {"low": 2, "high": 2}
    assert pack(np.array([np.nan])) == {"low": None, "high": None}
    steps = np.frombuffer(base64.b64decode(pack(np.array([1.0, np.nan, 3.0, np.inf]))["data"]), "<u2")
    assert steps.tolist() == [0, 0xFFFF, 65534, 0xFFFF]


@pytest.mark.parametrize("count", [0, 1, 2, 3, 10, 100])
def test_far_apart_is_a_permutation(count):
    order = list(far_apart(count))
    assert sorted(order) == list(range(count))
    assert order[:2] == [count - 1, 0][: len(order[:2])]
    assert len(evenly_spaced(range(count), 7)) == min(count, 7)


def test_a_hostile_run_is_data(tmp_path):
    """Texts of the run end no script element, and values stay JSON."""
    run = read_recorded_run(write_hostile_run(tmp_path / "run"))
    data = page_data([run])
    text = json_in_html(data)
    assert not set("<>&\u2028\u2029") & set(text)
    again = json.loads(text)
    assert again == json.loads(json.dumps(data))
    texts = [sample["text"] for sample in again["runs"][0]["samples"]["samples"]]
    assert any("<script>window.attacked = 1</script>" in found for found in texts)
    assert all(len(found) < 50_000 for found in texts)
    assert any("metrics of 20 steps" in note for note in run.notes)
    assert any("step_00000003.h5" in note for note in again["runs"][0]["notes"])
    assert again["curves"][0]["values"]["critic/score/mean"][10:20] == [None] * 10


def run_report(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "hpcrl", "report", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_the_command(killed, tmp_path):
    out = tmp_path / "report.html"
    done = run_report(killed, "--out", out)
    assert done.returncode == 0, done.stderr
    verdict, file = done.stdout.splitlines()
    assert verdict.startswith("killed: Reward rose from ") and file.startswith(f"{out}: ")
    assert list(tmp_path.iterdir()) == [out]
    for arguments, words in (
        ((tmp_path / "none",), "found nothing; expected the folder of a run"),
        ((tmp_path,), "found none of metrics.jsonl"),
        ((killed, "--out", tmp_path / "no" / "x.html"), "expected a file in a folder that exists"),
        ((), "the following arguments are required: RUN"),
    ):
        done = run_report(*arguments)
        assert done.returncode == 2 and words in done.stderr and done.stderr.count("\n") == 1, done.stderr


def test_a_report_of_a_thousand_steps_is_small_and_quick(tmp_path):
    """Without torch and MPI; times are those of a shared machine, so the bound is the issue's and not the usual."""
    run = write_long_run(tmp_path / "long", 1000, archived=range(100, 1001, 100))
    program = (
        "import sys; from hpcrl.observe.report.page import write_report; from pathlib import Path\n"
        f"out = Path({str(tmp_path / 'r.html')!r})\nwrite_report([{str(run)!r}], out)\nsize = out.stat().st_size\n"
        "assert not {'torch', 'mpi4py', 'pydantic', 'matplotlib', 'transformers'} & set(sys.modules)\n"
        # Not ru_maxrss, which counts the process that started this one.
        "print(size, next(line for line in open('/proc/self/status') if line.startswith('VmHWM')).split()[1])"
    )
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=Path(__file__).parents[2]
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0, done.stderr
    size, kib = map(int, done.stdout.split())
    assert size < 10e6 and kib < 500 * 1024
    assert after.ru_utime - before.ru_utime < 20
