"""Floating-point operations of a model's matrix products, and bytes of an engine's KV cache. No torch."""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import cache
from typing import NamedTuple

from hpcrl.model.params import EMBEDDING, OUTPUT_LAYER, TOWER, shards
from hpcrl.model.shape import ModelShape
from hpcrl.runtime.exits import InputError

# Micro-batches have a multiple of so many tokens: CPU matrix products then compute a row bitwise alike for any number
# of rows.
ROW_MULTIPLE = 8
# Dense bf16 operations per second of one device, from data sheets; the first matching name is used.
PEAKS = {
    "GB200": 2.5e15,
    "B200": 2.25e15,
    "H200": 989e12,
    "H100": 989e12,
    "H800": 989e12,
    "GH200": 989e12,
    "A100": 312e12,
    "A800": 312e12,
    "H20": 148e12,
    "L40S": 362e12,
}


def peak_of(device_name: str) -> float | None:
    """Return the bf16 operations per second of a device by torch's name; None if unknown."""
    words = device_name.replace("-", " ").split()
    return next((peak for name, peak in PEAKS.items() if name in words), None)


def forward_flops(shape: ModelShape, lengths: Iterable[int], num_outputs: int) -> float:
    """Return the operations of one pass over sequences of these lengths, with the head at `num_outputs` of their
    tokens.

    2 per weight of a matrix and token (active experts only), and for causal attention 2 * head_dim * (L + 1) L / 2 per
    head for the scores and 2 * v_head_dim * (L + 1) L / 2 for the values. Norms, rotary embedding, softmax and a vision
    tower do not count (Kaplan et al. 2020, arXiv:2001.08361, section 2.1).
    """
    per_token, per_output = _weights(shape)
    width = shape.num_layers * shape.num_attention_heads * (shape.head_dim + shape.v_head_dim)
    each = list(lengths)
    attention = sum(width * length * (length + 1.0) for length in each)
    return 2.0 * per_token * sum(each) + 2.0 * per_output * num_outputs + attention


def training_flops(shape: ModelShape, lengths: Iterable[int], num_outputs: int, *, has_adapters: bool = False) -> float:
    """The same with the backward pass, which takes two products per product; recomputation does not count. If only
    adapters are trained, it takes one per product with a weight; the adapters' own products are negligible."""
    each = list(lengths)
    total = 3.0 * forward_flops(shape, each, num_outputs)
    if not has_adapters:
        return total
    per_token, per_output = _weights(shape)
    return total - 2.0 * per_token * sum(each) - 2.0 * per_output * num_outputs


@cache
def _weights(shape: ModelShape) -> tuple[float, int]:
    """Return the matrix weights that a token uses in the layers, and in the head."""
    whole = shards(shape)
    share = shape.moe_topk / shape.num_experts if shape.num_experts else 0.0
    layers = sum(
        math.prod(shard.global_shape) * (share if shard.is_expert else 1.0)
        for shard in whole
        if len(shard.global_shape) == 2 and shard.name not in (EMBEDDING, OUTPUT_LAYER) and TOWER not in shard.name
    )
    return layers, shape.padded_vocab_size * shape.hidden_size


BLOCK_SIZE = 32  # tokens, of the native engine


class CachedHeads(NamedTuple):
    """What a rank of the native engine caches per token and layer: keys and values of `groups` heads, each with
    `queries` query heads, and their widths. Latent attention has one such head, the latent with the shared rotary key,
    whose first `value_dim` elements are also its value."""

    groups: int
    queries: int
    key_dim: int
    value_dim: int
    value_in_key: bool = False


def cached_heads(shape: ModelShape, tp_size: int) -> CachedHeads:
    if shape.mla is None:
        groups, width = shape.num_query_groups, shape.head_dim
        return CachedHeads(groups // tp_size, shape.num_attention_heads // groups, width, width)
    rank = shape.mla.kv_lora_rank
    return CachedHeads(1, shape.num_attention_heads // tp_size, rank + shape.rope_dim, rank, value_in_key=True)


def block_bytes(shape: ModelShape, tp_size: int, itemsize: int) -> int:
    """Return the bytes of keys and values of `BLOCK_SIZE` tokens in all layers on one rank, and of decoding's scratch
    memory."""
    heads = cached_heads(shape, tp_size)
    width = heads.key_dim if heads.value_in_key else heads.key_dim + heads.value_dim
    kept = shape.num_layers * heads.groups * BLOCK_SIZE * width * itemsize
    queries = heads.groups * heads.queries
    scratch = queries * (heads.key_dim + heads.value_dim + BLOCK_SIZE) * itemsize + (queries + 1) * BLOCK_SIZE * 4
    return kept + scratch


def max_kv_bytes(shape: ModelShape, tp_size: int, itemsize: int, max_num_seqs: int, max_model_len: int) -> int:
    """Return the bytes of a rank's KV cache if `max_num_seqs` sequences have all grown to `max_model_len` tokens."""
    return max_num_seqs * blocks_for(max_model_len) * block_bytes(shape, tp_size, itemsize)


def kv_cache_bytes(
    shape: ModelShape,
    tp_size: int,
    itemsize: int,
    *,
    max_num_seqs: int,
    max_model_len: int,
    free_bytes: int,
    utilization: float,
) -> int:
    """Return the size of a rank's KV cache: `utilization` of the free memory, at most what the job can use."""
    return min(int(free_bytes * utilization), max_kv_bytes(shape, tp_size, itemsize, max_num_seqs, max_model_len))


def kv_bytes_per_token(shape: ModelShape, tp_size: int, itemsize: int) -> int:
    """Return the bytes of keys and values of a token on one rank in TensorRT-LLM, where a head cannot be split."""
    heads = -(-shape.num_query_groups // tp_size)
    return 2 * shape.num_layers * heads * shape.head_dim * itemsize


def blocks_for(num_tokens: int) -> int:
    return -(-num_tokens // BLOCK_SIZE)


def num_blocks(shape: ModelShape, tp_size: int, itemsize: int, kv_cache_bytes: int, max_model_len: int) -> int:
    """Return how many blocks fit. Raises InputError if a single sequence of `max_model_len` tokens does not fit."""
    each, needed = block_bytes(shape, tp_size, itemsize), blocks_for(max_model_len)
    found = kv_cache_bytes // each
    if found < needed:
        raise InputError(
            f"the KV cache of {kv_cache_bytes:,} bytes holds {found * BLOCK_SIZE} tokens, but one sequence of "
            f"max_model_len={max_model_len} needs {needed * each:,} bytes; raise kv_cache_gib or "
            "gpu_memory_utilization (of rollout, or of reward.judge for a judge), or shorten prompts and responses"
        )
    return found
