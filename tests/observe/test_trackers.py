"""wandb and MLflow, the real packages without a network, beside runs that are stopped, killed and resumed."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import textwrap
import time
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import psutil
import pytest

from hpcrl.observe.record import trackers
from hpcrl.observe.record.tracker_mlflow import ID_TAG, STATUS_TAG, _name
from hpcrl.observe.record.tracker_wandb import read_records
from hpcrl.observe.record.trackers import Row, RowReader, missing_packages, run_id
from tests.run.small_run import lines, log_of, open_to_others, run_folder, train
from tests.runtime.conftest import environment

OFFLINE = {"logger": ["console", "wandb", "mlflow"], "project_name": "countdown", "val_before_train": False}
OFFLINE["experiment_name"] = "half \ud83d"  # which UTF-8 lacks
NAME = r"half \ud83d"

# Time for packages to load on a machine with few cores
PATIENT = "from hpcrl.observe.record import trackers; trackers.FINISH_SECONDS = 120.0\n"
AFTER_STEP = """
import os, signal, time
import psutil
from hpcrl.observe.record.writer import MetricsWriter
log = MetricsWriter.log
def log_and_act(self, step, metrics):
    log(self, step, metrics)
    if step == {step}:
{action}
MetricsWriter.log = log_and_act
"""
# As Slurm does, a signal to all processes of rank 0 when a step's line is written and wandb has started its service
SIGNAL_ALL = """
deadline = time.monotonic() + 60
while not any(p.name() == "wandb-core" for p in psutil.Process().children(recursive=True)):
    assert time.monotonic() < deadline, "wandb has not started its service"
    time.sleep(0.2)
time.sleep(2)
for process in [*psutil.Process().children(recursive=True), psutil.Process()]:
    process.send_signal(signal.SIGTERM)
"""


def after_step(step: int, action: str) -> str:
    """Statements that have rank 0 run `action` once it has written the metrics of a step."""
    return PATIENT + AFTER_STEP.format(step=step, action=textwrap.indent(action.strip(), " " * 8))


SIGTERM_AFTER_STEP_1 = after_step(1, SIGNAL_ALL)
KILL_AFTER_STEP_3 = after_step(3, "os.kill(os.getpid(), signal.SIGKILL)")


def test_the_id_of_a_run_is_made_once(tmp_path: Path) -> None:
    assert run_id(tmp_path) == run_id(tmp_path)
    (tmp_path / "trackers.json").unlink()
    assert len({run_id(tmp_path), run_id(tmp_path.parent)}) == 2


def test_whole_lines_are_read_once(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    reader = RowReader(path)
    assert reader.read() == []
    path.write_text('{"step": 0, "a": 1.5}\n{"step": 1, "a": 2')
    assert reader.read() == [Row(0, {"a": 1.5})]
    with open(path, "a") as file:
        file.write('.5}\nnot a line\n{"step": 2, "a": null}\n')
    first, second = reader.read()
    assert first == Row(1, {"a": 2.5}) and math.isnan(second.metrics["a"])
    assert reader.read() == []


def test_a_folder_that_wandb_leaves_is_no_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hpcrl.observe.record.trackers.TRACKERS", {"left_folder": "", "json": ""})
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "left_folder").mkdir()
    assert missing_packages(["console", "json", "left_folder"]) == ["left_folder"]


@pytest.mark.slow
def test_the_slices_of_a_run_are_one_run_with_the_values_of_metrics_jsonl(tmp_path: Path) -> None:
    """Stopped by SIGTERM after step 1, killed after step 3 with a checkpoint of step 2, and then run to its end."""
    trainer = {**OFFLINE, "save_freq": 2}
    assert train(tmp_path, 2, script=SIGTERM_AFTER_STEP_1, trainer=trainer) == 85
    check_wandb(tmp_path, preempting=True, exit_code=1)
    check_mlflow(tmp_path, "SCHEDULED", "requeued")

    assert train(tmp_path, 2, script=KILL_AFTER_STEP_3, trainer=trainer) != 0
    lost = lines(tmp_path)[-1]
    wait_for_trackers(tmp_path)  # which see that rank 0 has ended
    check_wandb(tmp_path, preempting=False, exit_code=1)
    check_mlflow(tmp_path, "FAILED", "failed")

    assert train(tmp_path, 2, script=PATIENT, trainer=trainer) == 0
    assert lines(tmp_path)[2]["step"] == lost["step"] == 3
    assert lines(tmp_path)[2] != lost, "the times of the repeated step are the same; the test shows nothing"
    check_wandb(tmp_path, preempting=False, exit_code=0)
    check_mlflow(tmp_path, "FINISHED", "finished")
    assert len(list((run_folder(tmp_path) / "wandb").glob("offline-run-*"))) == 1
    assert "tracker" not in log_of(tmp_path)
    assert open_to_others(run_folder(tmp_path)) == []


@pytest.mark.slow
def test_a_tracker_that_is_not_installed_ends_the_job_at_once(tmp_path: Path, capfd: pytest.CaptureFixture) -> None:
    script = "from hpcrl.observe.record import trackers; trackers.find_spec = lambda name: None\n"
    assert train(tmp_path, 2, script=script, trainer=OFFLINE) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("hpcrl: error: trainer.logger names wandb, which is not installed")
    assert not (run_folder(tmp_path) / "metrics.jsonl").exists()


@pytest.mark.slow
def test_a_full_disk_costs_a_warning_for_each_tracker(tmp_path: Path) -> None:
    """The trackers' folders are file systems that are too small for what they write."""
    run = run_folder(tmp_path)
    mounts = " && ".join(
        f"mkdir -p {run / name} && mount -t tmpfs -o size={size}k,mode=700 none {run / name}"
        for name, size in (("wandb", 32), ("mlflow", 64))
    )
    before = ("unshare", "-Urm", "sh", "-c", f'{mounts} && exec "$@"', "sh")
    assert train(tmp_path, 1, before=before, script=PATIENT, trainer=OFFLINE) == 0
    assert [line["step"] for line in lines(tmp_path)] == [1, 2, 3, 4]
    warnings = [line for line in log_of(tmp_path).splitlines() if " WARNING " in line and "tracker" in line]
    assert len(warnings) == 2, log_of(tmp_path)
    assert all("failed" in line for line in warnings)


