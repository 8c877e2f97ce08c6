"""How much memory an engine's KV cache takes. `itemsize`: bytes of the engine's dtype. No torch."""

from __future__ import annotations

from typing import NamedTuple

from hpcrl.model.shape import ModelShape
from hpcrl.runtime.exits import InputError

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
