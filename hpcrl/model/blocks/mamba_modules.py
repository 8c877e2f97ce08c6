"""Mamba-2: a layer of megatron, and the step in rollout."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor
from torch.nn.functional import silu, softplus
from torch.utils.checkpoint import checkpoint

from hpcrl.kernels.short_convolution import causal_conv
from hpcrl.kernels.state_space import state_space, state_space_step
from hpcrl.model.blocks.attention_modules import Linear
from hpcrl.model.blocks.recurrent_modules import Mix, RecurrentNet, RecurrentStep, ShortConvolution, States

if TYPE_CHECKING:
    from megatron.core.transformer import TransformerConfig

    from hpcrl.model.blocks.mamba import Mamba


class MixingWeights(NamedTuple):
    """A rank's part of the weights that are not matrices, under the names of `Mamba.weights`."""

    conv1d: Tensor
    conv1d_bias: Tensor | None
    a_log: Tensor
    skip: Tensor
    dt_bias: Tensor
    norm: Tensor


def mix(
    block: Mamba,
    weights: MixingWeights,
    eps: float,
    products: Sequence[Tensor],
    lengths: Sequence[int] | None,
    states: States | None,
) -> tuple[Tensor, States | None]:
    """Map the product of `in_proj` (T, rows) to the input of `out_proj`, (T, heads x head_dim), of this rank, and
    return the states after the tokens."""
    (mixed,), (inner, _, width, _, heads) = products, block.rows_of_group.values()
    by_group = mixed.unflatten(-1, (-1, 2 * (inner + width) + heads))
    gate, inputs, dt = by_group.split([inner, inner + 2 * width, heads], -1)
    window, state = states or (None, None)
    inputs, window = causal_conv(inputs.flatten(1), weights.conv1d.squeeze(1), lengths, window, weights.conv1d_bias)
    x, b, c = inputs.unflatten(-1, (by_group.size(1), -1)).split([inner, width, width], -1)
    x, rate, skip = x.reshape(len(x), -1, block.head_dim), -weights.a_log.float().exp(), weights.skip.float()
    dt = softplus(dt.flatten(1).float() + weights.dt_bias).clamp(min=block.least_dt)
    if lengths is None:
        assert state is not None
        output, state = state_space_step(x, dt, rate, b, c, skip, state)
    else:
        output, state = state_space(x, dt, rate, b, c, skip, lengths, state)
    gate = gate.contiguous()  # a copy, so that autograd does not keep all of `mixed`
    tensors = output.view(gate.shape), gate, weights.norm, eps
    if torch.is_grad_enabled():
        output = checkpoint(_gated_norm, *tensors, use_reentrant=False, preserve_rng_state=False)
    else:
        output = _gated_norm(*tensors)
    return output, None if state is None else (window, state)


def _gated_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return RMSNorm over the last dimension of x silu(gate), in fp32: (T, groups, width) -> (T, groups x width).

    Args:
        weight: (groups x width,).
    """
    gated = x.float() * silu(gate.float())
    normed = gated * torch.rsqrt(gated.square().mean(-1, keepdim=True) + eps)
    return (normed.flatten(1) * weight).to(gate.dtype)


class GroupedNorm(torch.nn.Module):
    """The weight of `_gated_norm`."""

    def __init__(self, weight: torch.nn.Parameter) -> None:
        super().__init__()
        self.weight = weight


class MambaMixer(RecurrentNet):
    """Mamba-2 as a layer of megatron.

    Megatron's own layer needs mamba-ssm.
    """

    projections = ("in_proj",)

    def __init__(
        self, config: TransformerConfig, *, block: Mamba, pg_collection: ProcessGroupCollection, **_: object
    ) -> None:
        super().__init__(config, pg_collection)
        self._block, channels = block, block.channels // self.tp_group.size()
        self.in_proj = self.column_parallel(block.hidden_size, block.num_groups * sum(block.rows_of_group.values()))
        self.conv1d = ShortConvolution(config, channels, block.conv_width, has_bias=block.has_conv_bias)
        self.A_log, self.D, self.dt_bias = (self.vector(block.num_heads) for _ in range(3))
        self.norm = GroupedNorm(self.vector(block.inner_dim))
        self.out_proj = self.row_parallel(block.inner_dim, block.hidden_size)

    @property
    def mix(self) -> Mix:
        of_heads = self.A_log, self.D, self.dt_bias, self.norm.weight
        weights = MixingWeights(self.conv1d.weight, self.conv1d.bias, *of_heads)
        return partial(mix, self._block, weights, self.config.layernorm_epsilon)


def rollout_step(block: Mamba, weight: Callable[[str], Tensor], linear: Linear, eps: float) -> RecurrentStep:
    """Return Mamba-2 in rollout."""

    def of(name: str) -> Tensor:
        return weight(f"self_attention.{name}")

    bias = of("conv1d.bias") if block.has_conv_bias else None
    weights = MixingWeights(of("conv1d.weight"), bias, of("A_log"), of("D"), of("dt_bias"), of("norm.weight"))
    return RecurrentStep([of("in_proj.weight")], of("out_proj.weight"), linear, partial(mix, block, weights, eps))
