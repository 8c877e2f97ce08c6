"""Attention over the KV cache: prefill and decode, exact mode, paged GPU kernels, and latent attention.

An attention object is made for one call of the decoder and its `NewTokens`. It is called once per layer with their flat
queries (n, KV heads, queries per KV head, key_dim), keys (n, KV heads, key_dim) and values (n, KV heads, value_dim),
all after RoPE. It stores keys and values in the cache and returns outputs (n, KV heads, queries per KV head,
value_dim). Products of queries and keys are divided by sqrt(key_dim).

Latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1.2) caches latents. A head's key is a linear map of the
token's latent; the map is applied to the query instead, so that all heads attend to the latents themselves, and the
attended latents are mapped to the heads' values afterwards.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import embedding_bag

from hpcrl.kernels.decode_attention import Cut, PagedRows, decode_attention, is_fused
from hpcrl.kernels.layers import rms_norm
from hpcrl.kernels.packed_attention import Sequences, packed_attention
from hpcrl.model.exact import exact_attention
from hpcrl.model.layers import LATENT_NORM_EPS
from hpcrl.model.rope import deinterleave
from hpcrl.model.shape import LatentAttention, ModelShape
from hpcrl.rollout.native.kv_cache import FREE, KVCache, Scratch


class ExactAttention:
    """Gathers everything that a row has cached and masks it after each query's own token. Slow; used in exact mode."""

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


