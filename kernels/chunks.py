"""Tokens of several consecutive sequences in chunks, for recurrences that are computed chunk by chunk."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from hpcrl.kernels import chunk_width


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
def chunks_of(lengths: tuple[int, ...], most: int, device: torch.device) -> Chunks:
    """Divide sequences of these lengths into chunks of at most `most` tokens."""
    sizes = np.array(lengths)
    longest = int(sizes.max())
    width = chunk_width(longest, most)
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
    padded = _Padded.apply(x, chunks.slots, sum(chunks.steps) * chunks.width)
    return padded.unflatten(0, (-1, chunks.width)).transpose(1, 2).flatten(0, 1)


class _Padded(torch.autograd.Function):
    """Rows at `slots` of a tensor of 0. Autograd's own copies the zeros once more."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, slots: Tensor, count: int) -> Tensor:
        ctx.save_for_backward(slots)
        return x.new_zeros(count, *x.shape[1:]).index_copy_(0, slots, x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (slots,) = ctx.saved_tensors
        return grad.index_select(0, slots), None, None


def decays(logs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the factors of a state that decays by exp(`logs`) at each token, (chunks, w, n) -> from token j to token i
    of a chunk (chunks, n, w of i, w of j), 0 for j > i; from each token to the end of its chunk (chunks, w, n); and
    from the start of the chunk to each token.

    Sums are fp64: after a strong decay, the difference of two fp32 sums would have the rounding error of the larger.
    """
    sums, dtype = logs.double().cumsum(1), logs.dtype
    of_head = sums.transpose(1, 2)
    later = torch.ones(logs.size(1), logs.size(1), dtype=torch.bool, device=logs.device).triu(1)
    between = (of_head.unsqueeze(3) - of_head.unsqueeze(2)).to(dtype).masked_fill(later, -torch.inf).exp()
    return between, (sums[:, -1:] - sums).to(dtype).exp(), sums.to(dtype).exp()


def inside(x: Tensor) -> torch.dtype:
    """Return the dtype of what is computed from `x`: at least fp32."""
    return torch.promote_types(x.dtype, torch.float32)
