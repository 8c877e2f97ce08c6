"""Seconds of a decode step of a Qwen2.5-1.5B: the native engine with CUDA graphs and without, and transformers.

The floor is the time that weights, keys and values take at the bandwidth of a copy, each read once. GPU time is that of
the kernels of a step, by torch's profiler; host time is the rest of the step.
"""

from __future__ import annotations

import itertools
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from hpcrl.model.families.config_json import hf_config
from hpcrl.rollout.engines.cache_layout import max_kv_bytes
from hpcrl.rollout.engines.native.engine import NativeEngine
from hpcrl.rollout.protocol import Request, SamplingParams
from hpcrl.runtime import accelerator
from hpcrl.runtime.world import World
from tools.gpu.qwen import REHEARSAL, shape
from tools.gpu.refit import copy_seconds

# Rows that decode at once, tokens of context before each, and steps of which the last half is measured.
ROWS, CONTEXTS, STEPS = ((1, 4), (16, 32), 4) if REHEARSAL else ((1, 64, 256, 512), (512, 2048), 32)
HF_ROWS = ROWS[1:3]
COPY_BYTES = 2**20 if REHEARSAL else 2**32

Generate = Callable[[Callable[[], None]], object]  # calls back after each step


class Step(NamedTuple):
    seconds: float
    gpu_seconds: float | None  # None where there is no GPU


def native(world: World) -> str:
    """All rows and contexts, with graphs."""
    return of_native(world, eager=False)


def native_eager(world: World) -> str:
    return of_native(world, eager=True)


def of_native(world: World, *, eager: bool) -> str:
    top = bandwidth(world.device)
    print_head()
    best = native_steps(world, eager, top)
    return f"a copy moves {top / 1e9:.0f} GB/s; the best step is at {best:.0%} of its floor"


def native_steps(world: World, eager: bool, top: float) -> float:
    """The best step's share of its floor."""
    engine, shares = made(world, eager), []
    weights = sum(weight.nbytes for weight in engine.weights().values())
    for context, rows in itertools.product(CONTEXTS, ROWS):
        kind = "eager" if eager else "CUDA graphs"
        step = measured(world, partial(native_generate, engine, rows, context), f"{kind.split()[-1]}.{rows}.{context}")
        least = floor(weights, rows, context, top)
        print_step(kind, rows, context, step, least)
        shares.append(least / step.seconds)
    return max(shares)


def native_generate(engine: NativeEngine, rows: int, context: int, on_step: Callable[[], None]) -> None:
    """From one prompt, which is prefilled once."""
    requests = [Request(np.arange(context) % 500, "p", index) for index in range(rows)]
    engine.generate(requests, SamplingParams(STEPS, ignore_eos=True), seed=0, step=0, on_step=on_step)


def hugging_face(world: World) -> str:
    """`generate` of transformers with the same shape and sampling, and weights of its own."""
    import transformers

    config = transformers.Qwen2Config(**hf_config(shape()))
    with torch.device(world.device), dtype_of_new_tensors(torch.bfloat16):
        model = transformers.Qwen2ForCausalLM(config).eval()
    model.generation_config.eos_token_id = None
    weights = sum(parameter.nbytes for parameter in model.parameters())
    top, failed = bandwidth(world.device), []
    print_head()
    for context, rows in itertools.product(CONTEXTS, HF_ROWS):
        try:
            step = measured(world, partial(hf_generate, model, rows, context), f"transformers.{rows}.{context}")
        except torch.OutOfMemoryError:
            failed.append(f"{rows} rows of {context}")
            accelerator.release_cached_memory(world.device)
            continue
        print_step("transformers", rows, context, step, floor(weights, rows, context, top))
    return f"transformers {transformers.__version__}" + f"; out of memory: {', '.join(failed)}" * bool(failed)


