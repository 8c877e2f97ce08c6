"""vLLM beside the native engine in one process: the same tokens, rollouts, decode steps, and refit with checksums."""

from __future__ import annotations

import itertools
import statistics
import time
from functools import partial

import numpy as np
import torch

from hpcrl.config.schema import Config
from hpcrl.engine.refit.planner import Resharding
from hpcrl.engine.refit.refit import Refit
from hpcrl.forecast.memory.memory import TrainingPlan
from hpcrl.model.params import shards
from hpcrl.rollout.engines.engine import engine_of
from hpcrl.rollout.protocol import Completion, Request, RolloutEngine, SamplingParams
from hpcrl.runtime import accelerator
from hpcrl.runtime.groups import GroupCache, make_groups
from hpcrl.runtime.layout import Layout
from hpcrl.runtime.world import World
from tools.gpu import decode
from tools.gpu.models import DENSE, REHEARSAL, config_of, shape_of
from tools.gpu.outcome import require
from tools.gpu.rates import measure_ceilings
from tools.gpu.refit import REPETITIONS, copy_seconds

NAMES = ("native", "vllm")
PROMPTS, SAMPLES, LENGTH = (4, 2, 8) if REHEARSAL else (64, 8, 1024)
PROMPT_LENGTH = max(decode.CONTEXTS)
DTYPE = "float32" if REHEARSAL else "bfloat16"


class Side:
    """An engine whose weights come by refit from the same megatron tensors."""

    def __init__(self, world: World, name: str) -> None:
        config = settings(name)
        layout, model, dtype = Layout((world.rank,)), shape_of(DENSE), getattr(torch, DTYPE)
        groups = make_groups({"rollout": layout}, world.rank, GroupCache(world.rank))["rollout"]
        self.engine: RolloutEngine = engine_of(config).make(groups, model, config, ranks_on_node=1)
        plan = Resharding(model, layout, layout, dtype.itemsize, engine_shards=engine_of(config).layout)
        self.source = {}
        generator = torch.Generator(world.device).manual_seed(0)
        for shard in shards(model):
            weight = torch.ones(shard.local_shape, dtype=dtype, device=world.device)
            if weight.dim() > 1:
                weight.normal_(0.0, 0.02, generator=generator)
            self.source[shard.name] = weight
        self.refit = Refit(plan, world.comm, world.rank, dtype, verify="always")
        self.update()
        self.engine.wake()

    def update(self) -> tuple[float, float]:
        """Refit, and return its seconds and those of checksums. Raises if a checksum differs."""
        with torch.no_grad(), self.engine.updating_weights():
            report = self.refit.run(self.source, self.engine.weights())
        return report.seconds, report.checksum_seconds

    def generate(self, sampling: SamplingParams) -> list[Completion]:
        generator = np.random.default_rng(0)
        prompts = [generator.integers(0, 500, 16) for _ in range(PROMPTS)]
        requests = [
            Request(ids, f"p{number}", sample) for number, ids in enumerate(prompts) for sample in range(SAMPLES)
        ]
        return self.engine.generate(requests, sampling, seed=0, step=0)


def settings(engine: str) -> Config:
    rows = max(PROMPTS * SAMPLES, *decode.ROWS)
    lengths = [f"data.max_prompt_length={PROMPT_LENGTH}", f"data.max_response_length={max(LENGTH, decode.STEPS)}"]
    own = [f"rollout.engine={engine}", f"rollout.dtype={DTYPE}", f"rollout.max_num_seqs={rows}"]
    return config_of(DENSE, *own, "rollout.kv_cache_gib=24", *lengths)


def tokens(world: World) -> str:
    """Responses are equal up to rounding: the same random numbers decide, and logits differ in their last bits."""
    found = [Side(world, name).generate(SamplingParams(min(LENGTH, 128), ignore_eos=True)) for name in NAMES]
    equal, total, worst = 0, 0, 0.0
    for ours, theirs in zip(*found, strict=True):
        same = np.cumprod(ours.token_ids == theirs.token_ids).sum()
        equal, total = equal + int(same), total + len(ours.token_ids)
        if same:
            worst = max(worst, float(abs(ours.log_probs[:same] - theirs.log_probs[:same]).max()))
    require(equal > 0, "no response begins with the same token")
    return f"{equal / total:.0%} of tokens are before a response's first difference; log-probs there within {worst:.1e}"


def rollouts(world: World) -> str:
    """Tokens per second, the second of two calls."""
    lines = []
    for name in NAMES:
        side = Side(world, name)
        for _ in range(2):
            start = time.perf_counter()
            done = side.generate(SamplingParams(LENGTH, ignore_eos=True))
            seconds = time.perf_counter() - start
        count = sum(len(each.token_ids) for each in done)
        lines.append(f"{name} {count / seconds:,.0f} tokens/s ({seconds:.2f} s)")
        side.engine.sleep()
    return f"{PROMPTS} x {SAMPLES} x {LENGTH} tokens: {', '.join(lines)}"


def steps(world: World) -> str:
    """A decode step of each engine at some rows and contexts, beside the floor of its bytes."""
    top, best, job = measure_ceilings(world.device), {}, TrainingPlan(config_of(DENSE))
    decode.print_head()
    for name in NAMES:
        side, shares = Side(world, name), []
        for context, rows in itertools.product(decode.CONTEXTS, decode.ROWS):
            generate = partial(decode.native_generate, side.engine, rows, context)
            step = decode.measured(world, generate, f"{name}.{rows}.{context}")
            least = decode.floor(shape_of(DENSE), rows, context, top)
            decode.print_step(name, rows, context, step, least, decode.forecast(job, rows, context))
            shares.append(least / step.seconds)
        best[name] = max(shares)
        side.engine.sleep()
    return "best steps, of their floor: " + ", ".join(f"{name} {share:.0%}" for name, share in best.items())


def refit(world: World) -> str:
    """Into vLLM's own parameters, with checksums of both sides, beside a copy of as many bytes."""
    side = Side(world, "vllm")
    seconds, checksums = map(statistics.median, zip(*(side.update() for _ in range(REPETITIONS)), strict=True))
    nbytes = sum(weight.nbytes for weight in side.source.values())
    accelerator.synchronize(world.device)
    memcpy = copy_seconds(nbytes, world.device)
    return (
        f"{nbytes / 1e9:.2f} GB in {seconds * 1e3:.1f} ms; a copy takes {memcpy * 1e3:.1f} ms; checksums of both sides "
        f"{checksums * 1e3:.1f} ms, equal"
    )
