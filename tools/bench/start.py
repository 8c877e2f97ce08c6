"""Seconds until a job's first step begins, beside those of its imports alone, and of commands of a login node.

    .venv/bin/python tools/bench start [--ranks 4] [--rounds 3] [key=value ...]

Three programs start on all ranks, in turn, --rounds times: one imports torch and what a job uses of megatron-core; one
imports the same as a rank does it, without modules that nothing on a CPU uses (`hpcrl.runtime.platform`); the third is
`hpcrl train`, PPO with configs/ppo_countdown_cpu.yaml on random weights. Each is timed from its launch until its last
rank has imported, or until the log says that the first step begins. CPU seconds are those of all processes by then.
The commands run without MPI, once per round. One more round before them is not counted: it writes the bytecode, for all
packages, into a temporary folder. Prints medians, their spread, and ratios of the medians.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from statistics import median
from typing import NamedTuple

import psutil
from bench.harness import ROOT, in_turn, on_ranks, spread

IMPORTED = "imported"
MEGATRON = (
    "megatron.core.models.gpt.gpt_layer_specs",
    "megatron.core.optimizer.distrib_optimizer",
    "megatron.core.pipeline_parallel.schedules",
)
# one write: lines of several ranks would mix otherwise
IMPORTS = f"import os, torch.distributed, {', '.join(MEGATRON)}; os.write(1, b'{IMPORTED}\\n')"
AS_A_RANK = f"from hpcrl.runtime.platform import import_megatron; import_megatron(); {IMPORTS}"
FIRST_STEP = "step 1 of 1 begins"  # hpcrl.run.run logs it
PLAIN, LEAN, JOB = "imports", "imports of a rank", "first step of a job"
COMMANDS = (
    ("--help",),
    ("plan", "configs/ppo_70b.yaml"),
    ("submit", "configs/ppo_70b.yaml", "--nodes", "16", "--dry-run"),
)


class Seconds(NamedTuple):
    wall: float
    cpu: float


def until_printed(mark: str, ranks: int, command: list[str], environ: dict[str, str], lines: int = 1) -> Seconds:
    """Start a program on all ranks, and measure until so many lines of its output contain `mark`."""
    whole = on_ranks(ranks, *command)
    output, seconds, start = [], None, time.perf_counter()
    with psutil.Popen(whole, env=environ, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as job:
        for line in job.stdout:
            output.append(line)
            lines -= mark in line
            if lines == 0 and seconds is None:
                seconds = Seconds(time.perf_counter() - start, tree_cpu_seconds(job))
    if job.returncode or seconds is None:
        sys.exit(f"{' '.join(whole)} failed:\n{''.join(output)}")
    return seconds


def tree_cpu_seconds(root: psutil.Process) -> float:
    """User and system time of a process and its descendants, with those that have ended."""
    total = 0.0
    for process in (root, *root.children(recursive=True)):
        try:
            total += sum(process.cpu_times()[:4])  # its own, and that of children which it has waited for
        except psutil.NoSuchProcess:  # it ended meanwhile
            pass
    return total


def until_ended(command: tuple[str, ...], environ: dict[str, str]) -> Seconds:
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    whole = [sys.executable, "-m", "hpcrl", *command]
    subprocess.run(whole, env=environ, cwd=ROOT, check=True, capture_output=True)
    wall, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    return Seconds(wall, after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime)


def job_command(folder: Path, overrides: list[str]) -> list[str]:
    """One step of PPO, of 16 samples, whose end is not measured."""
    return [
        *("-m", "hpcrl", "train", "configs/ppo_countdown_cpu.yaml", f"run.dir={folder}/runs", "model.init_from=null"),
        *(f"data.train_files=[{folder}/data/train.parquet]", f"data.val_files=[{folder}/data/val.parquet]"),
        *("data.train_batch_size=16", "actor.ppo_mini_batch_size=16", "trainer.total_training_steps=1"),
        *("trainer.val_before_train=false", "trainer.test_freq=-1", "trainer.save_freq=-1"),
        *overrides,
    ]


def measure(folder: Path, ranks: int, rounds: int, overrides: list[str]) -> dict[str, list[Seconds]]:
    """Label -> seconds of each counted round."""
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    environ |= {"OMP_NUM_THREADS": "1", "PYTHONPYCACHEPREFIX": str(folder / "bytecode"), "PYTHONWARNINGS": "ignore"}
    prepare = [sys.executable, "tools/prepare_countdown.py", "--out", str(folder / "data"), "--sft-rows", "64"]
    subprocess.run(prepare, cwd=ROOT, check=True, capture_output=True)
    ways = {
        PLAIN: partial(until_printed, IMPORTED, ranks, ["-c", IMPORTS], environ, lines=ranks),
        LEAN: partial(until_printed, IMPORTED, ranks, ["-c", AS_A_RANK], environ, lines=ranks),
        JOB: partial(until_printed, FIRST_STEP, ranks, job_command(folder, overrides), environ),
    }
    for command in COMMANDS:
        whole = (*command, f"run.dir={folder}/submitted") if "submit" in command else command
        ways[f"hpcrl {' '.join(command)}"] = partial(until_ended, whole, environ)
    return in_turn(ways, rounds, warm_up=1)


def report(found: dict[str, list[Seconds]]) -> None:
    for label, seconds in found.items():
        wall, cpu = zip(*seconds, strict=True)
        print(f"{label:58} {spread(wall)}, {median(cpu):6.2f} s of CPU")
    for label in (PLAIN, LEAN):
        wall, cpu = (
            median(job) / median(imports)
            for job, imports in zip(zip(*found[JOB], strict=True), zip(*found[label], strict=True), strict=True)
        )
        print(f"{JOB} / {label}: {wall:.2f} in seconds, {cpu:.2f} in CPU seconds")


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("overrides", nargs="*", help="key=value, for the job")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3, help="that count")


def main(options: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory(prefix="bench_start_") as folder:
        report(measure(Path(folder), options.ranks, options.rounds, options.overrides))
