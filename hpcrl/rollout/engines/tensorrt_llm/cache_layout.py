"""TensorRT-LLM's KV cache: tokens of a block, and bytes of a token. No torch and no numpy, for `hpcrl plan`."""

from __future__ import annotations

from hpcrl.model.blocks.block import CachedHeads
from hpcrl.model.shape import ModelShape

TOKENS_PER_BLOCK = 32  # of its paged KV cache


def kv_bytes_per_token(shape: ModelShape, tp_size: int, itemsize: int) -> int:
    """Return the bytes of keys and values of a token on one rank in TensorRT-LLM, where a head cannot be split."""
    found = 0
    for layer in shape.layers:
        if isinstance(cached := layer.attention.cached(1), CachedHeads):
            found += 2 * -(-cached.groups // tp_size) * cached.key_dim * itemsize
    return found
