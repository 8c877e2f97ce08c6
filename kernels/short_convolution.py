"""A short causal convolution of each channel over several consecutive sequences, with a state of each sequence before
and after its tokens."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import silu

from hpcrl.kernels.chunks import inside, on_device


def causal_conv(
    x: Tensor, weight: Tensor, lengths: Sequence[int] | None, state: Tensor | None = None, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return y_t = silu(sum over i of weight[:, i] x_{t - width + 1 + i} + bias) of each channel, over the tokens of
    the same sequence, and the last width - 1 inputs of each sequence.

    Computed in fp32, returned in the dtype of `x`. Moves x in and the result out, 2 width operations a number; the
    backward pass computes the sums again, so that only x is kept. No gradient flows back from the last inputs.

    Args:
        x: (T, channels).
        weight: (channels, width).
        lengths: tokens of the sequences, T in all; None: one of each, without gradients.
        state: the inputs before the first token of each sequence, (sequences, width - 1, channels); None: 0.
    """
    before = weight.size(1) - 1
    if state is None:
        state = x.new_zeros(len(x) if lengths is None else len(lengths), before, x.size(1))
    if lengths is None:
        window = torch.cat((state.to(x.dtype), x.unsqueeze(1)), 1)
        return silu(_sums(window, weight, bias)).squeeze(1).to(x.dtype), window[:, 1:]
    return _ShortConvolution.apply(x, weight, state.to(x.dtype), bias, *_with_states(tuple(lengths), before, x.device))


@functools.lru_cache(maxsize=8)
def _with_states(lengths: tuple[int, ...], before: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Return the places of tokens, of states, and of the last `before` inputs, if each sequence follows its states."""
    sizes = np.array(lengths)
    ends = (sizes + before).cumsum()
    tokens = np.arange(sizes.sum()) + before * (np.arange(len(sizes)).repeat(sizes) + 1)
    last = (ends[:, None] - before + np.arange(before)).ravel()
    found = on_device(device, tokens, last - np.repeat(sizes, before), last)
    return found[0], found[1], found[2]


class _ShortConvolution(torch.autograd.Function):
    """`joined` has the states and tokens of the sequences in turn."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        state: Tensor,
        bias: Tensor | None,
        tokens: Tensor,
        states: Tensor,
        last: Tensor,
    ) -> tuple[Tensor, Tensor]:
        joined = x.new_empty(len(x) + len(states), x.size(1))
        joined.index_copy_(0, tokens, x).index_copy_(0, states, state.flatten(0, 1))
        ctx.save_for_backward(joined, weight, bias, tokens, states)
        ctx.size = state.shape
        inputs = joined.index_select(0, last).view(state.shape)
        ctx.mark_non_differentiable(inputs)
        sums = _sums(joined.unsqueeze(0), weight, bias).squeeze(0)
        return silu(sums).index_select(0, tokens - state.size(1)).to(x.dtype), inputs

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        joined, weight, bias, tokens, states = ctx.saved_tensors
        total = _sums(joined.unsqueeze(0), weight, bias).squeeze(0)
        padded = torch.zeros_like(total).index_copy_(0, tokens - ctx.size[1], grad.to(total.dtype))
        total = torch.ops.aten.silu_backward(padded, total)
        grad_joined, grad_weight = torch.zeros_like(joined, dtype=total.dtype), torch.empty_like(weight)
        for place, tap in enumerate(weight.t().to(total.dtype)):
            grad_joined[place : place + len(total)].addcmul_(total, tap)
            grad_weight[:, place] = (joined[place : place + len(total)] * total).sum(0)
        grad_joined = grad_joined.to(joined.dtype)
        of_state = grad_joined.index_select(0, states).view(ctx.size) if ctx.needs_input_grad[2] else None
        of_bias = None if bias is None else total.sum(0).to(bias.dtype)
        return grad_joined.index_select(0, tokens), grad_weight, of_state, of_bias, None, None, None


def _sums(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return the convolution of rows (N, L, channels): (N, L - width + 1, channels), at least fp32."""
    dtype, length = inside(x), x.size(1) - weight.size(1) + 1
    first, *others = weight.t().to(dtype)
    total = x[:, :length].to(dtype) * first
    for place, tap in enumerate(others, 1):
        total.addcmul_(x[:, place : place + length].to(dtype), tap)
    return total if bias is None else total.add_(bias)
