"""Seconds of every phase of a step in every layout of four ranks, of a dense model and one with experts.

    .venv/bin/python tools/bench_layouts.py --out FILE.jsonl [--repeats 3] [--only TEXT] [--memory]

Each case of tools/layout_cases.py is a job of 3 steps, of which the first is not counted; asynchronous jobs have one
more, in which nothing is generated, and which is not counted either. The repeats are rounds over
all cases, each in an order of its own, so that a machine that gets slower for minutes does not do so for neighbours in
the list. Appends a JSON line per job, with the number of the start of the ranks that ran it; jobs whose line is there
are left out, so that it can be stopped and continued.
With --memory each case runs once more, for the peak of live tensor bytes. tools/compare_layouts.py
compares the lines with `hpcrl plan`. On two cores a round takes about 25 minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from zlib import crc32

import checkout  # noqa: F401
import layout_cases
from layout_cases import PROMPTS, RANKS, Case

if TYPE_CHECKING:
    from hpcrl.runtime.world import World

STEPS, WARM_UP = 3, 1
STEPS_IN_BYTES = 2  # of a job whose bytes are counted, which takes ten times as long
JOBS = 24  # that one start of the ranks runs
SCORE = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return sum(map(ord, solution_str)) % 97 / 97
"""


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", default="", help="cases whose name this regular expression finds")
    parser.add_argument("--memory", action="store_true")
    # of a start of the ranks: numbers of cases, each with its repeat, its own number, and a folder for runs
    parser.add_argument("--jobs", type=json.loads, help=argparse.SUPPRESS)
    parser.add_argument("--number", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.jobs is not None:
        run_on_ranks(options)
    lines = read(options.out)
    known = {(line["case"], line["repeat"]) for line in lines}
    chosen = [(number, case) for number, case in enumerate(layout_cases.cases()) if re.search(options.only, case.name)]
    repeats = [*range(options.repeats), *(["memory"] if options.memory else [])]
    pending = [
        (number, repeat)
        for repeat in repeats
        for number, case in sorted(chosen, key=lambda it: crc32(f"{repeat} {it[1].name}".encode()))
        if (case.name, repeat) not in known
    ]
    began, starts = time.monotonic(), 1 + max((line["start"] for line in lines), default=-1)
    for first in range(0, len(pending), JOBS):
        jobs = pending[first : first + JOBS]
        with tempfile.TemporaryDirectory(prefix="bench_layouts_") as folder:
            number = starts + first // JOBS
            own = ["--out", options.out, "--folder", folder, "--jobs", json.dumps(jobs), "--number", str(number)]
            start = [Path(sys.executable).with_name("mpiexec"), "-n", str(RANKS), sys.executable, __file__, *own]
            with open(f"{folder}/log", "w") as log:
                environ = {**os.environ, "OMP_NUM_THREADS": "1"}
                code = subprocess.run(start, env=environ, stdout=log, stderr=subprocess.STDOUT).returncode
            if code:
                sys.exit("\n".join([*Path(folder, "log").read_text().splitlines()[-30:], f"exit code {code}"]))
        done, spent = first + len(jobs), time.monotonic() - began
        print(f"{done} of {len(pending)} jobs, {spent / done * (len(pending) - done) / 60:.0f} min left", flush=True)


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def run_on_ranks(options: argparse.Namespace) -> None:
    """Run jobs one after the other in one world."""
    from hpcrl.forecast.memory.memory import with_keys
    from hpcrl.jobs.train import Train
    from hpcrl.runtime.job import run_spmd

    every, folder = list(layout_cases.cases()), options.folder
    jobs = [(every[number], repeat) for number, repeat in options.jobs]

    def load() -> Any:
        prompts = [
            {"prompt": prompt(row), "reward_model": {"ground_truth": ""}} for row in range(PROMPTS * (STEPS + 1))
        ]
        text = "\n".join(json.dumps({**row, "data_source": "bench"}) for row in prompts)
        (folder / "prompts.jsonl").write_text(text)
        (folder / "score.py").write_text(SCORE)
        return with_keys(config_of(jobs[0][0], folder), {"run.name": "start"})  # a folder for logs

    def on_every_rank(world: World, config: Any) -> int:
        for case, repeat in jobs:
            line = run_case(world, case, folder, in_bytes=repeat == "memory")
            if world.rank == 0:
                with options.out.open("a") as file:
                    of = {"case": case.name, "repeat": repeat, "start": options.number}
                    file.write(json.dumps({**of, **line}) + "\n")
        return 0

    Train.schema()  # with which every rank unpickles the config
    run_spmd(load, on_every_rank)


def prompt(row: int) -> str:
    """Of PROMPT_LENGTH tokens, with the one that begins it."""
    return f"{row * 7919 % 10**6:06d}+" * 9


def config_of(case: Case, folder: Path, steps: int = STEPS) -> Any:
    """The config that the job of a case runs with, or is planned with."""
    from hpcrl.jobs.train import Train

    template = case.config(folder)
    template["trainer"]["total_training_steps"] = steps + (case.mode != "sync")
    return Train.prepare(Train.schema().model_validate(template))


def run_case(world: World, case: Case, folder: Path, *, in_bytes: bool) -> dict[str, Any]:
    """Seconds by phase of each counted step, or peaks of live bytes by rank."""
    from hpcrl.jobs.train import Train
    from hpcrl.runtime.job import run_directory
    from hpcrl.workers.rollout import RolloutWorker

    class DrawnLengths(RolloutWorker):
        """Draws as many tokens as the case says."""

        def _requests(self, batch: Any) -> Any:
            return [
                replace(it, max_new_tokens=layout_cases.response_length(case.lengths, it.uid, it.sample_index))
                for it in super()._requests(batch)
            ]

    class Job(Train):
        own_roles = (DrawnLengths,)

    config = config_of(case, folder, STEPS_IN_BYTES if in_bytes else STEPS)
    run = run_directory(config)
    if world.rank == 0:
        shutil.rmtree(run, ignore_errors=True)
        run.mkdir(parents=True)
    world.barrier()
    job = Job(world, config, Job.check_with_torch(config, world.size), Namespace())
    if in_bytes:
        from tests.live_bytes import LiveBytes

        with LiveBytes() as live:
            job.main()
        return {"peak_bytes": world.all_gather_object(live.peak)}
    job.main()
    world.barrier()
    if world.rank != 0:
        return {}
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    counted = [line for line in lines if WARM_UP < line["step"] <= STEPS]
    return {"phases": phases_of(counted), "response": [line["response_length/mean"] for line in counted]}


def phases_of(lines: Sequence[dict[str, float]]) -> dict[str, list[float]]:
    """Seconds by the names of `timing_s/<phase>`."""
    names = [name for name in lines[0] if name.startswith("timing_s/") and all(name in line for line in lines)]
    return {name.removeprefix("timing_s/"): [round(line[name], 5) for line in lines] for name in names}


if __name__ == "__main__":
    main()