# A rank with trackers that fail in different places, and one that works
RANK = """
import logging, sys, time
from pathlib import Path
from hpcrl.sandbox import fork_server
fork_server.start()
from hpcrl.observe.record import trackers
trackers.TRACKERS = dict.fromkeys(sys.argv[2:], "faulty")
trackers.FINISH_SECONDS = 3.0
logging.basicConfig(format="%(message)s", stream=sys.stdout)
folder = Path(sys.argv[1])
file = folder / "metrics.jsonl"
file.write_text('{"step": 1, "a": 1.0}\\n')
started = trackers.Trackers(sys.argv[2:], folder, file, project="p", name="n", parameters={"seed": 0})
begun = time.monotonic()
with open(file, "a") as lines:
    for step in range(2, 6):
        lines.write('{"step": %d, "a": 1.0}\\n' % step)
        lines.flush()
        started.poll()
steps = time.monotonic() - begun
started.finish("finished")
print("steps", steps, "all", time.monotonic() - begun)
"""
FAULTY = """
import os, subprocess, sys, time
from pathlib import Path

class Faulty:
    def __init__(self, run):
        self.fault = Path(f"/proc/self/fd/1").resolve().stem.removeprefix("tracker_")
        self.file = run.folder / f"{self.fault}.txt"
        if self.fault == "raises_early":
            raise ImportError("no module of its own")
    def open(self, history):
        if self.fault == "raises_in_open":
            raise OSError(28, "No space left on device")
        if self.fault == "dies":
            os._exit(9)
        return -1
    def log(self, rows):
        if self.fault == "raises_in_log":
            raise ConnectionError("no route to host")
        if self.fault == "hangs_in_log":
            subprocess.Popen(["sleep", "1000"], start_new_session=True)
            while True:
                time.sleep(1)
        with open(self.file, "a") as file:
            file.write("".join(f"{row.step} " for row in rows))
    def finish(self, status):
        if self.fault == "hangs_in_finish":
            time.sleep(1000)
        with open(self.file, "a") as file:
            file.write(status)

TRACKER = Faulty
"""
FAULTS = {
    "works": None,
    "raises_early": "ImportError: no module of its own",
    "raises_in_open": "OSError: [Errno 28] No space left on device",
    "dies": "its process ended with code 9",
    "raises_in_log": "ConnectionError: no route to host",
    "hangs_in_log": "it did not finish within 3 s",
    "hangs_in_finish": "it did not finish within 3 s",
}


