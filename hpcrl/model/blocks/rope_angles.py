"""Rotary position embedding (Su et al. 2021, arXiv:2104.09864): positions, and angles for `hpcrl.kernels.layers`.

The training model and the native rollout engine call the same functions, so that log-probs agree.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

from hpcrl.batch.pictures import Picture
from hpcrl.model.blocks.attention import Rope, RopeScaling
from hpcrl.model.vision import Vision


def rope_positions(length: int, pictures: Iterable[Picture], vision: Vision) -> np.ndarray:
    """Return positions in time, height and width of a sequence's tokens, int64 (3, length).

    A text token's are equal, one more than the largest before it. Those of a picture begin there and run over its grid
    (M-RoPE, Wang et al. 2024, arXiv:2409.12191, section 2.1, with the spacing in time of Qwen2.5-VL, arXiv:2502.13923).
    """
    positions = np.empty((3, length), np.int64)
    place = following = 0
    merge = vision.merge_size
    for start, (time, height, width), interval in pictures:
        positions[:, place:start] = np.arange(following, following + start - place)
        first = following + start - place
        height, width = height // merge, width // merge
        grid = np.indices((time, height, width)).reshape(3, -1)
        grid[0] = (grid[0] * np.float32(interval)).astype(np.int64)
        place = start + grid.shape[1]
        if place > length:
            raise ValueError(f"a picture of {grid.shape[1]} tokens begins at token {start} of a sequence of {length}")
        positions[:, start:place] = first + grid
        following = first + max(height, width)
    positions[:, place:] = np.arange(following, following + length - place)
    return positions


def rope_cos_sin(position_ids: Tensor, rope: Rope) -> tuple[Tensor, Tensor]:
    """Return cosine and sine of position x frequency, each (..., rope.dim / 2) fp32, for integer `position_ids` (...).

    Frequency i is theta^(-2 i / dim), eq. 15 of the paper, unless it is scaled. `position_ids` may be (3, ...) if the
    embedding has axes.
    """
    dim, theta, scaling, axes = rope.dim, rope.theta, rope.scaling, rope.axes
    powers = torch.arange(0, dim, 2, dtype=torch.float32, device=position_ids.device) / dim
    frequencies = 1.0 / theta**powers
    if scaling is not None:
        frequencies = scaled_frequencies(frequencies, theta, scaling)
    turning = position_ids.to(torch.float32)
    if axes is None:
        turning = turning.unsqueeze(-1)
    else:
        turning = torch.stack([turning[axis] for axis in axes], dim=-1)  # an index would be a copy from the host
    angles = turning * frequencies
    cos, sin = angles.cos(), angles.sin()
    if scaling is not None and scaling.attention_factor != 1.0:
        cos, sin = cos * scaling.attention_factor, sin * scaling.attention_factor
    return cos, sin


def scaled_frequencies(frequencies: Tensor, theta: float, scaling: RopeScaling) -> Tensor:
    """Return `frequencies` (head_dim / 2,), lowered where a sequence of the original length has too few turns of them.

    linear: all by `factor` (Chen et al. 2023, arXiv:2306.15595). llama3: those of more turns than `high_freq_factor`
    are kept, those of fewer than `low_freq_factor` are divided, between them linear in the turns (the Llama 3.1
    release). yarn: the same, linear in the number of the dimension (Peng et al. 2023, arXiv:2309.00071, section 3.2).
    """
    slow = frequencies / scaling.factor
    if scaling.kind == "linear":
        return slow
    original = scaling.original_max_position_embeddings
    if scaling.kind == "llama3":
        turns = original * frequencies / (2 * math.pi)
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        share = ((turns - low) / (high - low)).clamp(0.0, 1.0)
        return (1 - share) * slow + share * frequencies
    width = 2 * len(frequencies)

    def dimension(turns: float) -> float:
        """Return the dimension with so many turns in a sequence of the original length."""
        return width * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    first, last = dimension(scaling.beta_fast), dimension(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, width - 1)
    places = torch.arange(len(frequencies), dtype=torch.float32, device=frequencies.device)
    share = 1 - ((places - first) / max(last - first, 1e-3)).clamp(0.0, 1.0)
    return (1 - share) * slow + share * frequencies


def deinterleave(x: Tensor) -> Tensor:
    """Move elements 2 i and 2 i + 1 of the last dimension, which are pairs in DeepSeek's weights, to the pairs of
    `apply_rope`.

    Queries and keys keep the new order: their product does not depend on it.
    """
    return x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
