"""Attention over the KV cache with the bits of the training model, for prefill and decode alike."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from hpcrl.model.exact import exact_attention
from hpcrl.rollout.native.attention import NewTokens


class ExactAttention:
    """Everything that a row has cached is gathered, and masked behind each query's own token: slow and plain."""

    def __init__(self, new: NewTokens) -> None:
        self.new = new
        device = new.cache.device
        longest = int(new.lengths.max())
        rows = np.arange(len(new.rows)).repeat(new.lengths)
        starts = torch.from_numpy(new.starts).to(device)
        self._rows = torch.from_numpy(rows).to(device)
        self._places = new.positions - starts[self._rows]  # among the row's new tokens
        self._positions = starts[:, None] + torch.arange(longest, device=device)
        self._table = torch.from_numpy(new.cache.pool.table(new.rows)).to(device)

    def __call__(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        self.new.store(layer, keys, values)
        padded = queries.new_zeros((*self._positions.shape, *queries.shape[1:]))
        padded[self._rows, self._places] = queries
        cached_keys, cached_values = self.new.cache.read(layer, self._table)
        outputs = exact_attention(padded.transpose(1, 2), cached_keys, cached_values, self._positions)
        return outputs.transpose(1, 2)[self._rows, self._places]
