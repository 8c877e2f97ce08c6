"""Attention over the KV cache: prefill and decode, exact mode, and paged GPU kernels.

An attention object is made for one call of the decoder and its `NewTokens`. It is called once per layer with their flat
queries (n, KV heads, queries per KV head, key_dim), keys (n, KV heads, key_dim) and values (n, KV heads, value_dim),
all after RoPE. It stores keys and values in the cache and returns outputs (n, KV heads, queries per KV head,
value_dim). Products of queries and keys are divided by sqrt(key_dim). Some models have `sinks` (KV heads, queries per
KV head), see `hpcrl.kernels.packed_attention.causal_attention`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from hpcrl.kernels.decode_attention import Cut, PagedRows, decode_attention, is_fused, softmax_with
from hpcrl.kernels.packed_attention import Sequences, packed_attention
from hpcrl.kernels.store_heads import CacheSlots, HeadWeights, store_heads
from hpcrl.kernels.vocabulary import LOG2_E
from hpcrl.model.blocks.attention_modules import CachedAttention
from hpcrl.model.blocks.block import CachedHeads
from hpcrl.model.exact import PAGE, Tiles, exact_attention, paged_attention, tile_tokens
from hpcrl.rollout.engines.engine import CacheLayout
from hpcrl.rollout.engines.native.kv_cache import KVCache
from hpcrl.rollout.engines.native.row_cache import RowCache


class HostAttention(CachedAttention):
    """Attention of `NewTokens`, whose rows are on the host."""

    new: NewTokens

    def lengths(self) -> list[int]:
        found: list[int] = self.new.lengths.tolist()
        return found

    def states(self, layer: int) -> tuple[Tensor, ...]:
        new = self.new
        rows, has_state = new.state_rows, new.starts > 0
        states = tuple(tensor[rows] for tensor in new.cache.states[layer])
        if has_state.all():
            return states
        return _from_zero(states, torch.from_numpy(has_state).to(new.cache.device))

    def save_states(self, layer: int, states: tuple[Tensor, ...]) -> None:
        for tensor, state in zip(self.new.cache.states[layer], states, strict=True):
            tensor[self.new.state_rows] = state


def _from_zero(states: tuple[Tensor, ...], has_state: Tensor) -> tuple[Tensor, ...]:
    """Return states (n, *size), 0 where a row has none: there the cache has what an earlier row left, maybe NaN."""
    return tuple(state.masked_fill(~has_state.view(-1, *[1] * (state.dim() - 1)), 0.0) for state in states)


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

    def __call__(
        self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, sinks: Tensor | None = None
    ) -> Tensor:
        assert sinks is None  # exact mode does not support them
        self.new.store(layer, keys, values)
        padded = queries.new_zeros((*self._positions.shape, *queries.shape[1:]))
        padded[self._sequences, self._places] = queries
        cached = self._cache[layer]
        cached_keys, cached_values = (part[self._rows, :, : self._most] for part in (cached.keys, cached.values))
        outputs = exact_attention(padded.transpose(1, 2), cached_keys, cached_values, self._positions)
        return outputs.transpose(1, 2)[self._sequences, self._places]


class ExactBlockAttention(HostAttention):
    """Exact attention over a cache in blocks."""

    def __init__(self, new: NewTokens) -> None:
        assert isinstance(new.cache, KVCache) and new.cache.block_size == PAGE
        self.new, self._cache = new, new.cache
        self._table = new.cache.pool.table(new.rows)
        self._tiles: dict[int, Tiles] = {}  # by the queries of a KV head

    def __call__(
        self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, sinks: Tensor | None = None
    ) -> Tensor:
        assert sinks is None  # exact mode does not support them
        self.new.store(layer, keys, values)
        per_head, new = queries.size(2), self.new
        if per_head not in self._tiles:
            tokens = tile_tokens(per_head, queries.dtype)
            self._tiles[per_head] = Tiles.of(new.lengths, new.starts, self._table, tokens, queries.device)
        return paged_attention(queries, *self._cache[layer][1:], self._tiles[per_head])


class PagedAttention(CachedAttention):
    """One token of each of n rows, by the paged kernels, from tensors on the device only.

    All int32: `blocks` holds the rows' blocks, from place `starts` (n,) on, at most `width` each; `cached` (n,) are the
    rows' cached tokens. `rows` (n,) are those of the running batch; from place `num_rows` (1,) on they repeat the first
    one, and compute and store the same numbers. `rope_positions`, those of the rotary embedding, are `cached` unless
    given: (n,), or (3, n) in time, height and width. It also stores the new tokens.
    """

    takes_product = True

    def __init__(
        self,
        cache: KVCache,
        blocks: Tensor,
        starts: Tensor,
        width: int,
        cached: Tensor,
        num_rows: Tensor,
        rows: Tensor | None = None,
        rope_positions: Tensor | None = None,
    ) -> None:
        self._cache, self._rows, self._has_state = cache, rows, cached > 0
        self.rope_positions = cached if rope_positions is None else rope_positions
        self._of_kind: dict[CachedHeads, PagedRows] = {}
        self._places: dict[CachedHeads, tuple[Tensor, Tensor]] = {}
        for heads in cache.layout.heads:
            if heads.window is None:
                block_ids, begins, most, length = blocks, starts, width, cached + 1
                place = cached
            else:
                assert rows is not None
                most = cache.ring_blocks(heads)
                block_ids = torch.arange(cache.num_rows * most, dtype=torch.int32, device=cached.device)
                begins, place = (rows * most).int(), cached % heads.window
                length = (cached + 1).clamp(max=heads.window)
            of_tokens = block_ids.index_select(0, begins + place // cache.block_size)
            # int64, to which every write would convert them
            self._places[heads] = of_tokens.long(), (place % cache.block_size).long()
            cut = Cut.of(heads.groups, heads.queries, heads.value_dim)
            keys = cache[cache.layout.heads[heads][0]].keys
            self._of_kind[heads] = PagedRows.of(keys, block_ids, begins, length, most, cut, num_rows)

    @staticmethod
    def fits(layout: CacheLayout, block_size: int, dtype: torch.dtype, device: torch.device) -> bool:
        """Whether kernels exist for such a cache."""
        one = CacheLayout(tuple(heads._replace(window=None) for heads in layout.heads))
        caches = KVCache(one, 1, block_size, 1, dtype, device)
        return all(is_fused(*caches[layer][1:]) for layer in range(len(one.layers)))

    @property
    def new(self) -> PagedAttention:  # type: ignore[override]
        return self  # not kept, which would be a cycle with tensors of the device

    def store(self, layer: int, keys: Tensor, values: Tensor) -> None:
        self._cache.write(layer, self._places[self._cache[layer].heads], keys, values)

    def __call__(
        self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, sinks: Tensor | None = None
    ) -> Tensor:
        self.store(layer, keys, values)
        return self._attend(layer, queries, sinks)

    def of_product(self, layer: int, mixed: Tensor, weights: HeadWeights, cos: Tensor, sin: Tensor) -> Tensor:
        heads, keys, values = self._cache[layer]
        slots = CacheSlots(keys, values, *self._places[heads])
        return self._attend(layer, store_heads(mixed, weights, cos, sin, slots))

    def states(self, layer: int) -> tuple[Tensor, ...]:
        assert self._rows is not None
        states = tuple(tensor.index_select(0, self._rows) for tensor in self._cache.states[layer])
        return _from_zero(states, self._has_state)

    def save_states(self, layer: int, states: tuple[Tensor, ...]) -> None:
        assert self._rows is not None
        for tensor, state in zip(self._cache.states[layer], states, strict=True):
            tensor.index_copy_(0, self._rows, state)  # rows that repeat the first one have its state

    def _attend(self, layer: int, queries: Tensor, sinks: Tensor | None = None) -> Tensor:
        heads, keys, values = self._cache[layer]
        return decode_attention(queries, keys, values, self._of_kind[heads], queries.size(-1) ** -0.5, sinks)


class ExactPagedAttention(PagedAttention):
    """Exact attention of a decode step: by the arithmetic of training, and the steps before it one by one, as there."""

    takes_product = False

    def __init__(self, cache: KVCache, blocks: Tensor, starts: Tensor, width: int, cached: Tensor, *rest: Any) -> None:
        assert cache.block_size == PAGE
        super().__init__(cache, blocks, starts, width, cached, *rest)
        rows = torch.arange(len(cached), device=cached.device)
        numbers = torch.stack([rows, torch.ones_like(rows), cached, starts], 1).int()
        self._tiles = partial(Tiles, numbers, blocks=blocks, width=width)

    def _attend(self, layer: int, queries: Tensor, sinks: Tensor | None = None) -> Tensor:
        tiles = self._tiles(tokens=tile_tokens(queries.size(2), queries.dtype))
        return paged_attention(queries, *self._cache[layer][1:], tiles)


@dataclass(eq=False)
class NewTokens:
    """The tokens of one call, flat (n,): `lengths` tokens of each of `rows`, after `starts` tokens that are cached.

    All int64 (sequences,), on the host. Rows have their blocks already. `positions` (n,) are on the device.
    """

    cache: KVCache | RowCache
    rows: np.ndarray
    starts: np.ndarray
    lengths: np.ndarray
    own_rope_positions: np.ndarray | None = None  # (n,), or (3, n) in time, height and width

    def __post_init__(self) -> None:
        cache, rows, starts, lengths, own = self.cache, self.rows, self.starts, self.lengths, self.own_rope_positions
        if lengths.max() == 1:
            self._positions, self._row_of = starts, rows
        else:
            ends = lengths.cumsum()
            self._row_of = rows.repeat(lengths)
            self._positions = np.arange(ends[-1]) - (ends - lengths - starts).repeat(lengths)
        self.positions = torch.from_numpy(self._positions).to(cache.device)
        self.rope_positions = self.positions if own is None else torch.from_numpy(own).to(cache.device)
        self._places: dict[CachedHeads, tuple[tuple[Tensor, ...], Tensor | None]] = {}

    @cached_property
    def state_rows(self) -> slice | Tensor:
        """The rows as an index of states; a slice, which copies nothing, if they are the first ones in order."""
        count = len(self.rows)
        if (self.rows == np.arange(count)).all():
            return slice(0, count)
        return torch.from_numpy(self.rows).to(self.cache.device)

    def store(self, layer: int, keys: Tensor, values: Tensor) -> None:
        heads = self.cache[layer].heads
        if heads not in self._places:
            self._places[heads] = self._places_of(heads)
        places, stored = self._places[heads]
        if stored is not None:
            keys, values = keys[stored], values[stored]
        self.cache.write(layer, places, keys, values)

    def _places_of(self, heads: CachedHeads) -> tuple[tuple[Tensor, ...], Tensor | None]:
        """Return the places, and which tokens are stored there, int64; None: all. A ring has a row's last tokens."""
        rows, positions, stored = self._row_of, self._positions, None
        if heads.window is not None and self.lengths.max() > heads.window:
            last = (self.starts + self.lengths).repeat(self.lengths) - heads.window
            stored = np.flatnonzero(positions >= last)
            rows, positions = rows[stored], positions[stored]
        places = (torch.from_numpy(array).to(self.cache.device) for array in self.cache.places(heads, rows, positions))
        return tuple(places), None if stored is None else torch.from_numpy(stored).to(self.cache.device)


