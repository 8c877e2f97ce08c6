"""Floating-point operations that a model's matrix products need: no torch, no ranks."""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import cache

from hpcrl.model.params import EMBEDDING, OUTPUT_LAYER, shards
from hpcrl.model.shape import ModelShape

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
