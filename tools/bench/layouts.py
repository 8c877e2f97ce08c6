"""Seconds of every phase of a step in every layout of four ranks, of a dense model and one with experts.

    .venv/bin/python tools/bench layouts --out FILE.jsonl [--repeats 3] [--only TEXT] [--memory]

Each case is a job of 3 steps, of which the first is not counted; asynchronous jobs have one
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
import re
import shutil
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import exp, log
from pathlib import Path
from statistics import NormalDist
from typing import TYPE_CHECKING, Any
from zlib import crc32

from bench.harness import ROOT, on_ranks, read_lines, with_threads, write_lines

if TYPE_CHECKING:
    from hpcrl.runtime.world import World

RANKS = 4
PROMPTS, SAMPLES = 8, 4
PROMPT_LENGTH, RESPONSE_LENGTH, LONGEST = 64, 32, 96
MEAN, SIGMA = 32.0, 0.6  # of log-normal lengths, before they are cut off at LONGEST
LENGTHS = ("fixed", "log-normal")
ALGORITHMS = ("grpo", "ppo")
VOCABULARY = 4096
DENSE = {
    "vocab_size": VOCABULARY,
    "num_layers": 4,
    "hidden_size": 256,
    "ffn_hidden_size": 704,
    "num_attention_heads": 8,
    "num_query_groups": 4,
}
MOE = DENSE | {"family": "qwen3_moe", "num_experts": 8, "moe_topk": 2, "moe_ffn_hidden_size": 352}
MOE["moe"] = {"load_imbalance": 2.5}  # actor/moe_load_imbalance/mean of such a job: routers are as initialised
MODELS = {"dense": DENSE, "moe": MOE}
AXES = ("tp", "pp", "cp", "vpp", "ep")
SINGLE = (("single", 1),)  # one rank trains, beside the one that leads and two that generate
STEPS, WARM_UP = 3, 1
STEPS_IN_BYTES = 2  # of a job whose bytes are counted, which takes ten times as long
JOBS = 24  # that one start of the ranks runs
SCORE = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return sum(map(ord, solution_str)) % 97 / 97
"""