class PrefillAttention(HostAttention):
    """Packed sequences without cached tokens: they attend to the tokens of this call only."""

    def __init__(self, new: NewTokens) -> None:
        self.new = new
        self._sequences = Sequences.of(new.lengths, new.cache.device)

    def __call__(
        self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, sinks: Tensor | None = None
    ) -> Tensor:
        self.new.store(layer, keys, values)
        window = self.new.cache[layer].heads.window
        of_heads = None if sinks is None else sinks.flatten()
        attended = packed_attention(queries.flatten(1, 2), keys, values, self._sequences, window=window, sinks=of_heads)
        return attended.unflatten(1, queries.shape[1:3])


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


def _run(rows: slice, lengths: np.ndarray, groups: int) -> _Run:
    width = int(lengths.max())
    if (lengths == width).all():
        return _Run(rows, width, None)
    is_padding = torch.arange(width) >= torch.from_numpy(lengths)[:, None]
    bias = torch.zeros(is_padding.shape).masked_fill_(is_padding, -torch.inf)
    return _Run(rows, width, bias.repeat_interleave(groups, 0).unsqueeze(1))


class DecodeAttention(HostAttention):
    """One token of each of rows 0..n-1: two batched products over the keys and values of a run of rows."""

    def __init__(self, new: NewTokens) -> None:
        assert isinstance(new.cache, RowCache)
        self.new, self._cache = new, new.cache
        self._runs_of: dict[CachedHeads, list[_Run]] = {}

    def _runs(self, heads: CachedHeads) -> list[_Run]:
        if heads not in self._runs_of:
            lengths = np.minimum(self.new.starts + 1, heads.window or self._cache.row_tokens)
            self._runs_of[heads] = [_run(rows, lengths[rows], heads.groups) for rows in cut_by_length(lengths)]
        return self._runs_of[heads]

    def __call__(
        self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, sinks: Tensor | None = None
    ) -> Tensor:
        self.new.store(layer, keys, values)
        heads, cached_keys, cached_values = self._cache[layer]
        scale = queries.size(-1) ** -0.5
        parts = []
        for rows, width, bias in self._runs(heads):
            of_run = queries[rows].flatten(0, 1)
            run_keys, run_values = (
                plane[rows, :, :width].flatten(0, 1).to(queries.dtype) for plane in (cached_keys, cached_values)
            )
            scores = self._scores(of_run, run_keys.transpose(1, 2), bias, scale)
            of_items = None if sinks is None else sinks.repeat(len(queries[rows]), 1)
            parts.append(torch.bmm(softmax_with(scores, of_items).to(values.dtype), run_values))
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


