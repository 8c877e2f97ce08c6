"""Text that UTF-8 lacks, in each place where a run gets text from: every file is written, and can be read."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from hpcrl.observe.read.runlog import read_run
from hpcrl.observe.read.samples import read_step_samples
from hpcrl.observe.record.archive import read_records
from hpcrl.observe.report.page import report_main as report
from tests.preloaded import RANK
from tests.run.small_run import write_config
from tests.runtime.conftest import MPIEXEC, environment

ODD = "half \ud83d, NUL \0"
SHOWN = ODD.replace("\ud83d", r"\ud83d")
PRINTED = ODD.replace("\ud83d", "<U+D83D>").replace("\0", "\u2400")
TEXT = (".json", ".jsonl", ".yaml", ".log", ".md", ".txt")
FILE = os.fsdecode(b"prompts_\xff.jsonl")
SCORER = f"""
ODD = {ODD!r}
calls = 0

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    global calls
    calls += 1
    print(data_source, ODD)
    if calls == 2:
        raise ValueError(ODD)
    return {{"score": len(solution_str) % 3, "acc": calls % 2, "pred": ODD, ODD: 1.0, "note": ODD}}
"""
SAMPLER = f"""
import logging
import numpy as np
from hpcrl.data.curriculum import AbstractCurriculumSampler

class Failing(AbstractCurriculumSampler):
    def choose(self, n):
        logging.getLogger("hpcrl.mine").warning("chosen %s", {ODD!r})
        return np.arange(n)

    def update(self, report):
        if report.step == 2:
            raise RuntimeError({ODD!r})
"""
NOTIFY = '#!/bin/sh\nprintf "%s\\n" "$HPCRL_EVENT_MESSAGE" >>"$1"\n'


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[bytes]]:
    """The folder of a run that has failed in its second step, and its process."""
    folder = tmp_path_factory.mktemp("foreign")
    for name, text in {"scorer.py": SCORER, "sampler.py": SAMPLER, "notify.sh": NOTIFY}.items():
        (folder / name).write_text(text)
    (folder / "notify.sh").chmod(0o700)
    config = write_config(
        folder,
        data={
            "train_files": [str(folder / FILE)],
            "val_files": [str(folder / FILE)],
            "train_batch_size": 8,
            "max_prompt_length": 16,
            "max_response_length": 8,
            "sampler": {"class_path": str(folder / "sampler.py"), "class_name": "Failing"},
        },
        rollout={"n": 2, "val_kwargs": [{"n": 2, "temperature": 1.0}]},
        reward={"custom_reward_function": {"path": str(folder / "scorer.py")}},
        job={"on_event": f"{folder}/notify.sh {folder}/events.txt"},
        trainer={
            "total_training_steps": 3,
            "test_freq": 1,
            "val_before_train": True,
            "save_freq": 1,
            "validation_data_dir": "generations",
            "log_val_generations": 4,
            "experiment_name": ODD,
        },
    )
    rows = [json.loads(line) for line in (folder / "train.jsonl").read_text().splitlines()]
    for row in rows:
        row["data_source"], row["reward_model"]["ground_truth"] = ODD, ODD
    (folder / FILE).write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = [str(MPIEXEC), "-n", "1", *RANK, "-m", "hpcrl", "train", str(config)]
    return folder, subprocess.run(command, cwd=folder, env=environment(), capture_output=True, timeout=300)


def test_every_file_of_the_run_can_be_read(ended: tuple[Path, subprocess.CompletedProcess[bytes]]) -> None:
    folder, process = ended
    run = folder / "runs" / "ends"
    printed = process.stdout.decode() + process.stderr.decode()
    assert f"warning: chosen {PRINTED}" in printed and f"RuntimeError: {PRINTED}" in printed
    binary = [*run.glob("rollouts/*.log"), *run.glob("trace/*.log")]
    paths = [path for path in run.rglob("*") if path.suffix in TEXT and path not in binary]
    text = {path.relative_to(run): path.read_bytes().decode() for path in paths}
    logged = text.pop(Path("logs/rank_00000.log"))
    assert all(f"{before} {PRINTED}" in logged for before in ("chosen", "ValueError:", "RuntimeError:"))
    for path in text:
        for line in text[path].splitlines() if path.suffix == ".jsonl" else [text[path]]:
            assert path.suffix not in (".json", ".jsonl") or json.loads(line), path
    assert json.loads(text[Path("exit.json")])["error"] == f"RuntimeError: {SHOWN}"
    samples = [json.loads(line) for line in text[Path("generations/0.jsonl")].splitlines()]
    given = [sample for sample in samples if sample["pred"] is not None]
    assert len(given) == len(samples) - 1 and {sample["gts"] for sample in samples} == {ODD}
    assert all(sample["pred"] == sample["note"] == ODD and sample[ODD] == 1 for sample in given)
    assert f"RuntimeError: {SHOWN[:-1]}\u2400" in (folder / "events.txt").read_text()
    tag = f"val-core/{SHOWN}/acc/mean@2"
    assert tag in read_run(run).tags()
    board = EventAccumulator(str(run / "tensorboard"))
    board.Reload()
    assert tag in board.Tags()["scalars"] and "validation/samples/text_summary" in board.Tags()["tensors"]
    (sample, *_) = read_step_samples(run, 1)
    assert sample.data_source == SHOWN.replace("\0", "\u2400") and sample.parts["pred"] == sample.parts["note"] == ODD
    for log in binary:
        assert list(read_records(log, pytest.fail))


@pytest.mark.parametrize(
    "command", [("hpcrl", "report", "--keys", "val"), ("hpcrl", "samples", "--json"), ("hpcrl", "status")]
)
def test_an_ascii_terminal_shows_it(
    ended: tuple[Path, subprocess.CompletedProcess[bytes]], command: tuple[str, ...]
) -> None:
    run = ended[0] / "runs" / "ends"
    shown = subprocess.run(
        [sys.executable, "-m", *command, str(run)],
        env=environment() | {"PYTHONIOENCODING": "ascii"},
        capture_output=True,
    )
    assert (shown.returncode, shown.stderr) == (0, b"") and "half" in shown.stdout.decode("ascii")
    assert all(code >= 32 for code in shown.stdout.replace(b"\n", b""))


def test_the_report_shows_it(ended: tuple[Path, subprocess.CompletedProcess[bytes]], tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as end:
        report([str(ended[0] / "runs" / "ends"), "--out", str(tmp_path / "report.html")])
    assert end.value.code == 0 and "half \\ud83d" in (tmp_path / "report.html").read_text(encoding="utf-8")
