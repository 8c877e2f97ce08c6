"""Rollouts by vLLM inside hpcrl and by vLLM alone: `.venv-vllm/bin/python tools/bench vllm models/smollm2`.

Both have the same weights, prompts, lengths, threads and block size, and log-probs of the sampled tokens; both leave
weights as they are (vLLM's packed copies for a CPU would not be reached by a refit). Two processes take turns; medians
of `--repetitions` after a warm-up. `no log-probs` is vLLM alone without them, which RL needs.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from bench.harness import Server, in_turn, spread, timed

THREADS = 2
PROMPTS, SAMPLES, PROMPT_LENGTH, LENGTH = 16, 8, 48, 64
LIMIT = 1.1  # of the time of vLLM alone


def prompts() -> list[list[int]]:
    generator = np.random.default_rng(0)
    return [generator.integers(100, 40000, PROMPT_LENGTH).tolist() for _ in range(PROMPTS)]


class Inside:
    """The engine of a job with one rank."""

    def __init__(self, folder: str) -> None:
        from hpcrl.config.schema import Config
        from hpcrl.engine.refit.planner import Resharding
        from hpcrl.engine.refit.refit import Refit
        from hpcrl.model.families.config_json import read_shape
        from hpcrl.model.hf_files import open_weights
        from hpcrl.model.params import shards
        from hpcrl.rollout.engines.engine import engine_of
        from hpcrl.runtime.groups import GroupCache, make_groups
        from hpcrl.runtime.layout import Layout
        from hpcrl.runtime.world import start_mpi, start_torch

        world = start_torch(start_mpi())
        import torch

        torch.set_num_threads(THREADS)
        rollout = {"engine": "vllm", "max_num_seqs": PROMPTS * SAMPLES, "dtype": "float32"}
        lengths = {"max_prompt_length": PROMPT_LENGTH, "max_response_length": LENGTH}
        config = Config.model_validate({"rollout": rollout, "data": lengths})
        shape, layout = read_shape(Path(folder)), Layout((0,))
        groups = make_groups({"rollout": layout}, 0, GroupCache(0))["rollout"]
        self.engine = engine_of(config).make(groups, shape, config, ranks_on_node=1)
        source = {it.name: torch.empty(it.local_shape) for it in shards(shape)}
        open_weights(Path(folder), shape).load(shape, shards(shape), source)
        plan = Resharding(shape, layout, layout, 4, engine_shards=engine_of(config).layout)
        with torch.no_grad(), self.engine.updating_weights():
            Refit(plan, world.comm, 0, torch.float32).run(source, self.engine.weights())

    def generate(self) -> Any:
        from hpcrl.rollout.protocol import Request, SamplingParams

        own = [Request(ids, f"p{number}", sample) for number, ids in enumerate(prompts()) for sample in range(SAMPLES)]
        return self.engine.generate(own, SamplingParams(LENGTH, ignore_eos=True), seed=0, step=0)


class Alone:
    """vLLM's own `LLM`."""

    logprobs: int | None = 0

    def __init__(self, folder: str) -> None:
        from hpcrl.rollout.engines.vllm.core import ENVIRONMENT

        os.environ.update(ENVIRONMENT)
        import torch
        import vllm._custom_ops
        from vllm import LLM

        vllm._custom_ops._supports_onednn = False
        self.model = LLM(
            model=folder,
            dtype="float32",
            enforce_eager=True,
            max_model_len=PROMPT_LENGTH + LENGTH,
            max_num_seqs=PROMPTS * SAMPLES,
            max_num_batched_tokens=8192,
            kv_cache_memory_bytes=2**30,
            block_size=32,
        )
        torch.set_num_threads(THREADS)

    def generate(self) -> Any:
        from vllm import SamplingParams

        self.model.reset_prefix_cache()
        sampling = SamplingParams(n=SAMPLES, max_tokens=LENGTH, ignore_eos=True, logprobs=self.logprobs)
        return self.model.generate([{"prompt_token_ids": ids} for ids in prompts()], sampling, use_tqdm=False)


class WithoutLogProbs(Alone):
    logprobs = None


SIDES = {"inside hpcrl": Inside, "alone": Alone, "no log-probs": WithoutLogProbs}


class Timed:
    """A side that measures its generations."""

    def __init__(self, name: str, folder: str) -> None:
        self.side = SIDES[name](folder)

    def seconds(self) -> float:
        return timed(self.side.generate)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="Hugging Face directory")
    parser.add_argument("--repetitions", type=int, default=5)


def main(options: argparse.Namespace) -> int:
    os.environ.update(OMP_NUM_THREADS=str(THREADS), HF_HUB_OFFLINE="1")
    sides: dict[str, Callable[[], float]] = {}
    for name in SIDES:
        sides[name] = partial(generation_seconds, Server(Timed, name, options.model))
        sides[name]()  # one after the other; warms up
    seconds = in_turn(sides, options.repetitions)
    for name, times in seconds.items():
        rate = PROMPTS * SAMPLES * LENGTH / median(times)
        print(f"{name:>12}: {spread(times)}, {rate:6.0f} tokens/s")
    ratio = median(seconds["inside hpcrl"]) / median(seconds["alone"])
    print(f"inside hpcrl / alone: {ratio:.2f} (at most {LIMIT})")
    return ratio > LIMIT


def generation_seconds(side: Server) -> float:
    side.send("seconds")
    return side.receive()
