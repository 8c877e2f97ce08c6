"""Generation's memory: what bounds it, and that the longest response does not."""

from __future__ import annotations

import mmap
import tracemalloc
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hpcrl.model.shape import ModelShape
from hpcrl.rollout.engines.engine import CacheLayout, max_kv_bytes
from hpcrl.rollout.engines.native.engine import NativeEngine
from hpcrl.rollout.engines.native.row_cache import RowCache
from hpcrl.rollout.protocol import Completion, Request, SamplingParams
from hpcrl.runtime.exits import InputError

SHAPE = ModelShape(
    num_layers=4,
    hidden_size=128,
    ffn_hidden_size=192,
    num_attention_heads=4,
    num_query_groups=2,
    head_dim=32,
    vocab_size=120,
)
NUM_BLOCKS = 24
NUM_REQUESTS, SHORT, TIMES = 8, 8, 16


class LiveTensors(TorchDispatchMode):
    """`peak` bytes of the storages that were alive at once, of those that operations made."""

    def __init__(self, known: list[torch.Tensor]) -> None:
        super().__init__()
        self.peak = 0
        self._known = {tensor.untyped_storage().data_ptr() for tensor in known}
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}
        self._nbytes = 0  # of `_live`, in which storages may have expired

    def __torch_dispatch__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if storage.data_ptr() not in self._known:
                    reference = StorageWeakRef(storage)
                    if reference.cdata not in self._live:
                        self._live[reference.cdata] = reference, storage.nbytes()
                        self._nbytes += storage.nbytes()
        if self._nbytes > self.peak:
            self._live = {key: entry for key, entry in self._live.items() if not entry[0].expired()}
            self._nbytes = sum(nbytes for _, nbytes in self._live.values())
            self.peak = max(self.peak, self._nbytes)
        return result


def make_engine(max_model_len: int, **sizes: int) -> NativeEngine:
    sizes = {"max_num_seqs": 8, "max_num_batched_tokens": 64} | sizes
    cache = NUM_BLOCKS * CacheLayout.of(SHAPE, 1, 1 << 20).block_bytes(4)
    engine = NativeEngine(
        SHAPE, None, 0, 1, torch.float32, max_model_len=max_model_len, **{"kv_cache_bytes": cache, **sizes}
    )
    generator = torch.Generator().manual_seed(0)
    for weight in engine.weights().values():
        weight.copy_(0.3 * torch.randn(weight.shape, generator=generator))
    return engine


def make_requests() -> list[Request]:
    generator = np.random.default_rng(0)
    # one that is prefilled in parts
    lengths = [130, *generator.integers(10, 30, NUM_REQUESTS - 1)]
    return [
        Request(generator.integers(2, SHAPE.vocab_size, length), f"file:{number}:0")
        for number, length in enumerate(lengths)
    ]


def peak_bytes(max_model_len: int, sampling: SamplingParams, **sizes: int) -> tuple[int, list[Completion]]:
    """Of tensors and of numpy's and Python's own memory, weights and KV cache included."""
    tracemalloc.start()
    try:
        engine = make_engine(max_model_len, **sizes)
        engine.generate(make_requests(), sampling, seed=0, step=0)
        _, others = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    cache = engine._cache
    constant = list(engine.weights().values())
    with LiveTensors([*constant, *cache.planes[0].owned]) as tensors:
        completions = engine.generate(make_requests(), sampling, seed=0, step=0)
    return sum(tensor.nbytes for tensor in constant) + tensors.peak + others, completions