PART_TOKENS = 64  # cached tokens, at least, that new tokens attend to at a time
PART_PAIRS = 2**16  # pairs of a new and a cached token at a time: few new tokens attend to many cached ones
MASKED = -1e30  # finite, so that the maximum of a fully masked part is finite


class _Continued(NamedTuple):
    """A sequence with `start` cached tokens, in `row`. Its new ones, `tokens` of the call, attend to about `at_once` at
    a time, in `spans` of the cache."""

    row: int
    start: int
    tokens: slice
    at_once: int
    spans: list[Any]

    @classmethod
    def all_of(cls, new: NewTokens) -> Iterator[_Continued]:
        for row, start, length, end in np.stack([new.rows, new.starts, new.lengths, new.lengths.cumsum()], 1).tolist():
            at_once = max(PART_TOKENS, PART_PAIRS // length)
            spans = new.cache.spans(row, start + length, at_once)
            yield cls(row, start, slice(end - length, end), at_once, spans)


class ContinuedAttention(HostAttention):
    """New tokens of sequences that have cached tokens, one sequence after the other.

    Processes a few of a sequence's cached tokens at a time, so that its memory depends on the new tokens and not on the
    sequence.
    """

    def __init__(self, new: NewTokens) -> None:
        self.new, self._sequences = new, list(_Continued.all_of(new))

    def __call__(
        self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, sinks: Tensor | None = None
    ) -> Tensor:
        is_ring = self.new.cache[layer].heads.window is not None
        if not is_ring:
            self.new.store(layer, keys, values)
        parts = [
            self._attend(layer, one, queries[one.tokens], keys[one.tokens], values[one.tokens], sinks)
            for one in self._sequences
        ]
        if is_ring:  # whose places new tokens take
            self.new.store(layer, keys, values)
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _attend(
        self, layer: int, one: _Continued, queries: Tensor, keys: Tensor, values: Tensor, sinks: Tensor | None
    ) -> Tensor:
        """Online softmax (Milakov and Gimelshein 2018, arXiv:1805.02867) over the parts of the cache, in powers of 2,
        because torch's exp is slow on the CPU where it underflows."""
        cache = self.new.cache
        window = cache[layer].heads.window
        if window is None:
            place, parts = 0, (cache.read(layer, span) for span in one.spans)
        else:
            place = max(0, one.start - window + 1)
            parts = (part for part in self._within(layer, one, place, keys, values))
        tokens, heads, per_head, key_dim = queries.shape
        rows = (queries * (LOG2_E * key_dim**-0.5)).transpose(0, 1).reshape(heads, -1, key_dim)
        last = self.new.positions[one.tokens].repeat_interleave(per_head)[:, None]
        outputs = rows.new_zeros((*rows.shape[:2], values.size(-1)), dtype=torch.float32)
        if sinks is None:
            maxima = outputs.new_full((*rows.shape[:2], 1), MASKED)
            sums = torch.zeros_like(maxima)
        else:
            maxima = (sinks.float() * LOG2_E).repeat(1, tokens).unsqueeze(-1)
            sums = torch.ones_like(maxima)
        for part_keys, part_values in parts:
            scores = torch.bmm(rows, part_keys.to(rows.dtype).transpose(1, 2)).float()
            places = torch.arange(place, place + scores.size(-1), device=scores.device)
            place += scores.size(-1)
            hidden = places > last if window is None else (places > last) | (places <= last - window)
            scores.masked_fill_(hidden, MASKED)
            new_maxima = torch.maximum(maxima, scores.amax(-1, keepdim=True))
            weights = scores.sub_(new_maxima).exp2_()
            if window is not None:
                weights.masked_fill_(hidden, 0.0)  # a part may have no visible key
            decay = (maxima - new_maxima).exp2_()
            sums = sums * decay + weights.sum(-1, keepdim=True)
            outputs = outputs * decay + torch.bmm(weights.to(values.dtype), part_values.to(values.dtype))
            maxima = new_maxima
        outputs = outputs.div_(sums).to(queries.dtype).view(heads, tokens, per_head, -1)
        return outputs.transpose(0, 1)

    def _within(
        self, layer: int, one: _Continued, first: int, keys: Tensor, values: Tensor
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield keys and values of the positions from `first` on: those in the ring, then the new ones."""
        cache = self.new.cache
        old = torch.arange(first, one.start, device=keys.device)
        old_keys, old_values = (part.to(keys.dtype) for part in cache.read_ring(layer, one.row, old))
        both = torch.cat([old_keys, keys.transpose(0, 1)], 1), torch.cat([old_values, values.transpose(0, 1)], 1)
        yield from zip(*(part.split(one.at_once, 1) for part in both), strict=True)