@contextmanager
def dtype_of_new_tensors(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@torch.no_grad()
def hf_generate(model: Any, rows: int, context: int, on_step: Callable[[], None]) -> None:
    import transformers

    def go_on(input_ids: torch.Tensor, scores: object, **_: object) -> torch.Tensor:
        accelerator.synchronize(input_ids.device)
        on_step()
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)

    ids = (torch.arange(context) % 500).repeat(rows, 1).to(model.device)
    settings = transformers.GenerationConfig(
        do_sample=True, top_k=0, max_new_tokens=STEPS, pad_token_id=0, eos_token_id=None
    )
    stops = transformers.StoppingCriteriaList([go_on])
    model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=settings, stopping_criteria=stops)


def made(world: World, eager: bool) -> NativeEngine:
    """Random weights: normal numbers, and norms of 1."""
    longest = max(CONTEXTS) + STEPS
    engine = NativeEngine(
        shape(),
        None,
        0,
        1,
        torch.bfloat16,
        max_num_seqs=max(ROWS),
        max_num_batched_tokens=8192,
        max_model_len=longest,
        kv_cache_bytes=max_kv_bytes(shape(), 1, 2, max(ROWS), longest),
        enforce_eager=eager,
        device=world.device,
    )
    with torch.no_grad(), engine.updating_weights():
        for weight in engine.weights().values():
            if weight.dim() > 1:
                weight.normal_(0.0, 0.02)
            else:
                weight.fill_(1.0)
    engine.wake()
    return engine


def measured(world: World, generate: Generate, name: str) -> Step:
    """The median of the last half of the steps: once to warm up, once for the time, once under the profiler.

    The folder LOGS of the environment keeps the profile as `name`.
    """
    generate(lambda: None)
    ends: list[float] = []
    generate(lambda: ends.append(time.perf_counter()))
    count = STEPS // 2
    seconds = statistics.median(np.diff(ends)[-count:])
    if world.device.type != "cuda":
        return Step(seconds, None)
    profiler, calls = profile(activities=[ProfilerActivity.CUDA]), itertools.count(1)

    def on_step() -> None:
        call = next(calls)
        if call == len(ends) - count:
            torch.cuda.synchronize()  # the engine has launched a step whose kernels do not count
            profiler.start()
        elif call == len(ends):
            torch.cuda.synchronize()
            profiler.stop()

    generate(on_step)
    if folder := os.environ.get("LOGS"):
        profiler.export_chrome_trace(f"{folder}/decode.{name}.json.gz")
    kernels = [
        each for each in profiler.events() if each.device_type == DeviceType.CUDA and not each.is_user_annotation
    ]
    return Step(seconds, sum(kernel.time_range.elapsed_us() for kernel in kernels) / count / 1e6)


def bandwidth(device: torch.device) -> float:
    """Bytes per second of a copy, read and written."""
    return 2 * COPY_BYTES / copy_seconds(COPY_BYTES, device)


def floor(weight_bytes: int, rows: int, context: int, bytes_per_second: float) -> float:
    """Seconds. A tied embedding is read once, as the head."""
    model = shape()
    kv_bytes = 2 * model.num_layers * model.num_query_groups * model.head_dim * 2  # of a token, in bf16
    return (weight_bytes + rows * context * kv_bytes) / bytes_per_second


def print_head() -> None:
    columns = ("engine", "rows", "context", "ms per step", "GPU ms", "host ms", "floor, ms", "floor / step", "tokens/s")
    print(f"| {' | '.join(columns)} |\n|---|{'---:|' * (len(columns) - 1)}", flush=True)


def print_step(engine: str, rows: int, context: int, step: Step, least: float) -> None:
    gpu, host = "-", "-"
    if step.gpu_seconds is not None:
        gpu, host = f"{step.gpu_seconds * 1e3:.2f}", f"{(step.seconds - step.gpu_seconds) * 1e3:.2f}"
    cells = (engine, rows, context, f"{step.seconds * 1e3:.2f}", gpu, host, f"{least * 1e3:.2f}")
    cells = (*cells, f"{least / step.seconds:.0%}", f"{rows / step.seconds:,.0f}")
    print(f"| {' | '.join(map(str, cells))} |", flush=True)
