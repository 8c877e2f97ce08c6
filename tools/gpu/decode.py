"""Seconds of a decode step: the native engine with CUDA graphs and without, and transformers.

The floor is a sum over products and attention, which run one after the other, of the larger of two times: that of the
bytes, each weight, key and value read once, at the bandwidth of a reduction, and that of the operations at the rate of
a large product. GPU time is that of the kernels of a step, by torch's profiler; host time is the rest of the step. The
forecast has the published figures of the chip.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from hpcrl.forecast.memory.memory import GIB, TrainingPlan, with_keys
from hpcrl.forecast.time.lengths import Lengths
from hpcrl.forecast.time.phases import JobTimes
from hpcrl.kernels.dispatch import FP8
from hpcrl.kernels.fp8_matrix import LARGEST, Fp8Matrix
from hpcrl.model.blocks.block import blocks_of
from hpcrl.model.blocks.micro_batch import MicroBatch
from hpcrl.model.families.config_json import hf_config
from hpcrl.model.shape import ModelShape
from hpcrl.rollout.engines.engine import max_kv_bytes
from hpcrl.rollout.engines.native.engine import NativeEngine
from hpcrl.rollout.protocol import Request, SamplingParams
from hpcrl.runtime import accelerator
from hpcrl.runtime.layout import Layout
from hpcrl.runtime.world import World
from tools.gpu.models import DENSE, MIXTURE, REHEARSAL, config_of, machine, shape_of
from tools.gpu.rates import DTYPE, Ceilings, Kernel, kernels_of, measure_ceilings, print_kernels, products_of, profiler

# Rows that decode at once, tokens of context in the mean of the measured steps, and steps, of which the last half is
# measured.
ROWS, CONTEXTS, STEPS = ((1, 4), (16, 32), 4) if REHEARSAL else ((1, 64, 256, 512), (512, 2048), 32)
EXPERT_ROWS, EXPERT_CONTEXTS = (ROWS[1:], CONTEXTS[:1]) if REHEARSAL else ((512,), (266,))
HF_ROWS = ROWS[1:3]

Generate = Callable[[Callable[[], None]], object]  # calls back after each step


class Step(NamedTuple):
    seconds: float
    kernels: Sequence[Kernel]  # none where there is no GPU

    @property
    def gpu_seconds(self) -> float:
        return sum(kernel.seconds for kernel in self.kernels)


def native(
    world: World,
    template: Path = DENSE,
    rows: Sequence[int] = ROWS,
    contexts: Sequence[int] = CONTEXTS,
    eager: bool = False,
    shows_kernels: bool = False,
    fp8: bool = False,
) -> str:
    """Measure decoding by the native engine.

    Args:
        fp8: weights and cache in 8 bits; the floor stays that of bf16.
    """
    top = measure_ceilings(world.device)
    accelerator.release_cached_memory(world.device)
    if world.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    engine = made(world, shape_of(template), max(rows), max(contexts) + STEPS, eager, fp8)
    kind = "CUDA graphs" if engine._paged is not None and engine._paged._graphs is not None else "eager"
    keys = {"rollout.quantization": "fp8", "rollout.kv_cache_dtype": "fp8"} if fp8 else {}
    job, shares = TrainingPlan(with_keys(config_of(template), keys)), []
    print_head()
    for context, count in itertools.product(contexts, rows):
        name = f"{template.stem}.{'fp8.' * fp8}{kind.split()[-1]}.{count}.{context}"
        step = measured(world, partial(native_generate, engine, count, context), name)
        least = floor(shape_of(template), count, context, top)
        print_step(kind, count, context, step, least, forecast(job, count, context))
        shares.append(least / step.seconds)
    if shows_kernels and step.kernels:
        print_kernels(step.kernels)
    cache = max_kv_bytes(shape_of(template), 1, 1 if fp8 else DTYPE.itemsize, max(rows), max(contexts) + STEPS)
    return f"{top}; the best step is at {max(shares):.0%} of its floor{memory(job, cache)}"


native_short = partial(native, contexts=CONTEXTS[:1])
native_long = partial(native, contexts=CONTEXTS[1:])
native_fp8 = partial(native, contexts=CONTEXTS[:1], shows_kernels=True, fp8=True)
native_eager = partial(native, contexts=CONTEXTS[:1], eager=True)
mixture = partial(native, template=MIXTURE, rows=EXPERT_ROWS, contexts=EXPERT_CONTEXTS, shows_kernels=True)


def memory(job: TrainingPlan, cache: int) -> str:
    """The peak beside a KV cache of so many bytes, and what `hpcrl plan` expects of weights, prefill and sampling."""
    if not torch.cuda.is_available():
        return ""
    planned = job.engine.weights + sum(job.engine.work())
    found = torch.cuda.max_memory_allocated() - cache
    return f"; {found / GIB:.1f} GiB at most beside the KV cache, planned {planned / GIB:.1f}"


def native_generate(engine: NativeEngine, rows: int, context: int, on_step: Callable[[], None]) -> None:
    """From one prompt, which is prefilled once."""
    requests = [Request(np.arange(prompt_of(context)) % 500, "p", index) for index in range(rows)]
    engine.generate(requests, SamplingParams(STEPS, ignore_eos=True), seed=0, step=0, on_step=on_step)


def prompt_of(context: int) -> int:
    """Tokens of a prompt after which the measured steps have this context in the mean."""
    return context - 3 * STEPS // 4


def hugging_face(world: World, contexts: Sequence[int] = CONTEXTS) -> str:
    """`generate` of transformers with the same shape and sampling, and weights of its own."""
    import transformers

    top, job, failed = measure_ceilings(world.device), TrainingPlan(config_of(DENSE)), []
    accelerator.release_cached_memory(world.device)
    config = transformers.Qwen2Config(**hf_config(shape_of(DENSE)))
    with torch.device(world.device), dtype_of_new_tensors(torch.bfloat16):
        model = transformers.Qwen2ForCausalLM(config).eval()
    model.generation_config.eos_token_id = None
    print_head()
    for context, rows in itertools.product(contexts, HF_ROWS):
        try:
            step = measured(world, partial(hf_generate, model, rows, context), f"transformers.{rows}.{context}")
        except torch.OutOfMemoryError:
            failed.append(f"{rows} rows of {context}")
            accelerator.release_cached_memory(world.device)
            continue
        least = floor(shape_of(DENSE), rows, context, top)
        print_step("transformers", rows, context, step, least, forecast(job, rows, context))
    return f"transformers {transformers.__version__}" + f"; out of memory: {', '.join(failed)}" * bool(failed)


hugging_face_short = partial(hugging_face, contexts=CONTEXTS[:1])
hugging_face_long = partial(hugging_face, contexts=CONTEXTS[1:])


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

    ids = (torch.arange(prompt_of(context)) % 500).repeat(rows, 1).to(model.device)
    settings = transformers.GenerationConfig(
        do_sample=True, top_k=0, max_new_tokens=STEPS, pad_token_id=0, eos_token_id=None
    )
    stops = transformers.StoppingCriteriaList([go_on])
    model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=settings, stopping_criteria=stops)


def made(world: World, shape: ModelShape, rows: int, longest: int, eager: bool, fp8: bool) -> NativeEngine:
    """Random weights: normal numbers, and norms of 1."""
    engine = NativeEngine(
        shape,
        None,
        0,
        1,
        DTYPE,
        max_num_seqs=rows,
        max_num_batched_tokens=8192,
        max_model_len=longest,
        kv_cache_bytes=max_kv_bytes(shape, 1, 1 if fp8 else DTYPE.itemsize, rows, longest),
        enforce_eager=eager,
        quantization="fp8" if fp8 else None,
        cache_dtype=FP8 if fp8 else None,
        device=world.device,
    )
    with torch.no_grad(), engine.updating_weights():
        for weight in engine.weights().values():
            if isinstance(weight, Fp8Matrix):
                weight.scales.fill_(8 * 0.02 / LARGEST)
                weight.copy_(0.02 * torch.randn(weight.shape, dtype=DTYPE, device=world.device))
            elif weight.dim() > 1:
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
        return Step(seconds, ())
    profiled, calls = profiler(), itertools.count(1)

    def on_step() -> None:
        call = next(calls)
        if call == len(ends) - count:
            torch.cuda.synchronize()  # the engine has launched a step whose kernels do not count
            profiled.start()
        elif call == len(ends):
            torch.cuda.synchronize()
            profiled.stop()

    generate(on_step)
    return Step(seconds, kernels_of(profiled, f"decode.{name}", count))


def floor(shape: ModelShape, rows: int, context: int, top: Ceilings) -> float:
    """Seconds. A tied embedding is read once, as the head."""
    units, found = top.units(), 0.0
    for products, count in products_of(shape, rows):
        each = (units.product(products.rows, *matrix, groups=products.groups) for matrix in products.matrices)
        found += count * sum(cost.seconds for cost in each)
    for block, count in blocks_of(shape.layers).items():
        it = block.computation(MicroBatch(Layout((0,)), rows, DTYPE.itemsize))
        read = rows * (context if it.sees is None else min(context, it.sees))
        found += count * read * max(it.cached_width * DTYPE.itemsize / top.read, 2 * it.decode_width / top.flops)
    return found


def forecast(job: TrainingPlan, rows: int, context: int) -> float:
    """Seconds that hpcrl.forecast expects of such a step."""
    lengths = Lengths.fixed(context - 1, 1)
    engine = JobTimes(job, machine(), lengths).engine
    return (engine.step(rows) + engine.cached(rows, lengths)).seconds


def print_head() -> None:
    columns = ("engine", "rows", "context", "ms per step", "GPU ms", "host ms", "floor, ms", "floor / step")
    columns = (*columns, "forecast, ms", "tokens/s")
    print(f"| {' | '.join(columns)} |\n|---|{'---:|' * (len(columns) - 1)}", flush=True)


def print_step(engine: str, rows: int, context: int, step: Step, least: float, expected: float) -> None:
    gpu, host = "-", "-"
    if step.kernels:
        gpu, host = f"{step.gpu_seconds * 1e3:.2f}", f"{(step.seconds - step.gpu_seconds) * 1e3:.2f}"
    cells = (engine, rows, context, f"{step.seconds * 1e3:.2f}", gpu, host, f"{least * 1e3:.2f}")
    cells = (*cells, f"{least / step.seconds:.0%}", f"{expected * 1e3:.2f}", f"{rows / step.seconds:,.0f}")
    print(f"| {' | '.join(map(str, cells))} |", flush=True)
