"""The Triton kernel beside attention in plain torch: on a GPU where there is one, else with Triton's interpreter."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hpcrl.rollout.native.attention import DecodeAttention, NewTokens
from hpcrl.rollout.native.kv_cache import KVCache
from hpcrl.rollout.native.paged_attention import PagedAttention

HEADS, PER_HEAD, WIDTH, SIZE = 2, 3, 32, 16


# the interpreter's products of bf16 are wrong
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16 if torch.cuda.is_available() else torch.float16])
def test_the_kernel_computes_what_torch_computes(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu":
        monkeypatch.setenv("TRITON_INTERPRET", "1")
    pytest.importorskip("triton")
    generator = np.random.default_rng(0)
    torch.manual_seed(0)
    cache = KVCache(2, 40, HEADS, PER_HEAD, SIZE, WIDTH, 8, dtype, device)
    cache.keys.normal_()
    cache.values.normal_()
    # Blocks in no order: rows grow in turns, and one goes.
    lengths = generator.integers(1, 70, 8)
    for tokens in range(1, 70):
        rows = np.flatnonzero(lengths >= tokens)
        cache.pool.grow(rows, np.full(len(rows), tokens))
    cache.pool.release(np.array([7]))
    rows = np.arange(7)
    new = NewTokens(cache, rows, lengths[:7] - 1, np.ones_like(rows))
    queries = torch.randn(7, HEADS, PER_HEAD, WIDTH, device=device).to(dtype)
    keys, values = (torch.randn(7, HEADS, WIDTH, device=device).to(dtype) for _ in range(2))
    found = PagedAttention(new)(1, queries, keys, values)
    expected = DecodeAttention(new)(1, queries, keys, values)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(found, expected, rtol=0, atol=tolerance)