class PagedAttention:
    """One token of each of n rows, by the paged kernels, from tensors on the device only.

    All int32: `blocks` holds the rows' blocks, from place `starts` (n,) on, at most `width` each; `cached` (n,) are the
    rows' cached tokens. Rows from `num_rows` (1,) on repeat the first one, and compute and store the same numbers.
    """

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
        self.new = StoredTokens(cache, cached, of_tokens.long(), (cached % size).long(), rope_positions)
        cut = Cut.of(heads.groups, heads.queries, heads.value_dim)
        self._rows = PagedRows.of(cache.keys[0], blocks, starts, cached + 1, width, cut, num_rows)

    @staticmethod
    def fits(cache: KVCache) -> bool:
        """Whether kernels exist for this cache."""
        return is_fused(cache.keys[0], cache.values[0])

    def __call__(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        self.new.store(layer, keys, values)
        cache = self.new.cache
        return decode_attention(
            queries, cache.keys[layer], cache.values[layer], self._rows, scale=queries.size(-1) ** -0.5
        )


MASKED = -1e30  # finite, so that the maximum of a fully masked block is finite
# Softmax uses powers of 2 because torch's exp is slow on the CPU where it underflows.
LOG2_E = math.log2(math.e)


class StoredTokens:
    """The tokens of one call, flat (n,): their places `positions` in their sequences, and where the cache stores them,
    `offsets` in `blocks`, all integers.

    `rope_positions`, those of the rotary embedding, are the same as `positions` unless given: (n,), or (3, n) in time,
    height and width.
    """

    def __init__(
        self, cache: KVCache, positions: Tensor, blocks: Tensor, offsets: Tensor, rope_positions: Tensor | None = None
    ) -> None:
        self.cache = cache
        self.positions, self._blocks, self._offsets = positions, blocks, offsets
        self.rope_positions = positions if rope_positions is None else rope_positions

    def store(self, layer: int, keys: Tensor, values: Tensor) -> None:
        self.cache.write(layer, self._blocks, self._offsets, keys, values)


class NewTokens(StoredTokens):
    """The tokens of one call, flat: `lengths` tokens of each of `rows`, after `starts` tokens that are cached.

    All int64 (sequences,), on the host. Rows have their blocks already.
    """

    def __init__(
        self,
        cache: KVCache,
        rows: np.ndarray,
        starts: np.ndarray,
        lengths: np.ndarray,
        rope_positions: np.ndarray | None = None,
    ) -> None:
        self.rows, self.starts, self.lengths = rows, starts, lengths
        pool, size = cache.pool, cache.block_size
        if lengths.max() == 1 and (starts // size == pool.count_of[rows] - 1).all():
            positions, blocks = starts, pool.tail_of[rows]
        else:
            ends = lengths.cumsum()
            sequences = np.arange(len(rows)).repeat(lengths)
            positions = np.arange(ends[-1]) - (ends - lengths - starts).repeat(lengths)
            blocks = pool.table(rows)[sequences, positions // size]
        own = () if rope_positions is None else (rope_positions,)
        arrays = positions, blocks, positions % size, *own
        super().__init__(cache, *(torch.from_numpy(array).to(cache.device) for array in arrays))


class Attention(Protocol):
    @property
    def new(self) -> StoredTokens: ...

    def __call__(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor: ...


class PrefillAttention:
    """Packed sequences without cached tokens: they attend to the tokens of this call only."""

    def __init__(self, new: NewTokens) -> None:
        self.new = new
        self._sequences = Sequences.of(new.lengths, new.cache.device)

    def __call__(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        self.new.store(layer, keys, values)
        return packed_attention(queries.flatten(1, 2), keys, values, self._sequences).unflatten(1, queries.shape[1:3])


class DecodeAttention:
    """One token of each of rows 0..n-1.

    Every block in use is one item of a batched product with the queries of its row, so nothing is padded to the longest
    sequence; the softmax of a row combines the maxima and sums of its blocks.
    """

    def __init__(self, new: NewTokens) -> None:
        self.new = new
        cache, pool = new.cache, new.cache.pool
        self._num_rows = len(new.rows)
        owners = pool.row_of[: pool.extent]
        filled = np.where(owners == FREE, 0, cache.block_size)
        filled[pool.tail_of[new.rows]] = new.starts % cache.block_size + 1
        # Blocks ordered by row, for sums by row.
        by_row = owners.argsort(kind="stable")[pool.num_holes :]
        starts = np.searchsorted(owners[by_row], new.rows)
        self._owners, self._blocks, self._starts, counts = (
            torch.from_numpy(array).to(cache.device) for array in (np.maximum(owners, 0), by_row, starts, filled)
        )
        self._scratch = Scratch(*(part[: pool.extent] for part in cache.scratch))
        places = torch.arange(cache.block_size, device=cache.device)
        of_count = torch.where(places < torch.arange(cache.block_size + 1, device=cache.device)[:, None], 0.0, MASKED)
        torch.index_select(of_count, 0, counts, out=self._scratch.bias.squeeze(1))

    def __call__(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        self.new.store(layer, keys, values)
        heads, per_head, key_dim = queries.shape[1:]
        cached_keys, cached_values = self.new.cache.used(layer)
        at = self._scratch
        torch.index_select(queries.reshape(self._num_rows, -1, key_dim), 0, self._owners, out=at.queries)
        scores = at.scores.view(len(cached_keys), per_head, -1)
        torch.bmm(at.queries.view(-1, per_head, key_dim), cached_keys, out=scores)
        weights = torch.add(at.bias, at.scores, alpha=LOG2_E * key_dim**-0.5, out=at.weights)
        maxima = self._by_row(weights.amax(-1), "max")
        weights.sub_(maxima.index_select(0, self._owners).unsqueeze(-1)).exp2_()
        sums = self._by_row(weights.sum(-1), "sum")
        if at.scores.dtype != weights.dtype:
            weights = at.scores.copy_(weights)
        torch.bmm(weights.view(scores.shape), cached_values, out=at.products.view(-1, per_head, values.size(-1)))
        outputs = self._by_row(at.products.flatten(1), "sum").view(-1, heads, per_head, values.size(-1))
        return (outputs / sums.view(*queries.shape[:-1], 1)).to(queries.dtype)

    def _by_row(self, of_block: Tensor, mode: str) -> Tensor:
        """(blocks, m) -> (rows, m) by embedding_bag, torch's fastest segment reduction on the CPU."""
        return embedding_bag(self._blocks, of_block, self._starts, mode=mode)


class ContinuedAttention:
    """The next part of one sequence that is too long for one prefill call.

    Processes a few of the sequence's blocks at a time, so that its memory depends on the part and not on the sequence.
    """

    def __init__(self, new: NewTokens, blocks_at_once: int = 2) -> None:
        self.new = new
        blocks = new.cache.pool.table(new.rows)[0]
        self._blocks = torch.from_numpy(blocks).to(new.cache.device).split(blocks_at_once)

    def __call__(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Online softmax (Milakov and Gimelshein 2018, arXiv:1805.02867) over the parts of the cache."""
        self.new.store(layer, keys, values)
        tokens, heads, per_head, key_dim = queries.shape
        rows = (queries * (LOG2_E * key_dim**-0.5)).transpose(0, 1).reshape(heads, -1, key_dim)
        last = self.new.positions.repeat_interleave(per_head)[:, None]
        outputs = rows.new_zeros((*rows.shape[:2], values.size(-1)), dtype=torch.float32)
        maxima = outputs.new_full((*rows.shape[:2], 1), MASKED)
        sums = torch.zeros_like(maxima)
        place = 0
        for blocks in self._blocks:
            part_keys, part_values = (part[0] for part in self.new.cache.read(layer, blocks[None]))
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


Linear = Callable[[Tensor, Tensor], Tensor]


class LatentWeights(NamedTuple):
    """Weights of one layer; the first two are None in a model whose queries come from the hidden state itself."""

    q_down: Tensor | None
    q_norm: Tensor | None
    q_up: Tensor
    kv_down: Tensor
    kv_norm: Tensor
    kv_up: Tensor

    @classmethod
    def of_layer(cls, mla: LatentAttention, weight: Callable[[str], Tensor]) -> LatentWeights:
        def of(name: str) -> Tensor:
            return weight(f"self_attention.{name}.weight")

        latents = of("linear_kv_down_proj"), of("kv_layernorm"), of("linear_kv_up_proj")
        if mla.q_lora_rank is None:
            return cls(None, None, of("linear_q_proj"), *latents)
        return cls(of("linear_q_down_proj"), of("q_layernorm"), of("linear_q_up_proj"), *latents)


def queries_and_keys(
    x: Tensor, weights: LatentWeights, shape: ModelShape, linear: Linear, rotate: Callable[[Tensor], Tensor]
) -> tuple[Tensor, Tensor]:
    """Map `x` (n, hidden) to queries (n, 1, heads, kv_lora_rank + rope_dim) of this rank's heads and keys (n, 1,
    kv_lora_rank + rope_dim), for an attention that divides by the square root of this width."""
    mla = shape.mla
    assert mla is not None
    if weights.q_down is None or weights.q_norm is None:
        queries = linear(x, weights.q_up)
    else:
        queries = linear(rms_norm(linear(x, weights.q_down), weights.q_norm, LATENT_NORM_EPS), weights.q_up)
    queries, rotary_queries = queries.unflatten(-1, (1, -1, shape.head_dim)).split(
        [mla.qk_nope_head_dim, mla.qk_rope_head_dim], -1
    )
    latent, rotary_key = linear(x, weights.kv_down).split([mla.kv_lora_rank, mla.qk_rope_head_dim], -1)
    latent = rms_norm(latent, weights.kv_norm, LATENT_NORM_EPS)
    rotated = rotate(deinterleave(torch.cat((rotary_queries, rotary_key[:, None, None]), dim=2)))
    to_key = _by_head(weights.kv_up, mla)[:, : mla.qk_nope_head_dim]
    queries = torch.cat((torch.einsum("nghd,hdl->nghl", queries, to_key), rotated[:, :, :-1]), -1)
    keys = torch.cat((latent[:, None], rotated[:, :, -1]), -1)
    return queries * (shape.softmax_scale * math.sqrt(keys.size(-1))), keys


def values_of(attended: Tensor, weights: LatentWeights, mla: LatentAttention) -> Tensor:
    """Map attended latents (n, 1, heads, kv_lora_rank) to the heads' values (n, heads * v_head_dim)."""
    to_value = _by_head(weights.kv_up, mla)[:, mla.qk_nope_head_dim :]
    return torch.einsum("nghl,hvl->nhv", attended, to_value).flatten(1)


def _by_head(kv_up: Tensor, mla: LatentAttention) -> Tensor:
    """(heads, qk_nope_head_dim + v_head_dim, kv_lora_rank)."""
    return kv_up.unflatten(0, (-1, mla.qk_nope_head_dim + mla.v_head_dim))
