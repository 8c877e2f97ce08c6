"""Time per token and memory of long responses beside short ones: `python tools/bench long [--tokens 64 2048]`.

64 prompts of 32 tokens with 4 samples each on the native engine, 4 layers of 256, fp32, two threads. Attention grows
with the tokens that it attends to, and is timed apart; the rest should take as long for every token. `memory` is what
the process has resident at most, without the KV cache.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import numpy as np
import psutil
import torch
from bench.harness import MEBI
from bench.rollout import SHAPE

from hpcrl.kernels.onednn import use_onednn
from hpcrl.rollout.engines.native.attention import DecodeAttention
from hpcrl.rollout.engines.native.engine import NativeEngine
from hpcrl.rollout.protocol import Request, SamplingParams
from hpcrl.runtime.world import keep_freed_memory

NUM_PROMPTS, SAMPLES, PROMPT_TOKENS = 64, 4, 32
STEPS_BETWEEN = 64  # measurements of memory


class AttentionTime:
    """Seconds inside `DecodeAttention` since the last `take`."""

    def __init__(self) -> None:
        self._seconds = 0.0
        attend = DecodeAttention.__call__

        def timed(*arguments: Any) -> torch.Tensor:
            start = time.perf_counter()
            output = attend(*arguments)
            self._seconds += time.perf_counter() - start
            return output

        DecodeAttention.__call__ = timed  # type: ignore[method-assign]

    def take(self) -> float:
        seconds, self._seconds = self._seconds, 0.0
        return seconds


def run(tokens: int, requests: list[Request], attention: AttentionTime) -> None:
    """Generate `tokens` for each request, and print what a token took."""
    engine = NativeEngine(
        SHAPE,
        None,
        0,
        1,
        torch.float32,
        max_num_seqs=len(requests),
        max_num_batched_tokens=8192,
        max_model_len=PROMPT_TOKENS + tokens,
    )
    torch.manual_seed(0)
    for name, weight in engine.weights().items():
        torch.nn.init.ones_(weight) if "norm" in name else torch.nn.init.normal_(weight, std=0.02)
    of_token = 2 * SHAPE.num_layers * SHAPE.num_query_groups * SHAPE.head_dim * 4  # bytes in the cache
    process, ends = psutil.Process(), [time.perf_counter()]
    attended: list[float] = []  # seconds of attention in each step
    memory = 0.0

    def on_step() -> None:
        nonlocal memory
        ends.append(time.perf_counter())
        attended.append(attention.take())
        if len(attended) % STEPS_BETWEEN == 0:
            cached = len(requests) * (PROMPT_TOKENS + len(attended)) * of_token
            memory = max(memory, (process.memory_info().rss - cached) / MEBI)

    engine.generate(requests, SamplingParams(tokens, ignore_eos=True), seed=0, step=0, on_step=on_step)
    first = len(attended) // 8  # later steps have compiled kernels
    of_attention = 1e6 * float(np.mean(attended[first:])) / len(requests)
    whole = 1e6 * float(np.mean(np.diff(ends)[first:])) / len(requests)
    parts = f"{of_attention:.1f} of attention, {whole - of_attention:.1f} of the rest"
    print(f"{tokens} tokens: {whole:.1f} us a token, {parts}; memory {memory:.0f} MiB")


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tokens", type=int, nargs="+", default=[64, 2048], help="of a response, a run each")


def main(options: argparse.Namespace) -> None:
    torch.set_num_threads(2)
    use_onednn()
    keep_freed_memory()
    attention, generator = AttentionTime(), np.random.default_rng(0)
    prompts = [generator.integers(3, SHAPE.vocab_size, PROMPT_TOKENS) for _ in range(NUM_PROMPTS)]
    requests = [
        Request(prompt, f"long:{number}", sample_index=sample)
        for number, prompt in enumerate(prompts)
        for sample in range(SAMPLES)
    ]
    for tokens in options.tokens:
        run(tokens, requests, attention)
