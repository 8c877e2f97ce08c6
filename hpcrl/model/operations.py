"""Operations of the matrix products of models and vision towers, and bytes of an engine's KV cache. No torch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import cache
from typing import NamedTuple

from hpcrl.model.params import EMBEDDING, OUTPUT_LAYER, TOWER, shards
from hpcrl.model.shape import ModelShape
from hpcrl.model.vision import Vision, tower_tensors
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
    head for the scores and 2 * v_head_dim * (L + 1) L / 2 for the values. Norms, rotary embedding and softmax do not
    count (Kaplan et al. 2020, arXiv:2001.08361, section 2.1), and a vision tower is apart: see `tower_flops`.
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


def tower_flops(vision: Vision, grids: Iterable[Sequence[int]]) -> float:
    """Return the operations of the vision tower's pass over pictures, given their patches in time, height and width.

    2 per weight of a matrix and patch, of a merger and token, and 4 * hidden_size per pair of patches that attend to
    each other: those of a frame, or of a window of it.
    """
    tower, merged = vision.tower, vision.merge_size**2
    per_patch = 0.0
    for name, size in tower_tensors(vision).items():
        if len(size) > 1 and name != "pos_embed.weight":
            per_patch += 2.0 * math.prod(size) / (merged if vision.is_merger(name) else 1)
    num_full, window = int(tower["depth"]), 0
    if not vision.mrope_interleaved:
        num_full, window = len(tower["fullatt_block_indexes"]), int(tower["window_size"]) // vision.patch_size
    total = 0.0
    for time, height, width in grids:
        frame = height * width
        pairs = num_full * frame**2
        if window:
            squares = [side // window * window**2 + (side % window) ** 2 for side in (height, width)]
            pairs += (int(tower["depth"]) - num_full) * squares[0] * squares[1]
        total += time * (frame * per_patch + 4.0 * int(tower["hidden_size"]) * pairs)
    return total


def tower_training_factor(vision: Vision) -> float:
    """Return the operations of training as a multiple of `tower_flops`. If only the merger is trained, its own backward
    pass, a few percent, does not count."""
    return 3.0 if vision.train in ("tower", "all") else 1.0


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
