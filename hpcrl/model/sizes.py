"""Floating-point operations of a model's matrix products, and bytes of an engine's KV cache. No torch."""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import cache
from typing import NamedTuple

from hpcrl.model.params import EMBEDDING, OUTPUT_LAYER, shards
from hpcrl.model.shape import ModelShape
from hpcrl.runtime.exits import InputError

# Dense bf16 operations per second of one device, from the makers' data sheets; the first name that fits counts.
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
    """bf16 operations per second of a device that torch names so; None where it is not known."""
    words = device_name.replace("-", " ").split()
    return next((peak for name, peak in PEAKS.items() if name in words), None)


def forward_flops(shape: ModelShape, lengths: Iterable[int], num_outputs: int) -> float:
    """Of one pass over sequences of these lengths, with the head at `num_outputs` of their tokens.

    2 per weight of a matrix and token (of experts those that a token goes to), and for causal attention
    2 * head_dim * (L + 1) L / 2 per head for the scores and 2 * v_head_dim * (L + 1) L / 2 for the values. Norms,
    rotary embedding and softmax do not count (Kaplan et al. 2020, arXiv:2001.08361, section 2.1).
    """
    per_token, per_output = _weights(shape)
    width = shape.num_layers * shape.num_attention_heads * (shape.head_dim + shape.v_head_dim)
    each = list(lengths)
    attention = sum(width * length * (length + 1.0) for length in each)
    return 2.0 * per_token * sum(each) + 2.0 * per_output * num_outputs + attention


def training_flops(shape: ModelShape, lengths: Iterable[int], num_outputs: int, *, has_adapters: bool = False) -> float:
    """The same with the backward pass, which takes two products for each one; what is computed again does not count.
    Where adapters alone are trained, it takes one for each one with a weight; those of adapters are too few to count.
    """
    each = list(lengths)
    total = 3.0 * forward_flops(shape, each, num_outputs)
    if not has_adapters:
        return total
    per_token, per_output = _weights(shape)
    return total - 2.0 * per_token * sum(each) - 2.0 * per_output * num_outputs


@cache
def _weights(shape: ModelShape) -> tuple[float, int]:
    """Weights in matrices that a token meets in the layers, and in the head."""
    whole = shards(shape, tp_rank=0, tp_size=1, pp_rank=0, pp_size=1)
    share = shape.moe_topk / shape.num_experts if shape.num_experts else 0.0
    layers = sum(
        math.prod(shard.global_shape) * (share if shard.is_expert else 1.0)
        for shard in whole
        if len(shard.global_shape) == 2 and shard.name not in (EMBEDDING, OUTPUT_LAYER)
    )
    return layers, shape.padded_vocab_size * shape.hidden_size


BLOCK_SIZE = 32  # tokens, of the native engine


class CachedHeads(NamedTuple):
    """What a rank of the native engine caches of a token in one layer: keys and values of `groups` heads, each with
    `queries` query heads, and their widths. Of latent attention that is one head, the latent with the shared rotary
    key, whose first `value_dim` elements are its value too."""

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
    """Keys and values of `BLOCK_SIZE` tokens in all layers on one rank, and what decoding with them needs."""
    heads = cached_heads(shape, tp_size)
    width = heads.key_dim if heads.value_in_key else heads.key_dim + heads.value_dim
    kept = shape.num_layers * heads.groups * BLOCK_SIZE * width * itemsize
    queries = heads.groups * heads.queries
    scratch = queries * (heads.key_dim + heads.value_dim + BLOCK_SIZE) * itemsize + (queries + 1) * BLOCK_SIZE * 4
    return kept + scratch


def most_kv_bytes(shape: ModelShape, tp_size: int, itemsize: int, max_num_seqs: int, max_model_len: int) -> int:
    """What a rank's KV cache takes when `max_num_seqs` sequences have all grown to `max_model_len` tokens."""
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
    """The size of a rank's KV cache: `utilization` of what is free for the rank, at most what the job can use."""
    return min(int(free_bytes * utilization), most_kv_bytes(shape, tp_size, itemsize, max_num_seqs, max_model_len))


def kv_bytes_per_token(shape: ModelShape, tp_size: int, itemsize: int) -> int:
    """Keys and values of a token on one rank, as TensorRT-LLM has them: a head cannot be halved."""
    heads = -(-shape.num_query_groups // tp_size)
    return 2 * shape.num_layers * heads * shape.head_dim * itemsize


def blocks_for(num_tokens: int) -> int:
    return -(-num_tokens // BLOCK_SIZE)


def num_blocks(shape: ModelShape, tp_size: int, itemsize: int, kv_cache_bytes: int, max_model_len: int) -> int:
    """How many blocks fit; raises InputError when a single sequence of `max_model_len` tokens does not."""
    each, needed = block_bytes(shape, tp_size, itemsize), blocks_for(max_model_len)
    found = kv_cache_bytes // each
    if found < needed:
        raise InputError(
            f"the KV cache of {kv_cache_bytes:,} bytes holds {found * BLOCK_SIZE} tokens, and one sequence of "
            f"max_model_len={max_model_len} needs {needed * each:,} bytes; raise rollout.kv_cache_gib or "
            "rollout.gpu_memory_utilization, or shorten prompts and responses"
        )
    return found
