"""TensorRT-LLM's KV cache: tokens of a block, and bytes of a token. No torch and no numpy, for `hpcrl plan`."""

from __future__ import annotations

from hpcrl.model.shape import ModelShape

TOKENS_PER_BLOCK = 32  # of its paged KV cache


def kv_bytes_per_token(shape: ModelShape, tp_size: int, itemsize: int) -> int:
    """Return the bytes of keys and values of a token on one rank in TensorRT-LLM, where a head cannot be split."""
    heads = -(-shape.num_query_groups // tp_size)
    return 2 * shape.num_layers * heads * shape.head_dim * itemsize
