"""Tokens per second of the native engine and of Hugging Face's `generate`: `python tools/bench rollout`.

Same weights (through the Llama name table), same prompts, same lengths, same sampling (temperature 1, no filter), side
by side in one run; two cores, as one process of two threads or two processes of one, whichever is faster for each side;
medians of interleaved repetitions. `floor` is the time that the bare matrix products of the engine take: its share of
the engine's time says what is left to gain.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import NamedTuple

os.environ["TRANSFORMERS_VERBOSITY"] = "error"

import numpy as np
import torch
import transformers
from bench.harness import Server, in_turn, product_seconds

from hpcrl.kernels.onednn import use_onednn
from hpcrl.model.families.config_json import hf_config
from hpcrl.model.hf_files import Safetensors
from hpcrl.model.params import shards
from hpcrl.model.shape import ModelShape
from hpcrl.rollout.engines.engine import max_kv_bytes
from hpcrl.rollout.engines.native.engine import NativeEngine
from hpcrl.rollout.protocol import Request, SamplingParams
from hpcrl.runtime.world import keep_freed_memory

SHAPE = ModelShape(
    num_layers=4,
    hidden_size=256,
    ffn_hidden_size=688,
    num_attention_heads=8,
    num_query_groups=2,
    head_dim=32,
    vocab_size=4096,
)
NUM_PROMPTS = 128
CORES = 2
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
HF_CACHES = ("dynamic", "static")  # with sdpa attention: eager took 1.4 to 3.4 times as long


class Work(NamedTuple):
    """Prompts (token ids) and how many tokens to draw behind each."""

    prompts: list[np.ndarray]
    lengths: np.ndarray

    def part(self, rank: int, size: int) -> Work:
        return Work(self.prompts[rank::size], self.lengths[rank::size])


def make_work(variable: bool) -> Work:
    generator = np.random.default_rng(0)
    prompts = [generator.integers(3, SHAPE.vocab_size, generator.integers(32, 65)) for _ in range(NUM_PROMPTS)]
    if not variable:
        return Work(prompts, np.full(NUM_PROMPTS, 128))
    # Log-normal, scaled so that the longest is 8 times the median.
    spread = np.sort(generator.normal(size=NUM_PROMPTS))
    spread = (spread - np.median(spread)) / (spread[-1] - np.median(spread))
    return Work(prompts, generator.permutation(np.round(64 * 8.0**spread).astype(int)))


class Sides:
    """Both engines with the same weights, and the bare matrix products."""

    def __init__(self, dtype: torch.dtype) -> None:
        use_onednn()  # for both sides, as a rank does
        keep_freed_memory()
        torch.manual_seed(0)
        config = transformers.LlamaConfig(**hf_config(SHAPE), attn_implementation="sdpa")
        self.model = transformers.LlamaForCausalLM(config).to(dtype).eval()
        self.model.generation_config.eos_token_id = None  # it would take the place of ours, which is None
        self.dtype = dtype
        self.engines: dict[bool, NativeEngine] = {}

    def call(self, method: str, threads: int, *arguments: object) -> float:
        torch.set_num_threads(threads)
        return getattr(self, method)(*arguments)

    def engine(self, exact: bool) -> NativeEngine:
        """Made when it is first used, as exact mode asks for one thread."""
        if exact not in self.engines:
            longest = 64 + 512
            self.engines[exact] = NativeEngine(
                SHAPE,
                None,
                0,
                1,
                self.dtype,
                max_num_seqs=NUM_PROMPTS,
                max_num_batched_tokens=8192,
                max_model_len=longest,
                kv_cache_bytes=max_kv_bytes(SHAPE, 1, self.dtype.itemsize, NUM_PROMPTS, longest) // 2,
                exact=exact,
            )
            with tempfile.TemporaryDirectory() as folder:
                self.model.save_pretrained(folder)
                Safetensors(Path(folder)).load(SHAPE, shards(SHAPE), self.engines[exact].weights())
        return self.engines[exact]

    def native(self, work: Work, exact: bool) -> int:
        requests = [
            Request(prompt, f"bench:{number}:0", max_new_tokens=int(length))
            for number, (prompt, length) in enumerate(zip(*work, strict=True))
        ]
        done = self.engine(exact).generate(requests, SamplingParams(int(work.lengths.max())), seed=0, step=0)
        return sum(len(completion.token_ids) for completion in done)

    @torch.no_grad()
    def hf(self, work: Work, cache: str) -> int:
        longest = max(map(len, work.prompts))
        padded = [np.pad(prompt, (longest - len(prompt), 0)) for prompt in work.prompts]
        mask = [np.pad(np.ones_like(prompt), (longest - len(prompt), 0)) for prompt in work.prompts]
        limits = torch.from_numpy(work.lengths) + longest

        def at_limit(input_ids: torch.Tensor, scores: object, **_: object) -> torch.Tensor:
            return input_ids.size(1) >= limits

        settings = transformers.GenerationConfig(
            do_sample=True,
            top_k=0,
            top_p=1.0,
            temperature=1.0,
            max_new_tokens=int(work.lengths.max()),
            pad_token_id=0,
            eos_token_id=None,
            cache_implementation=cache,
            disable_compile=True,
        )
        out = self.model.generate(
            torch.tensor(np.stack(padded)),
            attention_mask=torch.tensor(np.stack(mask)),
            generation_config=settings,
            stopping_criteria=transformers.StoppingCriteriaList([at_limit]),
        )
        assert out.size(1) == limits.max()
        return int(work.lengths.sum())

    @torch.no_grad()
    def floor(self, work: Work) -> float:
        """Seconds of the matrix products alone: all prompts at once, then each step with the rows that still run."""
        weights = [weight for name, weight in self.engine(False).weights().items() if "norm" not in name]
        weights = weights[1:]  # the embedding is looked up
        prefill = product_seconds(weights[:-1], sum(map(len, work.prompts)))  # without the head
        running = (work.lengths[:, None] > np.arange(work.lengths.max())).sum(0)
        known = [n for n in (1, 2, 4, 8, 16, 32, 64, 128) if n <= len(work.prompts)]
        return prefill + float(np.interp(running, known, [product_seconds(weights, n) for n in known]).sum())


class Way(NamedTuple):
    """How the two cores are used for one of the engines."""

    ranks: int
    method: str  # of `Sides`
    arguments: tuple

    def __str__(self) -> str:
        return f"{self.ranks} x {CORES // self.ranks} threads" + f", {self.arguments[0]} cache" * (self.method == "hf")


class Machine:
    """Two processes, and how to use the two cores: one of them with two threads, or both with one."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._servers = [Server(Sides, dtype) for _ in range(CORES)]

    def call(self, ranks: int, method: str, work: Work, *arguments: object) -> tuple[float, list]:
        """Seconds until the last process is done, and the results."""
        start = time.perf_counter()
        for rank, server in enumerate(self._servers[:ranks]):
            server.send("call", method, CORES // ranks, work.part(rank, ranks), *arguments)
        results = [server.receive() for server in self._servers[:ranks]]
        return time.perf_counter() - start, results

    def fastest(self, ways: list[Way], work: Work) -> Way:
        """The fastest of `ways`, tried twice each after a warm-up."""
        for way in ways:
            self.seconds(way, work)
        return min(ways, key=lambda way: min(self.seconds(way, work) for _ in range(2)))

    def seconds(self, way: Way, work: Work) -> float:
        seconds, numbers_of_tokens = self.call(way.ranks, way.method, work, *way.arguments)
        assert sum(numbers_of_tokens) == work.lengths.sum()
        return seconds

    def close(self) -> None:
        for server in self._servers:
            server.close()


def compare(dtype: str, variable: bool, repetitions: int, with_exact: bool) -> None:
    machine, work = Machine(DTYPES[dtype]), make_work(variable)
    tokens = int(work.lengths.sum())
    trial = work._replace(lengths=-(-work.lengths // 4))
    ranks = range(1, CORES + 1)
    ways = {
        "hf": machine.fastest([Way(n, "hf", (cache,)) for n in ranks for cache in HF_CACHES], trial),
        "native": machine.fastest([Way(n, "native", (False,)) for n in ranks], trial),
    }
    if with_exact:
        ways["exact"] = Way(CORES, "native", (True,))
    runs = {name: partial(machine.seconds, way, work) for name, way in ways.items()}
    seconds = in_turn(runs, repetitions, warm_up=1)
    median = {name: float(np.median(times)) for name, times in seconds.items()}
    floor = max(machine.call(ways["native"].ranks, "floor", work)[1])
    machine.close()
    kind = "varying" if variable else "fixed"
    for name, way in ways.items():
        print(
            f"{dtype} {kind:>7} lengths, {name:>6}: {tokens / median[name]:8.0f} tokens/s, "
            f"{median['hf'] / median[name]:5.2f} x hf, floor {floor / median[name]:4.0%}, "
            f"{min(seconds[name]):.2f} to {max(seconds[name]):.2f} s  [{way}]",
            flush=True,
        )


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--lengths", nargs="+", choices=["fixed", "varying"], default=["fixed", "varying"])
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--no-exact", action="store_true", help="leave out exact mode, which is fp32 only")


def main(options: argparse.Namespace) -> None:
    for dtype in options.dtypes:
        for lengths in options.lengths:
            compare(dtype, lengths == "varying", options.repetitions, dtype == "fp32" and not options.no_exact)
