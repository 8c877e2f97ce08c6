"""Attention over the KV cache, for a prefill call and for a decode step.

Both take the flat tokens of a call: queries (n, KV heads, queries per KV head, head_dim), keys and values (n, KV heads,
head_dim), after RoPE, and give outputs shaped like the queries. `positions` int64 (n,) counts from 0 in each sequence.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from hpcrl.rollout.native.kv_cache import KVCache


class Attention(Protocol):
    positions: Tensor

    def __call__(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor: ...


class PrefillAttention:
    """Prompts laid end to end, `lengths` int64 (prompts,), into slots `first_slot`, `first_slot + 1`, ..."""

    def __init__(self, cache: KVCache, first_slot: int, lengths: np.ndarray) -> None:
        self._cache = cache
        self._slots = slice(first_slot, first_slot + len(lengths))
        self._longest = int(lengths.max())
        ends = lengths.cumsum()
        rows = np.arange(len(lengths)).repeat(lengths)
        positions = np.arange(ends[-1]) - (ends - lengths).repeat(lengths)
        self._rows = torch.from_numpy(rows).to(cache.device)
        self.positions = torch.from_numpy(positions).to(cache.device)

    def __call__(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        self._cache.write(layer, self._rows + self._slots.start, self.positions, keys, values)
        cached_keys, cached_values = self._cache.read(layer, self._slots, self._longest)
        padded = queries.new_zeros((len(cached_keys), self._longest, *queries.shape[1:]))
        padded[self._rows, self.positions] = queries
        # Padding is at the end, where the causal mask hides it from every real token.
        outputs = scaled_dot_product_attention(
            padded.flatten(2, 3).transpose(1, 2), cached_keys, cached_values, is_causal=True, enable_gqa=True
        )
        return outputs.transpose(1, 2)[self._rows, self.positions].view_as(queries)


class DecodeAttention:
    """One token of each of slots 0..n-1, behind `cached` int64 (n,) tokens."""

    def __init__(self, cache: KVCache, cached: np.ndarray) -> None:
        self._cache = cache
        self._slots = slice(0, len(cached))
        self._rows = torch.arange(len(cached), device=cache.device)
        self._longest = int(cached.max()) + 1
        self.positions = torch.from_numpy(cached).to(cache.device)
        places = torch.arange(self._longest, device=cache.device)
        self._mask: Tensor | None = None
        if cached.min() != cached.max():
            self._mask = (places <= self.positions[:, None])[:, None, None, :]

    def __call__(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        self._cache.write(layer, self._rows, self.positions, keys, values)
        cached_keys, cached_values = self._cache.read(layer, self._slots, self._longest)
        # The queries of one KV head stand where a prefill has its positions: grouped heads without copies of the keys.
        return scaled_dot_product_attention(queries, cached_keys, cached_values, attn_mask=self._mask)