@pytest.mark.slow
def test_memory_does_not_grow_with_the_longest_response() -> None:
    stops = tuple(range(2, 12))
    # What is imported and cached the first time, by preemption too, is not the engine's.
    peak_bytes(TIMES * SHORT + 130, SamplingParams(TIMES * SHORT, ignore_eos=True))
    short, expected = peak_bytes(SHORT + 130, SamplingParams(SHORT, eos_token_ids=stops))
    same, completions = peak_bytes(TIMES * SHORT + 130, SamplingParams(TIMES * SHORT, eos_token_ids=stops))
    assert [c.token_ids.tolist()[:SHORT] for c in completions] == [c.token_ids.tolist() for c in expected]
    new_tokens = sum(len(c.token_ids) for c in completions)
    assert same < 1.02 * short + 16 * new_tokens
    # Longer responses in fact: they do not fit at once any more, and cost what their tokens take.
    long, completions = peak_bytes(TIMES * SHORT + 130, SamplingParams(TIMES * SHORT, ignore_eos=True))
    assert {len(c.token_ids) for c in completions} == {TIMES * SHORT}
    assert TIMES * SHORT * 8 > NUM_BLOCKS * 32
    # Garbage that waits for Python's collector is 1 to 3%; room for all the tokens at once would be 60%.
    assert long < 1.1 * short + 16 * NUM_REQUESTS * TIMES * SHORT


def test_memory_does_not_grow_with_a_limit_that_no_response_reaches() -> None:
    limit, stops = 16_000, tuple(range(2, 12))
    cache = {"kv_cache_bytes": 512 * CacheLayout.of(SHAPE, 1, 1 << 20).block_bytes(4)}
    peak_bytes(limit + 130, SamplingParams(SHORT, eos_token_ids=stops), **cache)  # what is cached the first time
    short, _ = peak_bytes(limit + 130, SamplingParams(SHORT, eos_token_ids=stops), **cache)
    long, completions = peak_bytes(limit + 130, SamplingParams(limit, eos_token_ids=stops), **cache)
    assert sum(len(c.token_ids) for c in completions) < 200
    assert long - short < 100_000  # 10,000 in fact; room for a number per token of the 8 rows would be 512,000


def test_the_largest_cache_has_all_sequences_at_their_longest() -> None:
    sizes = {"max_num_seqs": 8, "max_model_len": 100}
    most = max_kv_bytes(SHAPE, 1, torch.float32.itemsize, **sizes)
    assert most == 8 * 4 * CacheLayout.of(SHAPE, 1, 1 << 20).block_bytes(4)
    assert max_kv_bytes(SHAPE, 2, torch.bfloat16.itemsize, **sizes) == pytest.approx(most / 4, rel=0.2)


def resident_bytes(cache: RowCache) -> int:
    """Bytes that the system has provided for the mappings of keys and values."""
    total, is_inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, *values = line.split()
        if not name.endswith(":"):
            first, end = (int(address, 16) for address in name.split("-"))
            is_inside = any(first <= plane.data_ptr() < end for plane in cache.planes[0].owned)
        elif name == "Rss:" and is_inside:
            total += int(values[0]) * 1024
    return total


def test_the_cache_takes_no_more_than_it_is_told() -> None:
    """Each of 8 rows has room for all 24 blocks that there is memory for, and long sequences have run in all rows."""
    engine = make_engine(NUM_BLOCKS * 32)
    cache, found, steps = engine._cache, [], count()
    assert isinstance(cache, RowCache)

    def watch() -> None:
        if next(steps) % 50 == 0:
            found.append(resident_bytes(cache))

    engine.generate(make_requests(), SamplingParams(300, ignore_eos=True), seed=0, step=0, on_step=watch)
    allowed = NUM_BLOCKS * CacheLayout.of(SHAPE, 1, 1 << 20).block_bytes(4)
    assert sum(plane.nbytes for plane in cache.planes[0].owned) == 8 * allowed
    most_edges = 2 * 2 * SHAPE.num_layers * 8 * mmap.PAGESIZE  # pages that belong to two rows
    assert 0.5 * allowed < max(found) < allowed + most_edges
    engine.sleep()
    assert not cache.is_allocated


def test_a_cache_that_cannot_hold_one_sequence_is_refused_at_start() -> None:
    with pytest.raises(InputError, match="one sequence of max_model_len=100"):
        make_engine(100, kv_cache_bytes=3 * CacheLayout.of(SHAPE, 1, 1 << 20).block_bytes(4))
