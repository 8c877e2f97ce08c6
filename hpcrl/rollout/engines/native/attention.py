"""Attention over the KV cache: prefill and decode, exact mode, and paged GPU kernels.

An attention object is made for one call of the decoder and its `NewTokens`. It is called once per layer with their flat
queries (n, KV heads, queries per KV head, key_dim), keys (n, KV heads, key_dim) and values (n, KV heads, value_dim),
all after RoPE. It stores keys and values in the cache and returns outputs (n, KV heads, queries per KV head,
value_dim). Products of queries and keys are divided by sqrt(key_dim).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from hpcrl.kernels.decode_attention import Cut, PagedRows, decode_attention, is_fused
from hpcrl.kernels.packed_attention import Sequences, packed_attention
from hpcrl.kernels.store_heads import CacheSlots, HeadWeights, store_heads
from hpcrl.kernels.vocabulary import LOG2_E
from hpcrl.model.blocks.attention_modules import CachedAttention
from hpcrl.model.exact import exact_attention
from hpcrl.rollout.engines.native.cache_layout import CachedHeads
from hpcrl.rollout.engines.native.kv_cache import KVCache
from hpcrl.rollout.engines.native.row_cache import RowCache


class HostAttention(CachedAttention):
    """Attention of `NewTokens`, whose rows the host knows."""

    new: NewTokens


class ExactAttention(HostAttention):
    """Gathers everything that a row has cached and masks it after each query's own token. Slow; used in exact mode."""

    def __init__(self, new: NewTokens) -> None:
        assert isinstance(new.cache, RowCache)
        self.new, self._cache = new, new.cache
        longest = int(new.lengths.max())
        starts = torch.from_numpy(new.starts)
        self._sequences = torch.from_numpy(np.arange(len(new.rows)).repeat(new.lengths))
        self._places = new.positions - starts[self._sequences]  # among the row's new tokens
        self._positions = starts[:, None] + torch.arange(longest)
        self._rows, self._most = torch.from_numpy(new.rows), int((new.starts + new.lengths).max())

    def __call__(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        self.new.store(layer, keys, values)
        padded = queries.new_zeros((*self._positions.shape, *queries.shape[1:]))
        padded[self._sequences, self._places] = queries
        cached_keys = self._cache.keys[layer, self._rows, :, : self._most]
        cached_values = self._cache.values[layer, self._rows, :, : self._most]
        outputs = exact_attention(padded.transpose(1, 2), cached_keys, cached_values, self._positions)
        return outputs.transpose(1, 2)[self._sequences, self._places]


class PagedAttention(CachedAttention):
    """One token of each of n rows, by the paged kernels, from tensors on the device only.

    All int32: `blocks` holds the rows' blocks, from place `starts` (n,) on, at most `width` each; `cached` (n,) are the
    rows' cached tokens. Rows from `num_rows` (1,) on repeat the first one, and compute and store the same numbers.
    """

    new: StoredTokens
    takes_product = True

    def __init__(
        self,
        cache: KVCache,
        blocks: Tensor,
        starts: Tensor,
        width: int,
        cached: Tensor,
        num_rows: Tensor,
        rope_positions: Tensor | None = None,
    ) -> None:
        heads, size = cache.heads, cache.block_size
        of_tokens = blocks.index_select(0, starts + cached // size)
        # int64, to which every write would convert them
        self.new = StoredTokens(cache, cached, (of_tokens.long(), (cached % size).long()), rope_positions)
        self._cache = cache
        cut = Cut.of(heads.groups, heads.queries, heads.value_dim)
        self._rows = PagedRows.of(cache.keys[0], blocks, starts, cached + 1, width, cut, num_rows)

    @staticmethod
    def fits(heads: CachedHeads, block_size: int, dtype: torch.dtype, device: torch.device) -> bool:
        """Whether kernels exist for such a cache."""
        block = KVCache(1, 1, heads, block_size, 1, dtype, device)
        return is_fused(block.keys[0], block.values[0])

    def __call__(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        self.new.store(layer, keys, values)
        return self._attend(layer, queries)

    def of_product(self, layer: int, mixed: Tensor, weights: HeadWeights, cos: Tensor, sin: Tensor) -> Tensor:
        cache, new = self._cache, self.new
        slots = CacheSlots(cache.keys[layer], cache.values[layer], *new.places)
        return self._attend(layer, store_heads(mixed, weights, cos, sin, slots))

    def _attend(self, layer: int, queries: Tensor) -> Tensor:
        keys, values = self._cache.keys[layer], self._cache.values[layer]
        return decode_attention(queries, keys, values, self._rows, scale=queries.size(-1) ** -0.5)


class StoredTokens:
    """The tokens of one call, flat (n,): `positions` in their sequences, integers, and `places` in the cache, as its
    `places` returns them.

    `rope_positions`, those of the rotary embedding, are the same as `positions` unless given: (n,), or (3, n) in time,
    height and width.
    """

    def __init__(
        self,
        cache: KVCache | RowCache,
        positions: Tensor,
        places: tuple[Tensor, ...],
        rope_positions: Tensor | None = None,
    ) -> None:
        self.cache, self.positions, self.places = cache, positions, places
        self.rope_positions = positions if rope_positions is None else rope_positions

    def store(self, layer: int, keys: Tensor, values: Tensor) -> None:
        self.cache.write(layer, self.places, keys, values)


class NewTokens(StoredTokens):
    """The tokens of one call, flat: `lengths` tokens of each of `rows`, after `starts` tokens that are cached.

    All int64 (sequences,), on the host. Rows have their blocks already.
    """

    def __init__(
        self,
        cache: KVCache | RowCache,
        rows: np.ndarray,
        starts: np.ndarray,
        lengths: np.ndarray,
        rope_positions: np.ndarray | None = None,
    ) -> None:
        self.rows, self.starts, self.lengths = rows, starts, lengths
        if lengths.max() == 1:
            positions, row_of = starts, rows
        else:
            ends = lengths.cumsum()
            row_of = rows.repeat(lengths)
            positions = np.arange(ends[-1]) - (ends - lengths - starts).repeat(lengths)
        places = tuple(torch.from_numpy(array).to(cache.device) for array in cache.places(row_of, positions))
        own = None if rope_positions is None else torch.from_numpy(rope_positions).to(cache.device)
        super().__init__(cache, torch.from_numpy(positions).to(cache.device), places, own)


class PrefillAttention(HostAttention):
    """Packed sequences without cached tokens: they attend to the tokens of this call only."""

    def __init__(self, new: NewTokens) -> None:
        self.new = new
        self._sequences = Sequences.of(new.lengths, new.cache.device)

    def __call__(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        self.new.store(layer, keys, values)
        return packed_attention(queries.flatten(1, 2), keys, values, self._sequences).unflatten(1, queries.shape[1:3])


MIN_SAVED = 512  # tokens of a row that a cut must save, about the time of one cut's operations


def cut_by_length(lengths: np.ndarray) -> list[slice]:
    """Cut rows of `lengths` int64 (n,) into runs that are each padded to their longest row, so that padding and cuts
    together cost little."""
    longest = int(lengths.max())
    if (len(lengths) - 1) * (longest - int(lengths.min())) < MIN_SAVED:
        return [slice(0, len(lengths))]
    counts = np.arange(1, len(lengths))
    before = counts * np.maximum.accumulate(lengths)[:-1]
    after = counts[::-1] * np.maximum.accumulate(lengths[::-1])[-2::-1]
    place = int((before + after).argmin())
    if len(lengths) * longest - int(before[place] + after[place]) < MIN_SAVED:
        return [slice(0, len(lengths))]
    first = place + 1
    later = cut_by_length(lengths[first:])
    return cut_by_length(lengths[:first]) + [slice(part.start + first, part.stop + first) for part in later]


def padded_tokens(lengths: np.ndarray) -> int:
    """Return the tokens that decoding computes for rows of `lengths`, with padding."""
    return sum((part.stop - part.start) * int(lengths[part].max()) for part in cut_by_length(lengths))


class _Run(NamedTuple):
    """Rows that are padded to `width` tokens; `bias` (rows x KV heads, 1, width) is -inf on padding, None without."""

    rows: slice
    width: int
    bias: Tensor | None


class DecodeAttention(HostAttention):
    """One token of each of rows 0..n-1: two batched products over the keys and values of a run of rows."""

    def __init__(self, new: NewTokens) -> None:
        assert isinstance(new.cache, RowCache)
        self.new, self._cache = new, new.cache
        lengths = new.starts + 1
        self._runs = [self._run(rows, lengths[rows]) for rows in cut_by_length(lengths)]

    def _run(self, rows: slice, lengths: np.ndarray) -> _Run:
        width = int(lengths.max())
        if (lengths == width).all():
            return _Run(rows, width, None)
        is_padding = torch.arange(width) >= torch.from_numpy(lengths)[:, None]
        bias = torch.zeros(is_padding.shape).masked_fill_(is_padding, -torch.inf)
        return _Run(rows, width, bias.repeat_interleave(self._cache.heads.groups, 0).unsqueeze(1))

    def __call__(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        self.new.store(layer, keys, values)
        cached_keys, cached_values = self._cache.keys[layer], self._cache.values[layer]
        scale = queries.size(-1) ** -0.5
        parts = []
        for rows, width, bias in self._runs:
            of_run = queries[rows].flatten(0, 1)
            run_keys, run_values = (plane[rows, :, :width].flatten(0, 1) for plane in (cached_keys, cached_values))
            weights = self._scores(of_run, run_keys.transpose(1, 2), bias, scale).softmax(-1)
            parts.append(torch.bmm(weights.to(values.dtype), run_values))
        output = parts[0] if len(parts) == 1 else torch.cat(parts)
        return output.view(*queries.shape[:-1], -1)

    @staticmethod
    def _scores(queries: Tensor, keys: Tensor, bias: Tensor | None, scale: float) -> Tensor:
        """fp32 (items, queries of a head, width)."""
        if queries.dtype != torch.float32:
            scores = torch.bmm(queries, keys).float().mul_(scale)
            return scores if bias is None else scores.add_(bias)
        if bias is None:
            return torch.bmm(queries * scale, keys)
        return torch.baddbmm(bias, queries, keys, alpha=scale)


PART_TOKENS = 64  # cached tokens that a part of a long prompt attends to at a time
MASKED = -1e30  # finite, so that the maximum of a fully masked part is finite


class ContinuedAttention(HostAttention):
    """The next part of one sequence that is too long for one prefill call.

    Processes a few of the sequence's cached tokens at a time, so that its memory depends on the part and not on the
    sequence.
    """

    def __init__(self, new: NewTokens) -> None:
        self.new = new
        self._spans = new.cache.spans(int(new.rows[0]), int(new.starts[0] + new.lengths[0]), PART_TOKENS)

    def __call__(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Online softmax (Milakov and Gimelshein 2018, arXiv:1805.02867) over the parts of the cache, in powers of 2,
        because torch's exp is slow on the CPU where it underflows."""
        self.new.store(layer, keys, values)
        tokens, heads, per_head, key_dim = queries.shape
        rows = (queries * (LOG2_E * key_dim**-0.5)).transpose(0, 1).reshape(heads, -1, key_dim)
        last = self.new.positions.repeat_interleave(per_head)[:, None]
        outputs = rows.new_zeros((*rows.shape[:2], values.size(-1)), dtype=torch.float32)
        maxima = outputs.new_full((*rows.shape[:2], 1), MASKED)
        sums = torch.zeros_like(maxima)
        place = 0
        for span in self._spans:
            part_keys, part_values = self.new.cache.read(layer, span)
            scores = torch.bmm(rows, part_keys.transpose(1, 2)).float()
            places = torch.arange(place, place + scores.size(-1), device=scores.device)
            place += scores.size(-1)
            scores.masked_fill_(places > last, MASKED)
            new_maxima = torch.maximum(maxima, scores.amax(-1, keepdim=True))
            weights = scores.sub_(new_maxima).exp2_()
            kept = (maxima - new_maxima).exp2_()
            sums = sums * kept + weights.sum(-1, keepdim=True)
            outputs = outputs * kept + torch.bmm(weights.to(values.dtype), part_values)
            maxima = new_maxima
        outputs = outputs.div_(sums).to(queries.dtype).view(heads, tokens, per_head, -1)
        return outputs.transpose(0, 1)
