"""Causal attention: over packed sequences of different lengths in training, over a cache in rollout."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Protocol

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.attention import SelfAttention
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from hpcrl.kernels.chips import chip_of
from hpcrl.kernels.layers import apply_rope, rms_norm
from hpcrl.kernels.packed_attention import add_sinks, by_library, causal_attention, is_fused, window_mask
from hpcrl.kernels.store_heads import HeadWeights
from hpcrl.model.blocks.attention import Rope
from hpcrl.model.blocks.layers import SplitModule, norm_factor, plus, split_rms_norm
from hpcrl.model.exact import exact_attention, has_attention_kernel, packed_attention, with_gradient_of
from hpcrl.model.gpt import PackedTokens, Tail

if TYPE_CHECKING:
    from megatron.core.transformer import TransformerConfig

    from hpcrl.model.blocks.attention import Attention
    from hpcrl.model.exact import TensorParallel

Linear = Callable[[Tensor, Tensor], Tensor]


class PackedAttention(SplitModule):
    """Megatron's core attention: rotary embedding, then attention inside each packed sequence.

    On a GPU a library processes the packed tokens directly if it supports them. Else they are gathered into (N, heads,
    L, head_dim) arrays, padded at the end; no mask is needed, because no token attends to later tokens. With context
    parallelism keys and values are gathered from the ranks of the group, and their gradients are sent back.
    """

    split_axes = {"softmax_offset": 0}

    def __init__(
        self,
        config: TransformerConfig | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        softmax_scale: float | None = None,
        rope: Rope | None = None,
        window: int | None = None,
        num_sinks: int = 0,
        **_: object,
    ) -> None:
        """The context-parallel group of `pg_collection` is used with context parallelism, its tensor-parallel group in
        checkpoints.

        Args:
            softmax_scale: None is 1 / sqrt(d).
            window: tokens that a token attends to, its own the last.
            num_sinks: this rank's query heads if these have sinks (see `causal_attention`), else 0.
        """
        super().__init__()
        self.cp_group = pg_collection.cp if pg_collection is not None else None
        self.tp_group = pg_collection.tp if pg_collection is not None else None
        self.softmax_scale, self.rope, self.window = softmax_scale, rope, window
        dtype = torch.float32 if config is None else config.params_dtype
        self.softmax_offset: torch.nn.Parameter | None = None  # megatron's name
        if num_sinks:
            self.softmax_offset = torch.nn.Parameter(torch.empty(num_sinks, dtype=dtype))

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *,
        packed_seq_params: PackedTokens,
        **_: object,
    ) -> Tensor:
        """Map this rank's `query` (S, heads, d), `key` (S, groups, d) and `value` (S, groups, v) to (S, heads * v).

        Narrower values are padded, because fused attention has one width; other kernels would hold the weights of all
        pairs of tokens.
        """
        packed = packed_seq_params
        return self.attend_rotated(self.rotate(query, packed), self.rotate(key, packed), value, packed)

    def attend_rotated(self, query: Tensor, key: Tensor, value: Tensor, packed: PackedTokens) -> Tensor:
        """`forward` after the rotary embedding."""
        width = value.size(-1)
        if packed.cu_seqlens_q is not None and self.softmax_offset is None and is_fused(query):
            return self._attend_packed(query, key, value, packed)
        if width < key.size(-1):
            value = pad(value, (0, key.size(-1) - width))
        in_buckets, tail_queries = zip(*(_unpack(x, packed) for x in (query, key, value)), strict=True)
        parts = [self.attend(*each).transpose(1, 2).flatten(0, 1) for each in zip(*in_buckets, strict=True)]
        if packed.tails is not None:
            gathered = gather_from_sequence_parallel_region(torch.cat([key, value], -1), group=self.cp_group)
            parts += self._attend_from_tails(tail_queries[0], gathered, packed.tails)
        output = parts[0] if len(parts) == 1 else torch.cat(parts)
        return _Repack.apply(output[..., :width], packed.slots, query.size(0)).flatten(1)

    def _attend_packed(self, query: Tensor, key: Tensor, value: Tensor, packed: PackedTokens) -> Tensor:
        tokens = packed.num_tokens
        parts = query[:tokens], key[:tokens], value[:tokens]
        output = by_library(*parts, packed.cu_seqlens_q, packed.max_seqlen_q, self.softmax_scale, self.window)
        return pad(output.flatten(1), (0, 0, 0, query.size(0) - tokens))

    def rotate(self, heads: Tensor, packed: PackedTokens) -> Tensor:
        """Apply the rotary embedding: (S, heads, d) -> the same shape."""
        return heads if self.rope is None else apply_rope(heads, *packed.angles(self.rope))

    def _attend_from_tails(self, query: Tensor, gathered: Tensor, tails: tuple[Tail, ...]) -> Iterator[Tensor]:
        """Yield (queries, heads, d) of each tail, from `query` (queries of all tails, heads, d) and `gathered` (S of
        all ranks, groups, 2 d), and an output without rows: all ranks must run the backward pass of the gathering."""
        gqa = query.size(1) != gathered.size(1)
        for tail, tail_query in zip(tails, query.split([tail.queries for tail in tails]), strict=True):
            keys = tail.keys if self.window is None else tail.keys[-(tail.queries + self.window - 1) :]
            key, value = gathered.index_select(0, keys).transpose(0, 1).chunk(2, -1)
            args = tail_query.transpose(0, 1).unsqueeze(0), key.unsqueeze(0), value.unsqueeze(0)
            scale, num_sinks = self.softmax_scale, 0
            if self.softmax_offset is not None:
                scale, num_sinks = scale or query.size(-1) ** -0.5, 1
                args = add_sinks(*args, self.softmax_offset / scale)
            mask = _lower_right(tail.queries, len(keys), self.window, query.device, num_sinks)
            output = scaled_dot_product_attention(*args, mask, scale=scale, enable_gqa=gqa)
            yield output[0, ..., : query.size(-1)].transpose(0, 1)
        yield gathered[:0].reshape(0, *query.shape[1:]) + query[:0]

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Causal attention: `query` (N, heads, L, d), `key` and `value` (N, groups, L, d) -> (N, heads, L, d)."""
        gqa = query.size(1) != key.size(1)
        options = self.softmax_scale, self.window, self.softmax_offset
        return causal_attention(query, key, value, *options, enable_gqa=gqa)


