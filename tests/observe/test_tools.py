"""Metrics of runs on a login node: `hpcrl report` with --text, --scalars, or a picture as --out."""

from __future__ import annotations

import csv
import io
import json
import math
import os
import random
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from hpcrl.observe.read.runlog import SeedMean, over_seeds, read_run, read_runs
from hpcrl.observe.record.writer import MetricsWriter
from hpcrl.observe.report import tables
from hpcrl.observe.report.page import report_main
from hpcrl.observe.report.pictures import smooth


def synthetic_rows(steps: int = 100, seed: int = 0, gain: float = 0.5) -> list[dict[str, float]]:
    """A run that looks like a PPO run, without one."""
    rng = random.Random(seed)
    rows = [{"step": 0, "val-core/countdown/acc/mean@1": 0.22, "val-core/countdown-sampled/acc/mean@4": 0.19}]
    for step in range(1, steps + 1):
        learned = gain * (1 - math.exp(-step / 40))
        row = {
            "step": step,
            "critic/score/mean": 0.2 + learned + rng.gauss(0, 0.03),
            "actor/ppo_kl": abs(rng.gauss(0.002, 0.0008)),
            "actor/entropy": 1.1 - 0.8 * learned + rng.gauss(0, 0.02),
            "actor/pg_loss": rng.gauss(0, 0.01),
            "response_length/mean": 14 + 4 * learned + rng.gauss(0, 0.4),
            "perf/total_num_tokens": 9000 + rng.randrange(400),
        }
        phases = {"gen": 1.2, "reward": 0.02, "old_log_prob": 0.3, "ref": 0.3, "values": 0.2, "adv": 0.01}
        phases |= {"update_critic": 0.6, "update_actor": 0.9, "update_weights": 0.05}
        for name, mean in phases.items():
            row[f"timing_s/{name}"] = mean * rng.uniform(0.9, 1.15)
        row["timing_s/step"] = sum(row[f"timing_s/{name}"] for name in phases)
        if step % 20 == 0:
            row["val-core/countdown/acc/mean@1"] = 0.22 + 0.6 * learned
            row["val-core/countdown-sampled/acc/mean@4"] = 0.19 + 0.8 * learned
            row["timing_s/testing"] = 4.0
        rows.append(row)
    return rows


def write_run(folder: Path, rows: list[dict[str, float]]) -> Path:
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture
def runs(tmp_path):
    first = write_run(tmp_path / "first", synthetic_rows(50, seed=0))
    return first, write_run(tmp_path / "second", synthetic_rows(40, seed=1))


def report(*arguments: object) -> int:
    """Exit code of `hpcrl report`."""
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as end:
        patch.setattr(os, "_exit", sys.exit)
        report_main([*map(str, arguments)])
    return int(end.value.code or 0)


def table(capsys, *arguments: object) -> list[list[str]]:
    assert report(*arguments, "--csv") == 0
    return list(csv.reader(io.StringIO(capsys.readouterr().out)))


def test_summary_statistics(tmp_path, capsys):
    run = write_run(tmp_path / "run", [{"step": s, "critic/score/mean": s if s != 3 else None} for s in range(1, 21)])
    assert table(capsys, run) == [
        ["key", "first", "last", "min", "max", "mean10"],
        ["critic/score/mean", "1.0", "20.0", "1.0", "20.0", "15.5"],
    ]
    assert table(capsys, run, "--steps", "2:4")[1] == ["critic/score/mean", "2.0", "4.0", "2.0", "4.0", "3.0"]


def test_several_runs_side_by_side(runs, capsys):
    rows = table(capsys, *runs, "--keys", "score/mean$")
    assert [row[:2] for row in rows[1:]] == [["critic/score/mean", "first"], ["critic/score/mean", "second"]]
    last = table(capsys, *runs, "--keys", "score/mean$|testing", "--last")
    assert last[0] == ["key", "first", "second"]
    assert last[-1] == ["timing_s/testing", "4.0", "4.0"]
    steps = table(capsys, *runs, "--keys", "score/mean$", "--every", "20")
    assert steps[0] == ["step", "critic/score/mean [first]", "critic/score/mean [second]"]
    assert [row[0] for row in steps[1:]] == ["0", "20", "40", "50"]
    assert steps[-1][2] == "-"