@pytest.mark.slow
def test_a_tracker_that_fails_costs_one_warning_and_no_time(tmp_path: Path) -> None:
    (tmp_path / "faulty.py").write_text(FAULTY)
    (tmp_path / "logs").mkdir()
    command = [sys.executable, "-c", RANK, str(tmp_path), *FAULTS]
    variables = environment()
    variables["PYTHONPATH"] = f"{tmp_path}:{variables['PYTHONPATH']}"
    before = set(psutil.pids())
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=120)
    *warnings, times = done.stdout.splitlines()
    for name, why in FAULTS.items():
        said = [line for line in warnings if line.startswith(f"tracker {name} failed: ")]
        assert len(said) == (why is not None) and all(str(why) in line for line in said), done.stdout + done.stderr
    assert (tmp_path / "works.txt").read_text() == "1 2 3 4 5 finished"
    seconds = [float(word) for word in times.split() if word[0].isdigit()]
    assert seconds[0] < 0.5 and seconds[1] < 8, times
    left = [process for pid in set(psutil.pids()) - before if (process := find(pid, str(tmp_path)))]
    assert not left, left


def test_the_error_of_a_process_that_failed_before_it_got_the_final_status() -> None:
    near, far = Pipe()
    far.send("ConnectionError: no route to host")
    far.close()
    rank = trackers.FinalStatus(near)
    rank.value = "finished"
    assert trackers._supervise(0, near, rank, 1.0) == "ConnectionError: no route to host"


def find(pid: int, folder: str) -> list[str] | None:
    """The command line of a process with a file in `folder` open."""
    try:
        process = psutil.Process(pid)
        return process.cmdline() if any(folder in file.path for file in process.open_files()) else None
    except psutil.Error:
        return None


def wait_for_trackers(folder: Path) -> None:
    """Wait until no process writes to the log file of a tracker."""
    deadline = time.monotonic() + 60
    logs = str(run_folder(folder) / "logs" / "tracker_")
    while any(find(pid, logs) for pid in psutil.pids()):
        assert time.monotonic() < deadline, "trackers are still running"
        time.sleep(0.2)


def check_wandb(folder: Path, *, preempting: bool, exit_code: int) -> None:
    """The newest offline folder has the run with all steps, each once, as `wandb sync` would read them."""
    from wandb.proto import wandb_internal_pb2

    newest = max((run_folder(folder) / "wandb").glob("offline-run-*"), key=lambda path: path.stat().st_mtime)
    assert newest.name.endswith(run_id(run_folder(folder)))
    history, config, exits, preempted, runs = [], {}, [], 0, []
    for data in read_records(next(newest.glob("*.wandb"))):
        record = wandb_internal_pb2.Record.FromString(data)
        kind = record.WhichOneof("record_type")
        if kind == "history":
            history.append(decoded(record.history.item))
        elif kind == "run":
            runs.append((record.run.run_id, record.run.project, record.run.display_name))
            config |= decoded(record.run.config.update)
        elif kind == "exit":
            exits.append(record.exit.exit_code)
        elif kind == "preempting":
            preempted += 1
    assert set(runs) == {(run_id(run_folder(folder)), "countdown", NAME)}
    assert (exits, bool(preempted)) == ([exit_code], preempting)
    assert config["trainer.project_name"] == "countdown" and config["data.train_batch_size"] == 8
    stored = [{k: v for k, v in row.items() if not k.startswith("_") or k == "_step"} for row in history]
    expected = lines(folder)
    assert [row.pop("_step") for row in stored] == [line.pop("step") for line in expected]
    assert [with_nan(row) for row in stored] == [with_nan(line) for line in expected]


def decoded(items: Any) -> dict[str, Any]:
    return {".".join(item.nested_key) or item.key: json.loads(item.value_json) for item in items}


def with_nan(row: dict[str, Any]) -> dict[str, Any]:
    """NaN, which equals nothing, as text, whatever stands for it."""
    return {key: "NaN" if value in (None, "NaN") or value != value else value for key, value in row.items()}


def check_mlflow(folder: Path, status: str, tag: str) -> None:
    """The store has one run, with all steps, each once."""
    from mlflow.tracking import MlflowClient

    client = MlflowClient(f"sqlite:///{run_folder(folder)}/mlflow/mlflow.db")
    experiment = client.get_experiment_by_name("countdown")
    (run,) = client.search_runs([experiment.experiment_id])
    assert (run.info.status, run.info.run_name, run.data.tags[STATUS_TAG]) == (status, NAME, tag)
    assert run.data.tags[ID_TAG] == run_id(run_folder(folder))
    assert run.data.params["trainer.project_name"] == "countdown" and run.data.params["data.train_batch_size"] == "8"
    stored: dict[int, dict[str, Any]] = {}
    for key in run.data.metrics:
        for metric in client.get_metric_history(run.info.run_id, key):
            row = stored.setdefault(metric.step, {})
            assert key not in row, f"{key} of step {metric.step} is there twice"
            row[key] = metric.value
    expected = {line.pop("step"): {_name(key): value for key, value in line.items()} for line in lines(folder)}
    assert {step: with_nan(row) for step, row in stored.items()} == {
        step: with_nan(row) for step, row in expected.items()
    }
