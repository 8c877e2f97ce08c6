"""Operations of the matrix products of models and vision towers. No torch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import cache

from hpcrl.model.blocks.block import blocks_of
from hpcrl.model.blocks.micro_batch import MicroBatch, seen_pairs
from hpcrl.model.params import ONE_RANK
from hpcrl.model.shape import ModelShape
from hpcrl.model.vision import Vision, tower_tensors


def forward_flops(shape: ModelShape, lengths: Iterable[int], num_outputs: int) -> float:
    """Return the operations of one pass over sequences of these lengths, with the head at `num_outputs` of their
    tokens.

    Each weight of a matrix counts 2 per token, active experts only. Each head of causal attention counts 2 * head_dim *
    (L + 1) L / 2 for the scores and 2 * v_head_dim * (L + 1) L / 2 for the values. Norms, rotary embedding and softmax
    do not count (Kaplan et al. 2020, arXiv:2001.08361, section 2.1). See `tower_flops` for a vision tower.
    """
    per_token, per_output, per_pair = operations(shape)
    each = list(lengths)
    attention = sum(width * seen_pairs(length, sees) for sees, width in per_pair for length in each)
    return per_token * sum(each) + per_output * num_outputs + attention


def training_flops(shape: ModelShape, lengths: Iterable[int], num_outputs: int, *, has_adapters: bool = False) -> float:
    """Return the operations of a forward and a backward pass.

    The backward pass takes two products per product, and recomputation does not count. If only adapters are trained, it
    takes one per product with a weight, and the adapters' own products are negligible.
    """
    each = list(lengths)
    total = 3.0 * forward_flops(shape, each, num_outputs)
    if not has_adapters:
        return total
    per_token, per_output, _ = operations(shape)
    return total - per_token * sum(each) - per_output * num_outputs


@cache
def operations(shape: ModelShape) -> tuple[float, float, tuple[tuple[int | None, float], ...]]:
    """Return the operations of a forward pass per token, per output of the head, and per pair of tokens of which one
    attends to the other, by the tokens that a token sees (see `seen_pairs`)."""
    token, per_token = MicroBatch(ONE_RANK, 1, 1), 0.0
    per_pair: dict[int | None, float] = {}
    for block, count in blocks_of(shape.layers).items():
        its = block.computation(token)
        per_token += count * sum(each.rows * sum(map(math.prod, each.matrices)) for each in its.products)
        per_pair[its.sees] = per_pair.get(its.sees, 0.0) + 2.0 * count * its.pair_width
    return 2.0 * per_token, 2.0 * shape.padded_vocab_size * shape.hidden_size, tuple(per_pair.items())


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
