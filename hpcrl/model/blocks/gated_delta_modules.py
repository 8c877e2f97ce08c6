"""The gated delta net: a layer of megatron, and the step in rollout."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor
from torch.nn.functional import silu, softplus

from hpcrl.kernels.delta_rule import gated_delta_rule, gated_delta_step
from hpcrl.kernels.layers import rms_norm
from hpcrl.kernels.short_convolution import causal_conv
from hpcrl.model.blocks.attention_modules import Linear
from hpcrl.model.blocks.layers import RMSNorm
from hpcrl.model.blocks.recurrent_modules import Mix, RecurrentNet, RecurrentStep, ShortConvolution, States

if TYPE_CHECKING:
    from megatron.core.transformer import TransformerConfig

    from hpcrl.model.blocks.gated_delta import GatedDelta


class MixingWeights(NamedTuple):
    """A rank's part of the weights that are not matrices, under the names of `GatedDelta.weights`."""

    conv1d: Tensor
    a_log: Tensor
    dt_bias: Tensor
    norm: Tensor


def mix(
    block: GatedDelta,
    weights: MixingWeights,
    eps: float,
    products: Sequence[Tensor],
    lengths: Sequence[int] | None,
    states: States | None,
) -> tuple[Tensor, States]:
    """Map the products of `in_proj` (T, rows) and `in_proj_ba` to the input of `out_proj`, (T, value heads x
    head_v_dim), of this rank, and return the states after the tokens."""
    each, width, (mixed, gates) = block.values_per_key, block.head_k_dim, products
    by_head = mixed.unflatten(-1, (-1, 2 * (width + each * block.head_v_dim)))
    inputs, gate = by_head.split([2 * width + each * block.head_v_dim, each * block.head_v_dim], -1)
    window, state = states or (None, None)
    inputs, window = causal_conv(inputs.flatten(1), weights.conv1d.squeeze(1), lengths, window)
    query, key, value = inputs.unflatten(-1, (by_head.size(1), -1)).split([width, width, each * block.head_v_dim], -1)
    beta, decay = (part.flatten(1) for part in gates.unflatten(-1, (-1, 2, each)).float().unbind(2))
    decay = -weights.a_log.float().exp() * softplus(decay + weights.dt_bias)
    tensors = query, key, value.reshape(len(value), -1, block.head_v_dim), decay, beta.sigmoid()
    if lengths is None:
        assert state is not None
        output, state = gated_delta_step(*tensors, state)
    else:
        output, state = gated_delta_rule(*tensors, lengths, state)
    # A copy, so that autograd does not keep all of `mixed`.
    gate = silu(gate.reshape(output.shape).contiguous().float())
    output = (rms_norm(output, weights.norm, eps) * gate).to(mixed.dtype)
    return output.flatten(1), (window, state)


class GatedDeltaNet(RecurrentNet):
    """The gated delta net as a layer of megatron.

    Megatron's own layer needs Transformer Engine, and process-global groups in some versions.
    """

    projections = "in_proj", "in_proj_ba"
    whole = ("norm.weight",)

    def __init__(
        self, config: TransformerConfig, *, block: GatedDelta, pg_collection: ProcessGroupCollection, **_: object
    ) -> None:
        super().__init__(config, pg_collection)
        self._block = block
        self.in_proj = self.column_parallel(block.hidden_size, block.channels + block.value_dim)
        self.in_proj_ba = self.column_parallel(block.hidden_size, 2 * block.num_v_heads)
        self.conv1d = ShortConvolution(config, block.channels // self.tp_group.size(), block.conv_width)
        self.A_log, self.dt_bias = self.vector(block.num_v_heads), self.vector(block.num_v_heads)
        # All heads share its weight: each rank has a part of its gradient.
        self.norm = RMSNorm(config, block.head_v_dim, config.layernorm_epsilon)
        self.out_proj = self.row_parallel(block.value_dim, block.hidden_size)

    @property
    def mix(self) -> Mix:
        weights = MixingWeights(self.conv1d.weight, self.A_log, self.dt_bias, self.norm.weight)
        return partial(mix, self._block, weights, self.norm.eps)


def rollout_step(block: GatedDelta, weight: Callable[[str], Tensor], linear: Linear, eps: float) -> RecurrentStep:
    """Return the gated delta net in rollout."""

    def of(name: str) -> Tensor:
        return weight(f"self_attention.{name}")

    weights = MixingWeights(of("conv1d.weight"), of("A_log"), of("dt_bias"), of("norm.weight"))
    projections = [of(f"{name}.weight") for name in GatedDeltaNet.projections]
    return RecurrentStep(projections, of("out_proj.weight"), linear, partial(mix, block, weights, eps))
