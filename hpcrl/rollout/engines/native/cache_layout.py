"""The native engine's KV cache: heads of a rank, blocks of tokens, and their bytes. No torch, no numpy."""

from __future__ import annotations

from typing import NamedTuple

from hpcrl.model.shape import ModelShape
from hpcrl.runtime.exits import InputError

BLOCK_SIZE = 32  # tokens


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
    """Return the bytes of keys and values of `BLOCK_SIZE` tokens in all layers on one rank."""
    heads = cached_heads(shape, tp_size)
    width = heads.key_dim if heads.value_in_key else heads.key_dim + heads.value_dim
    return shape.num_layers * heads.groups * BLOCK_SIZE * width * itemsize


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


def blocks_for(num_tokens: int) -> int:
    return -(-num_tokens // BLOCK_SIZE)


def num_blocks(shape: ModelShape, tp_size: int, itemsize: int, cache_bytes: int, max_model_len: int) -> int:
    """Return how many blocks fit. Raises InputError if a single sequence of `max_model_len` tokens does not fit."""
    each, needed = block_bytes(shape, tp_size, itemsize), blocks_for(max_model_len)
    found = cache_bytes // each
    if found < needed:
        raise InputError(
            f"the KV cache of {cache_bytes:,} bytes holds {found * BLOCK_SIZE} tokens, but one sequence of "
            f"max_model_len={max_model_len} needs {needed * each:,} bytes; raise kv_cache_gib or "
            "gpu_memory_utilization (of rollout, or of reward.judge for a judge), or shorten prompts and responses"
        )
    return found