class ExactPackedAttention(PackedAttention):
    """Attention that is bitwise equal to the native engine's exact mode. Where it has a kernel, the gradient is that of
    the plain attention."""

    def attend_rotated(self, query: Tensor, key: Tensor, value: Tensor, packed: PackedTokens) -> Tensor:
        if not has_attention_kernel(query):
            return super().attend_rotated(query, key, value, packed)
        assert packed.lengths is not None
        tokens = packed.num_tokens
        with torch.no_grad():
            found = packed_attention(query[:tokens], key[:tokens], value[:tokens], packed.lengths).flatten(1)
            found = pad(found, (0, 0, 0, query.size(0) - tokens))
        if not torch.is_grad_enabled():
            return found
        return with_gradient_of(super().attend_rotated(query, key, value, packed), found)

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        grouped = query.unflatten(1, (key.size(1), -1)).transpose(2, 3)
        positions = torch.arange(query.size(2), device=query.device).unsqueeze(0)
        return exact_attention(grouped, key, value, positions).transpose(2, 3).flatten(1, 2)


class StoredTokens(Protocol):
    """The n new tokens of one call of a rollout engine's decoder. rope_positions: (n,) or (3, n), as in
    `rope_cos_sin`."""

    rope_positions: Tensor

    def store(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Write keys (n, KV heads, key_dim) and values (n, KV heads, value_dim) to the cache."""


class CachedAttention:
    """Attention of new tokens to those of a cache and to each other, in any layer of one call of the decoder."""

    new: StoredTokens
    takes_product = False  # whether `of_product` may be called

    def __call__(
        self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, sinks: Tensor | None = None
    ) -> Tensor:
        """Map queries (n, KV heads, queries of a head, key_dim), keys and values as in `StoredTokens.store`, to (n, KV
        heads, queries of a head, value_dim).

        Args:
            sinks: (KV heads, queries of a head), see `causal_attention`.
        """
        raise NotImplementedError

    def of_product(self, layer: int, mixed: Tensor, weights: HeadWeights, cos: Tensor, sin: Tensor) -> Tensor:
        """The same from the product of queries, keys and values, with the arguments of `store_heads`."""
        raise NotImplementedError

    def lengths(self) -> list[int] | None:
        """Return the new tokens of each sequence; None: one of each."""
        return None

    def states(self, layer: int) -> tuple[Tensor, ...]:
        """Return the state tensors (sequences, *size) that a recurrent layer has before the new tokens, 0 at the start
        of a sequence. They may be views of the cache, and are not changed in place."""
        raise NotImplementedError

    def save_states(self, layer: int, states: tuple[Tensor, ...]) -> None:
        """Set the states after the new tokens."""
        raise NotImplementedError


class Rotation(Protocol):
    """Rotary embeddings at the positions of the new tokens, of heads (n, KV heads, heads, head_dim)."""

    def __call__(self, heads: Tensor, rope: Rope) -> Tensor: ...

    def angles(self, rope: Rope) -> tuple[Tensor, Tensor]: ...


class GatedAttention(SelfAttention):
    """Megatron's attention with a gate; there the gates of a query group follow all of its queries."""

    def get_query_key_value_tensors(self, hidden_states: Tensor, *_: object, **__: object) -> tuple[Tensor, ...]:
        """Return queries, keys, values and gates, (S, 1, heads, head_dim) each."""
        width, mixed = self.hidden_size_per_attention_head, self.linear_qkv(hidden_states)[0]
        of_group = mixed.unflatten(-1, (self.num_query_groups_per_partition, -1))
        queries, key, value = of_group.split([of_group.size(-1) - 2 * width, width, width], -1)
        query, gate = (part.flatten(2, 3) for part in queries.unflatten(-1, (-1, 2, width)).unbind(-2))
        return self.q_layernorm(query), self.k_layernorm(key), value, gate

    def _apply_output_gate(self, x: Tensor, gate: Tensor) -> Tensor:
        return x * gate.reshape(x.shape).sigmoid()


class AttentionStep:
    """Grouped-query attention in rollout."""

    def __init__(
        self, block: Attention, weight: Callable[[str], Tensor], linear: Linear, eps: float, tp: TensorParallel
    ) -> None:
        self._block, self._linear, self._tp = block, linear, tp
        self._qkv, self._proj = (weight(f"self_attention.linear_{name}.weight") for name in ("qkv", "proj"))
        bias = weight("self_attention.linear_qkv.bias") if block.qkv_bias else None
        query, key = (weight(f"self_attention.{head}_layernorm.weight") if block.qk_norm else None for head in "qk")
        self._stored = HeadWeights(bias, query, key, eps)
        self._num_groups = len(self._qkv) * block.num_groups // block.num_rows
        # The ranks' parts of the output are summed.
        has_bias = block.has_output_bias and tp.rank == 0
        self._output_bias = weight("self_attention.linear_proj.bias") if has_bias else None
        self._sinks = None
        if block.has_sinks:
            self._sinks = weight("self_attention.core_attention.softmax_offset").view(self._num_groups, -1)
        # Engines divide products of queries and keys by sqrt(head_dim).
        self._scale = None if block.softmax_scale is None else block.softmax_scale * math.sqrt(block.head_dim)

    @property
    def _weights(self) -> HeadWeights:
        query, key = self._stored.query_norm, self._stored.key_norm
        if not self._block.zero_centered or query is None or key is None:
            return self._stored
        return self._stored._replace(query_norm=norm_factor(query, True), key_norm=norm_factor(key, True))

    def __call__(self, layer: int, x: Tensor, attention: CachedAttention, rotate: Rotation) -> Tensor:
        """Map x (n, hidden) to this rank's part of the output (n, hidden)."""
        rope = self._block.rope
        if attention.takes_product and self._block.is_common and rope is not None:
            mixed, angles = self._linear(x, self._qkv), rotate.angles(rope)
            return self._linear(attention.of_product(layer, mixed, self._weights, *angles).flatten(1), self._proj)
        queries, keys, values, gate = self._heads(x, rotate)
        attended = attention(layer, queries, keys, values, self._sinks).flatten(1)
        if gate is not None:
            attended = attended * gate.sigmoid()
        return plus(self._linear(attended, self._proj), self._output_bias)

    def store(self, layer: int, x: Tensor, attention: CachedAttention, rotate: Rotation) -> None:
        """Write to the cache only."""
        _, keys, values, _ = self._heads(x, rotate)
        attention.new.store(layer, keys, values)

    def _heads(self, x: Tensor, rotate: Rotation) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Return queries, keys, values, and the gate (n, heads * head_dim) of the output, if there is one."""
        mixed, width = self._linear(x, self._qkv), self._block.head_dim
        if self._stored.bias is not None:
            mixed = mixed + self._stored.bias
        # (n, KV heads, queries of a head + key + value, head_dim); a gate follows each query
        heads, gate = mixed.view(len(mixed), self._num_groups, -1, width), None
        values = heads[:, :, -1]
        if self._block.has_gate:
            queries, gates = heads[:, :, :-2].unflatten(2, (-1, 2)).unbind(3)
            heads, gate = torch.cat((queries, heads[:, :, -2:]), dim=2), gates.flatten(1)
        turned = self._normed(heads[:, :, :-1])
        if self._block.rope is not None:
            turned = rotate(turned, self._block.rope)
        queries = turned[:, :, :-1] if self._scale is None else turned[:, :, :-1] * self._scale
        return queries, turned[:, :, -1], values, gate

    def _normed(self, heads: Tensor) -> Tensor:
        """Normalise queries and key (n, KV heads, heads, head_dim) in models with QK norm."""
        _, query_norm, key_norm, eps = self._weights
        if query_norm is None or key_norm is None:
            return heads
        queries, key = heads[:, :, :-1], heads[:, :, -1:]
        if self._block.qk_norm == "head":
            queries, key = rms_norm(queries, query_norm, eps), rms_norm(key, key_norm, eps)
            return torch.cat((queries, key), dim=2)
        block, tp = self._block, self._tp
        parts = (queries, query_norm, block.num_heads), (key, key_norm, block.num_groups)
        return torch.cat(
            [
                split_rms_norm(part.flatten(1), weight, eps, count * block.head_dim, tp.sum).view(part.shape)
                for part, weight, count in parts
            ],
            dim=2,
        )


def _lower_right(queries: int, keys: int, window: int | None, device: torch.device, num_sinks: int) -> Tensor:
    """Return the mask of queries that are the last ones of a causal sequence; on a GPU whose kernels recognise it a
    symbolic mask, if there is no window. All queries attend to `num_sinks` keys before the sequence."""
    if device.type == "cuda" and window is None and chip_of(device).lower_right:
        from torch.nn.attention.bias import causal_lower_right  # slow import (0.5 s), which loads the compiler

        return causal_lower_right(queries, keys + num_sinks)
    return pad(window_mask(queries, keys, window, device), (num_sinks, 0), value=True)


def _unpack(x: Tensor, packed: PackedTokens) -> tuple[list[Tensor], Tensor]:
    """(S, heads, d) -> (rows, heads, width, d) of each bucket, and (queries of the tails, heads, d)."""
    places = _Unpack.apply(x, packed.sources, packed.slots)
    sizes = [bucket.size for bucket in packed.buckets]
    *in_buckets, tail_queries = places.split([*sizes, len(places) - sum(sizes)])
    return [
        part.unflatten(0, of).transpose(1, 2) for part, of in zip(in_buckets, packed.buckets, strict=True)
    ], tail_queries


class _Unpack(torch.autograd.Function):
    """Packed (S, ...) -> padded (places, ...).

    Padding is arbitrary and its gradient is 0, so that the backward pass is a gather too, without sums or zero fills.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, sources: Tensor, slots: Tensor) -> Tensor:
        ctx.save_for_backward(slots)
        ctx.size = x.size(0)
        return x.index_select(0, sources)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (slots,) = ctx.saved_tensors
        return _gather_and_fill(grad, slots, ctx.size), None, None


class _Repack(torch.autograd.Function):
    """Padded (places, ...) -> packed (S, ...), 0 for the padding tokens at the end."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, slots: Tensor, size: int) -> Tensor:
        ctx.save_for_backward(slots)
        ctx.padded_size = x.size(0)
        return _gather_and_fill(x, slots, size)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (slots,) = ctx.saved_tensors
        padded = grad.new_zeros(ctx.padded_size, *grad.shape[1:])
        return padded.index_copy_(0, slots, grad[: slots.numel()]), None, None


def _gather_and_fill(x: Tensor, index: Tensor, size: int) -> Tensor:
    """Return rows `index` of `x`, then rows of 0 up to `size`."""
    if index.numel() == size:
        return x.index_select(0, index)
    filled = x.new_zeros(size, *x.shape[1:])
    torch.index_select(x, 0, index, out=filled[: index.numel()])
    return filled