@dataclass(frozen=True)
class Case:
    """actor: sizes by axis. engine_tp: of the rollout engine. split: half of the ranks train, the others generate."""

    model: str
    algorithm: str
    lengths: str
    actor: tuple[tuple[str, int], ...]
    engine_tp: int = 1
    split: bool = False
    mode: str = "sync"

    @property
    def layout(self) -> str:
        """What is the same for all algorithms and lengths."""
        sizes = " ".join(f"{axis}{size}" for axis, size in self.actor if size > 1)
        sizes = sizes or ("single" if self.actor == SINGLE else "dp")
        return f"{sizes}, engine tp{self.engine_tp}" + (f", split, {self.mode}" if self.split else "")

    @property
    def name(self) -> str:
        return f"{self.model} {self.algorithm} {self.lengths}: {self.layout}"

    def config(self, folder: Path) -> dict[str, Any]:
        """A job's template.

        Args:
            folder: has prompts.jsonl and score.py; the runs are written there.
        """
        sizes = {axis: size for axis, size in self.actor if axis in AXES}
        placement: dict[str, Any] = {"actor": sizes, "rollout": {"tp": self.engine_tp}}
        if self.algorithm == "ppo":
            placement["critic"] = sizes
        if self.split:
            first = {"lead": "0", "train": "1"} if self.actor == SINGLE else {"train": "0-1"}
            placement["pools"] = {**first, "generate": "2-3"}
            for role in placement.keys() - {"pools"}:
                placement[role] = {**placement[role], "pool": "generate" if role == "rollout" else "train"}
        most = 512
        trained = {"ppo_max_token_len_per_gpu": most, "optim": {"lr": 1e-6}}
        return {
            "run": {"name": crc_name(self.name), "dir": str(folder / "runs")},
            "model": {"tokenizer": str(ROOT / "configs" / "tokenizer"), **MODELS[self.model]},
            "placement": placement,
            "data": {
                "train_files": [str(folder / "prompts.jsonl")],
                "train_batch_size": PROMPTS,
                "max_prompt_length": PROMPT_LENGTH,
                "max_response_length": LONGEST,
            },
            "rollout": {"n": SAMPLES, "ignore_eos": True, "max_num_seqs": PROMPTS * SAMPLES},
            "actor": {"ppo_mini_batch_size": PROMPTS // 2, **trained},
            "critic": trained,
            "algorithm": {"adv_estimator": "grpo" if self.algorithm == "grpo" else "gae"},
            "reward": {"custom_reward_function": {"path": str(folder / "score.py")}},
            "async_training": {"mode": self.mode},
            "trainer": {"save_rollouts": False, "save_freq": -1, "logger": []},
            "job": {"nodes": 1, "ntasks_per_node": RANKS},
        }


def crc_name(name: str) -> str:
    return f"{crc32(name.encode()):08x}"


def response_length(lengths: str, uid: str, sample: int) -> int:
    """Tokens of a sample, the same for every layout."""
    if lengths == "fixed":
        return RESPONSE_LENGTH
    uniform = (crc32(f"{uid} {sample}".encode()) + 0.5) / 2**32
    middle = log(MEAN) - SIGMA**2 / 2
    return max(1, min(LONGEST, round(exp(middle + SIGMA * NormalDist().inv_cdf(uniform)))))


def cases() -> Iterator[Case]:
    for model, algorithm, lengths in product(MODELS, ALGORITHMS, LENGTHS):
        if model == "moe" and (algorithm == "grpo") != (lengths == "fixed"):
            continue  # takes half an hour
        for sizes in actor_layouts(RANKS, with_experts=model == "moe"):
            for engine_tp in sorted({1, dict(sizes).get("tp", 1)}) if model == "dense" else [1]:
                yield Case(model, algorithm, lengths, sizes, engine_tp)
        if model == "dense":
            for sizes, engine_tp in product(actor_layouts(RANKS // 2, with_experts=False), (1, 2)):
                yield Case(model, algorithm, lengths, sizes, engine_tp, True)
            for engine_tp, mode in product((1, 2), ("sync", "one_step_off")):
                yield Case(model, algorithm, lengths, SINGLE, engine_tp, True, mode)


def actor_layouts(ranks: int, *, with_experts: bool) -> Iterator[tuple[tuple[str, int], ...]]:
    """All sizes whose product divides the ranks; the rest are replicas."""
    divisors = [size for size in range(1, ranks + 1) if ranks % size == 0]
    for tp, pp, cp in product(divisors, repeat=3):
        if ranks % (tp * pp * cp):
            continue
        of_stage = ranks // pp
        for vpp in [1, 2] if 1 < pp < MODELS["dense"]["num_layers"] else [1]:
            for ep in [size for size in divisors if of_stage % size == 0] if with_experts else [1]:
                yield tuple(zip(AXES, (tp, pp, cp, vpp, ep), strict=True))


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", default="", help="cases whose name this regular expression finds")
    parser.add_argument("--memory", action="store_true")
    # of a start of the ranks: numbers of cases, each with its repeat, its own number, and a folder for runs
    parser.add_argument("--jobs", type=json.loads, help=argparse.SUPPRESS)
    parser.add_argument("--number", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)


def main(options: argparse.Namespace) -> None:
    if options.jobs is not None:
        run_on_ranks(options)
    lines = read_lines(options.out)
    known = {(line["case"], line["repeat"]) for line in lines}
    chosen = [(number, case) for number, case in enumerate(cases()) if re.search(options.only, case.name)]
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
            own = ("--out", options.out, "--folder", folder, "--jobs", json.dumps(jobs), "--number", number)
            command = on_ranks(RANKS, Path(__file__).parent, "layouts", *own)
            with open(f"{folder}/log", "w") as output:
                code = subprocess.run(command, env=with_threads(1), stdout=output, stderr=subprocess.STDOUT).returncode
            if code:
                sys.exit("\n".join([*Path(folder, "log").read_text().splitlines()[-30:], f"exit code {code}"]))
        done, spent = first + len(jobs), time.monotonic() - began
        print(f"{done} of {len(pending)} jobs, {spent / done * (len(pending) - done) / 60:.0f} min left", flush=True)


def run_on_ranks(options: argparse.Namespace) -> None:
    """Run jobs one after the other in one world."""
    from hpcrl.forecast.memory.memory import with_keys
    from hpcrl.jobs.train import Train
    from hpcrl.runtime.job import run_spmd

    every, folder = list(cases()), options.folder
    jobs = [(every[number], repeat) for number, repeat in options.jobs]

    def load() -> Any:
        prompts = [
            {"prompt": prompt(row), "reward_model": {"ground_truth": ""}} for row in range(PROMPTS * (STEPS + 1))
        ]
        write_lines(folder / "prompts.jsonl", ({**row, "data_source": "bench"} for row in prompts))
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
                replace(it, max_new_tokens=response_length(case.lengths, it.uid, it.sample_index))
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
    counted = [line for line in read_lines(run / "metrics.jsonl") if WARM_UP < line["step"] <= STEPS]
    return {"phases": phases_of(counted), "response": [line["response_length/mean"] for line in counted]}


def phases_of(lines: Sequence[dict[str, float]]) -> dict[str, list[float]]:
    """Seconds by the names of `timing_s/<phase>`."""
    names = [name for name in lines[0] if name.startswith("timing_s/") and all(name in line for line in lines)]
    return {name.removeprefix("timing_s/"): [round(line[name], 5) for line in lines] for name in names}