def test_runs_of_the_same_name_are_called_by_their_paths(tmp_path):
    folders = [write_run(tmp_path / parent / "run", synthetic_rows(3)) for parent in "ab"]
    assert [run.name for run in read_runs(folders)] == [str(folder) for folder in folders]


def test_csv_has_every_digit_and_text_has_four(tmp_path, capsys):
    run = write_run(tmp_path / "run", [{"step": 1, "a": 1 / 3, "b": 12345678.0}])
    assert table(capsys, run, "--last")[1:] == [["a", repr(1 / 3)], ["b", "12345678.0"]]
    assert report(run, "--last") == 0
    assert capsys.readouterr().out.split()[2:] == ["a", "0.3333", "b", "12345678"]


def test_wide_tables_fold_at_the_terminal(runs, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert report(*runs, "--every", 10) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80
    assert out.count("\nstep") > 1


def test_tensorboard_events_stand_in_for_a_missing_jsonl(tmp_path):
    with closing(MetricsWriter(tmp_path, first_step=1)) as writer:
        for step in range(1, 5):
            writer.log(step, {"a": step / 4, "b": math.nan})
    from_jsonl = read_run(tmp_path).rows
    (tmp_path / "metrics.jsonl").unlink()
    from_events = read_run(tmp_path).rows
    assert {s: row["a"] for s, row in from_events.items()} == {s: row["a"] for s, row in from_jsonl.items()}
    assert math.isnan(from_events[1]["b"]) and math.isnan(from_jsonl[1]["b"])


def test_a_run_that_is_being_written_can_be_read(tmp_path):
    run = write_run(tmp_path / "run", [{"step": 1, "a": 1.0}])
    with open(run / "metrics.jsonl", "a") as file:
        file.write('{"step": 2, "a"')
    assert read_run(run).rows == {1: {"a": 1.0}}


FORMS = {"scalars": ["--scalars"], "picture": ["--out", "curves.png"], "summary": ["--text"]}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("with_jsonl", [True, False])
def test_tools_need_neither_torch_nor_mpi(tmp_path, form, with_jsonl):
    with closing(MetricsWriter(tmp_path / "run", first_step=1)) as writer:
        for row in synthetic_rows(4):
            writer.log(int(row["step"]), {key: value for key, value in row.items() if key != "step"})
    if not with_jsonl:
        (tmp_path / "run" / "metrics.jsonl").unlink()
    program = (
        "import atexit, json, sys; from hpcrl.observe.report.page import report_main;"
        "atexit.register(lambda: print(json.dumps(sorted({name.split('.')[0] for name in sys.modules}))));"
        "report_main(sys.argv[1:])"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "run"), *FORMS[form]]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stderr
    assert not {"torch", "mpi4py", "megatron", "tensorflow"} & set(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.parametrize("form", FORMS)
def test_bad_input_is_one_line_and_code_2(form, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    garbage = tmp_path / "metrics.jsonl"
    garbage.write_bytes(bytes(range(256)))
    (tmp_path / "empty").mkdir()
    for run in (tmp_path / "none", tmp_path / "empty", tmp_path, garbage):
        assert report(run, *FORMS[form]) == 2
        out = capsys.readouterr()
        assert out.err.count("\n") == 1 and "error: " in out.err and str(run) in out.err and not out.out


@pytest.mark.parametrize(
    "options", [["--keys", "("], ["--keys", "nothing"], ["--steps", "a:b"], ["--steps", "900:"], ["--every", "0"]]
)
def test_bad_options_are_one_line_and_code_2(options, runs, capsys):
    assert report(runs[0], *options) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_a_closed_pipe_is_no_error(runs):
    command = f"{sys.executable} -m hpcrl report {runs[0]} --keys . --every 1 --csv | head -1"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, check=True)
    assert done.stderr == "" and done.stdout.startswith("step,")


def test_runs_of_several_seeds_are_one_curve_with_a_band(tmp_path, capsys):
    rows = [[{"step": step, "critic/score/mean": seed + step, "a": 1.0} for step in (1, 2)] for seed in (0, 4)]
    rows[1][1].pop("a")
    folders = [write_run(tmp_path / f"grpo_{seed}", lines) for seed, lines in enumerate(rows)]
    (found,) = over_seeds(read_runs(folders))
    assert isinstance(found, SeedMean) and found.name == "grpo"
    assert found.series("critic/score/mean") == [(1, 3.0), (2, 4.0)]
    assert found.band("critic/score/mean") == [2.0, 2.0]
    assert found.series("a") == [(1, 1.0)]
    out = tmp_path / "curves.png"
    assert report(*folders, "--seeds", "--out", out) == 0
    assert out.stat().st_size > 10_000
    capsys.readouterr()
    assert table(capsys, *folders, "--seeds", "--keys", "score", "--last")[1:] == [["critic/score/mean", "4.0"]]


@pytest.mark.parametrize("count", [1, 2])
def test_curves_draw_a_picture(runs, count, tmp_path, capsys):
    out = tmp_path / "curves.png"
    assert report(*runs[:count], "--out", out) == 0
    assert out.read_bytes().startswith(b"\x89PNG") and out.stat().st_mode & 0o777 == 0o600  # as a run's own files
    assert report(runs[0], "--keys", "score|kl", "--out", tmp_path / "few.svg") == 0
    capsys.readouterr()
    assert report(runs[0], "--out", tmp_path / "none" / "curves.png") == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_a_notebook_reads_plots_and_compares(runs, monkeypatch):
    from matplotlib import pyplot

    from hpcrl.api import plot_runs, read_runs

    logs = read_runs(runs[:2])
    one, both = plot_runs(logs[:1]), plot_runs(logs)
    assert len(one.axes) == len(both.axes) and not one.legends and len(both.legends) == 1
    assert [axes.get_title(loc="left") for axes in plot_runs(logs, "critic/score/mean").axes] == ["critic/score/mean"]
    assert pyplot.get_fignums() == []  # a notebook shows the returned figure only
    assert logs[0].series("critic/score/mean")[0][0] == 1


def test_smoothing_keeps_a_constant_and_averages_noise():
    assert smooth([2.0] * 9, 5) == [2.0] * 9
    assert smooth([0.0, 3.0, 0.0, 3.0, 0.0], 3) == [1.5, 1.0, 2.0, 1.0, 1.5]


@pytest.mark.parametrize("folder", ["telemetry", "observe.report"])
@pytest.mark.parametrize(
    "name, words", [("scalars", "mean10"), ("curves", "curves.png"), ("summary", "training: second")]
)
def test_old_commands_name_the_new_one(runs, tmp_path, folder, name, words):
    options = ["--sft", runs[0]] if name == "summary" else []
    command = [sys.executable, "-m", f"hpcrl.{folder}.{name}", runs[1], *options]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and words in done.stdout, done.stderr
    assert done.stderr.startswith(f"hpcrl: warning: python -m hpcrl.{folder}.{name} is now hpcrl report --")
    assert done.stderr.count("\n") == 1 and ("training: first" in done.stdout) is (name == "summary")


def test_closing_table(tmp_path, capsys):
    rows = [
        {"step": 0, "val-core/countdown/acc/mean@1": 0.2, "timing_s/testing": 9.0},
        {"step": 1, "timing_s/step": 2.0, "timing_s/gen": 0.5, "perf/total_num_tokens": 1000},
        {"step": 2, "timing_s/step": 2.0, "timing_s/gen": 1.5, "perf/total_num_tokens": 3000},
    ]
    rows[2]["val-core/countdown/acc/mean@1"] = 0.35
    run = write_run(tmp_path / "ppo", rows)
    sft = write_run(tmp_path / "sft", [{"step": s, "train/loss": 1.0} for s in (1, 2, 3)])
    assert report(sft, run, "--text") == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "training: sft, 3 steps" in lines
    assert "training: ppo, 2 steps, 4s (2 s/step)" in lines
    assert "countdown/acc/mean@1 20.0% 35.0% +15.0 35.0% 2" in lines
    assert "gen 1.000 2 2.0 50%" in lines
    assert "tokens/s 1,000" in lines
    assert not any(line.startswith("testing") for line in lines)
    commands = tables.next_commands(run, "mpiexec -n 2", evaluates=True, exports=False)
    ended = [" ".join(line.split()) for line in tables.at_end(read_run(run), run, commands).splitlines()]
    assert ended == [
        "done: ppo, 2 steps, 4s (2 s/step)",
        "countdown acc/mean@1: 0.200 at step 0, 0.350 at step 2",
        f"folder: {run}",
        f"report: python -m hpcrl report {run} --out {run}/report.html",
        f"evaluate: mpiexec -n 2 python -m hpcrl evaluate {run}/config.yaml model.init_from={run}",
    ]
