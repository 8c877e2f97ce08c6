"""Tokens of several consecutive sequences in chunks, for recurrences that are computed chunk by chunk."""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from hpcrl.kernels.budget import chunk_width


class Chunks(NamedTuple):
    """Where T tokens are in chunks of `width`, all first chunks of sequences before all second ones.

    Sequences have the order `order` int64 (N,), the longest first, so that the chunks of a step are those of the first
    `steps[number]` sequences; `place` is its inverse. Token t is at `slots[t]`, int64 (T,).
    """

    width: int
    steps: tuple[int, ...]
    slots: Tensor
    order: Tensor
    place: Tensor


@functools.lru_cache(maxsize=8)  # all layers of a pass have one
def chunks_of(lengths: tuple[int, ...], device: torch.device) -> Chunks:
    sizes = np.array(lengths)
    longest = int(sizes.max())
    width = chunk_width(longest)
    order = np.argsort(-sizes, kind="stable")
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    numbers = np.arange(-(-longest // width))
    steps = (sizes[:, None] > numbers * width).sum(0)
    of_token, ends = np.arange(len(sizes)).repeat(sizes), sizes.cumsum()
    position = np.arange(ends[-1]) - (ends - sizes)[of_token]
    chunk = (steps.cumsum() - steps)[position // width] + place[of_token]
    return Chunks(width, tuple(steps.tolist()), *on_device(device, chunk * width + position % width, order, place))


def on_device(device: torch.device, *arrays: np.ndarray) -> list[Tensor]:
    """Return tensors that training may use although rollout made them."""
    with torch.inference_mode(False):
        return [torch.from_numpy(array).to(device) for array in arrays]


def by_chunk(x: Tensor, chunks: Chunks) -> Tensor:
    """(T, heads, width) -> (chunks x heads, tokens of a chunk, width), 0 for padding, which changes no state."""
    padded = x.new_zeros(sum(chunks.steps) * chunks.width, *x.shape[1:]).index_copy(0, chunks.slots, x)
    return padded.unflatten(0, (-1, chunks.width)).transpose(1, 2).flatten(0, 1)


def inside(x: Tensor) -> torch.dtype:
    """Return the dtype of what is computed from `x`: at least fp32."""
    return torch.promote_types(x.dtype, torch.float32)
