"""How much memory the KV cache takes."""

from __future__ import annotations

import torch

from hpcrl.launch.exits import InputError
from hpcrl.model.shape import ModelShape

BLOCK_SIZE = 32  # tokens


def block_bytes(shape: ModelShape, tp_size: int, dtype: torch.dtype) -> int:
    """Keys and values of `BLOCK_SIZE` tokens in all layers on one rank, and what decoding with them needs."""
    kept = 2 * shape.num_layers * shape.num_query_groups // tp_size * BLOCK_SIZE * shape.head_dim * dtype.itemsize
    heads = shape.num_attention_heads // tp_size
    scratch = heads * (2 * shape.head_dim + BLOCK_SIZE) * dtype.itemsize + (heads + 1) * BLOCK_SIZE * 4
    return kept + scratch


def most_kv_bytes(shape: ModelShape, tp_size: int, dtype: torch.dtype, max_num_seqs: int, max_model_len: int) -> int:
    """What a rank's KV cache takes when `max_num_seqs` sequences have all grown to `max_model_len` tokens."""
    return max_num_seqs * blocks_for(max_model_len) * block_bytes(shape, tp_size, dtype)


def kv_cache_bytes(
    shape: ModelShape,
    tp_size: int,
    dtype: torch.dtype,
    *,
    max_num_seqs: int,
    max_model_len: int,
    free_bytes: int,
    utilization: float,
) -> int:
    """The size of a rank's KV cache: `utilization` of what is free for the rank, at most what the job can use."""
    return min(int(free_bytes * utilization), most_kv_bytes(shape, tp_size, dtype, max_num_seqs, max_model_len))


def blocks_for(num_tokens: int) -> int:
    return -(-num_tokens // BLOCK_SIZE)


def num_blocks(shape: ModelShape, tp_size: int, dtype: torch.dtype, kv_cache_bytes: int, max_model_len: int) -> int:
    """How many blocks fit; raises InputError when a single sequence of `max_model_len` tokens does not."""
    each, needed = block_bytes(shape, tp_size, dtype), blocks_for(max_model_len)
    found = kv_cache_bytes // each
    if found < needed:
        raise InputError(
            f"the KV cache of {kv_cache_bytes:,} bytes holds {found * BLOCK_SIZE} tokens, and one sequence of "
            f"max_model_len={max_model_len} needs {needed * each:,} bytes; raise rollout.kv_cache_gib or "
            "rollout.gpu_memory_utilization, or shorten prompts and responses"
        )
    return found
