"""Samples per second of generation and training in turn (`sync`) and at the same time, with a slow scorer.

    .venv/bin/python tools/bench overlap [key=value ...] [--model 4m] [--rounds 2] [--steps 6]

A GRPO job on five ranks: one leads, two train, two generate. Responses end with their end-of-sequence token, after 64
tokens at the latest, and a score arrives 2 s after its response, as from a judge behind a network. The modes run in
turn; the first two steps of a job are not counted. On two cores generation and training compete for time, so what the
asynchronous modes save is the waiting.
"""

from __future__ import annotations

import argparse
import tempfile
from functools import partial
from pathlib import Path
from statistics import median

from bench.harness import in_turn, spread
from bench.step import MODELS, WARM_UP, Hpcrl, add_sizes, make_work, write_model
from peers import NoPeer

RANKS = 5
MODES = {
    "sync": (),
    "one_step_off": ("async_training.mode=one_step_off",),
    "bounded_staleness": (
        "async_training.mode=bounded_staleness",
        "async_training.staleness_threshold=1",
        "async_training.partial_rollout=true",
    ),
}
PLACEMENT = (
    "placement.pools={lead: '0', train: '1-2', generate: '3-4'}",
    "placement.actor.pool=train",
    "placement.rollout.pool=generate",
)
SLOW_SCORE = """
import asyncio

async def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    await asyncio.sleep({seconds})
    return sum(map(ord, solution_str)) % 97 / 97
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("overrides", nargs="*", help="key=value")
    parser.add_argument("--model", default="4m", choices=[*MODELS, "smollm2"])
    parser.add_argument("--modes", nargs="+", default=list(MODES), choices=list(MODES))
    parser.add_argument("--rounds", type=int, default=2, help="jobs of each mode, in turn")
    parser.add_argument("--steps", type=int, default=6, help="counted steps of a job")
    parser.add_argument("--scorer-seconds", type=float, default=2.0)
    add_sizes(parser)
    parser.add_argument("--longest", type=int, default=64, help="tokens of a response at most")


def main(options: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory(prefix="bench_overlap_") as name:
        folder = Path(name)
        (folder / "model").mkdir()
        work = make_work(write_model(options.model, folder / "model"), True, options)
        score = folder / "slow_score.py"
        score.write_text(SLOW_SCORE.format(seconds=options.scorer_seconds))
        samples = options.prompts * options.samples
        common = (
            *PLACEMENT,
            f"reward.custom_reward_function.path={score}",
            "reward.reward_manager.name=rate_limited",
            f"reward.reward_kwargs.max_concurrent={samples}",
            *options.overrides,
        )

        def step_seconds(mode: str) -> float:
            try:
                measured = Hpcrl(RANKS, 1, (*common, *MODES[mode])).run(work, options.steps, folder)
            except NoPeer as error:
                raise SystemExit(f"{mode}: {error}") from None
            return sum(measured.seconds) / len(measured.seconds)

        seconds = in_turn({mode: partial(step_seconds, mode) for mode in options.modes}, options.rounds)
        print(f"{samples} samples a step, after {WARM_UP} steps; scores after {options.scorer_seconds:g} s")
        for mode, each in seconds.items():
            line = f"  {mode:18} {spread(each).replace(' s ', ' s a step ')}, {samples / median(each):6.1f} samples/s"
            if mode != options.modes[0]:
                line += f", {median(seconds[options.modes[0]]) / median(each):.2f} times {options.modes[0]}"
            print(line)
