"""Keys and values of the tokens that running sequences have behind them."""

from __future__ import annotations

import torch
from torch import Tensor


class KVCache:
    """`keys` and `values` are (layers, slots, KV heads of this rank, max_len, head_dim).

    A sequence has one slot. Slots in use are always 0..n-1, so that attention reads a slice and gathers nothing: when a
    sequence ends, a later one moves into its slot.
    """

    def __init__(
        self,
        num_layers: int,
        num_slots: int,
        num_heads: int,
        max_len: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.num_slots = num_slots
        self.max_len = max_len
        self.dtype = dtype
        self.device = device
        self._size = (num_layers, num_slots, num_heads, max_len, head_dim)
        self.allocate()

    @property
    def is_allocated(self) -> bool:
        return self.keys.numel() > 0

    def allocate(self) -> None:
        # Zeros, because a masked position still multiplies its value by 0, and memory as found may hold NaN.
        self.keys = torch.zeros(self._size, dtype=self.dtype, device=self.device)
        self.values = torch.zeros_like(self.keys)

    def release(self) -> None:
        self.keys = self.values = torch.empty(0, dtype=self.dtype, device=self.device)

    def write(self, layer: int, slots: Tensor, positions: Tensor, keys: Tensor, values: Tensor) -> None:
        """Stores `keys` and `values` (n, KV heads, head_dim) of n tokens, each at its slot and position, int64 (n,)."""
        self.keys[layer, slots, :, positions] = keys
        self.values[layer, slots, :, positions] = values

    def read(self, layer: int, slots: slice, length: int) -> tuple[Tensor, Tensor]:
        """Views (slots, KV heads, length, head_dim)."""
        return self.keys[layer, slots, :, :length], self.values[layer, slots, :, :length]

    def move(self, sources: Tensor, targets: Tensor, length: int) -> None:
        """Copies the first `length` positions of slots `sources` to slots `targets`, int64 (n,)."""
        for cache in (self.keys, self.values):
            cache[:, targets, :, :length] = cache[:, sources, :, :length]
