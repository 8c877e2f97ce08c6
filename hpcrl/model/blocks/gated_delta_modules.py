"""The gated delta net: a layer of megatron, and the step in rollout."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint, sharded_state_dict_default
from torch import Tensor
from torch.nn.functional import pad, silu, softplus

from hpcrl.kernels.delta_rule import gated_delta_rule, gated_delta_step
from hpcrl.kernels.layers import rms_norm
from hpcrl.kernels.short_convolution import causal_conv
from hpcrl.model.blocks.attention_modules import CachedAttention, Linear, Rotation
from hpcrl.model.blocks.layers import RMSNorm
from hpcrl.model.gpt import PackedTokens

if TYPE_CHECKING:
    from megatron.core.transformer import TransformerConfig

    from hpcrl.model.blocks.gated_delta import GatedDelta


class MixingWeights(NamedTuple):
    """A rank's part of the weights that are not matrices, under the names of `GatedDelta.weights`."""

    conv1d: Tensor
    a_log: Tensor
    dt_bias: Tensor
    norm: Tensor


States = tuple[Tensor, Tensor]  # as `GatedDelta.cached` says


def mix(
    block: GatedDelta,
    weights: MixingWeights,
    eps: float,
    mixed: Tensor,
    gates: Tensor,
    lengths: Sequence[int] | None,
    states: States | None = None,
) -> tuple[Tensor, States]:
    """Map the products of `in_proj` (T, rows) and `in_proj_ba` to the input of `out_proj`, (T, value heads x
    head_v_dim), of this rank, and return the states after the tokens.

    lengths: tokens of the packed sequences; None: one of each, without gradients. states: before them; None: 0.
    """
    each, width = block.values_per_key, block.head_k_dim
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
    gate = silu(
        gate.reshape(output.shape).contiguous().float()
    )  # a copy, so that autograd does not keep all of `mixed`
    output = (rms_norm(output, weights.norm, eps) * gate).to(mixed.dtype)
    return output.flatten(1), (window, state)


class GatedDeltaNet(MegatronModule):
    """The gated delta net as a layer of megatron. Padding tokens belong to no sequence, and their output is 0.

    Megatron's own layer needs Transformer Engine, and process-global groups in some versions.
    """

    def __init__(
        self, config: TransformerConfig, *, block: GatedDelta, pg_collection: ProcessGroupCollection, **_: object
    ) -> None:
        super().__init__(config)
        self._block, self.tp_group = block, pg_collection.tp
        options: dict[str, Any] = {"config": config, "init_method": config.init_method, "bias": False}
        options["tp_group"] = tp = pg_collection.tp

        def by_head(rows: int) -> ColumnParallelLinear:
            return ColumnParallelLinear(block.hidden_size, rows, gather_output=False, **options)

        def vector() -> torch.nn.Parameter:
            return torch.nn.Parameter(torch.empty(block.num_v_heads // tp.size(), dtype=config.params_dtype))

        self.in_proj = by_head(block.channels + block.value_dim)
        self.in_proj_ba = by_head(2 * block.num_v_heads)
        self.conv1d = ShortConvolution(config, block.channels // tp.size(), block.conv_width)
        self.A_log, self.dt_bias = vector(), vector()
        # All heads share its weight: each rank has a part of its gradient.
        self.norm = RMSNorm(config, block.head_v_dim, config.layernorm_epsilon)
        self.out_proj = RowParallelLinear(
            block.value_dim, block.hidden_size, input_is_parallel=True, skip_bias_add=True, **options
        )

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None, *, packed_seq_params: PackedTokens, **_: Any
    ) -> tuple[Tensor, None]:
        """`hidden_states` (S / tp, 1, hidden) with sequence parallelism, else (S, 1, hidden) -> the same shape."""
        mixed, gates = (layer(hidden_states)[0].squeeze(1) for layer in (self.in_proj, self.in_proj_ba))
        assert packed_seq_params.cu_seqlens_q is not None  # without context parallelism
        lengths = packed_seq_params.cu_seqlens_q.diff().tolist()
        tokens, size = sum(lengths), len(mixed)
        weights = MixingWeights(self.conv1d.weight, self.A_log, self.dt_bias, self.norm.weight)
        output, _states = mix(self._block, weights, self.norm.eps, mixed[:tokens], gates[:tokens], lengths)
        if tokens < size:
            output = pad(output, (0, 0, 0, size - tokens))
        return self.out_proj(output.unsqueeze(1))[0], None

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        assert metadata is not None
        group = metadata["dp_cp_group"]
        own = {"conv1d.weight": self.conv1d.weight, "A_log": self.A_log, "dt_bias": self.dt_bias}
        axes = dict.fromkeys(own, 0)
        own["norm.weight"] = self.norm.weight
        found: dict[str, Any] = make_sharded_tensors_for_checkpoint(
            own, prefix, axes, sharded_offsets, tp_group=self.tp_group, dp_cp_group=group
        )
        for name in ("in_proj", "in_proj_ba", "out_proj"):
            found |= sharded_state_dict_default(
                getattr(self, name), f"{prefix}{name}.", sharded_offsets, metadata, tp_group=self.tp_group
            )
        return found


class ShortConvolution(torch.nn.Module):
    """The weight of a convolution of each channel, in the shape of `torch.nn.Conv1d`."""

    def __init__(self, config: TransformerConfig, channels: int, width: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(channels, 1, width, dtype=config.params_dtype))


def gated_delta_net(block: GatedDelta) -> ModuleSpec:
    """Return the spec of `self_attention` in megatron's local layer."""
    return ModuleSpec(module=GatedDeltaNet, params={"block": block})


class GatedDeltaStep:
    """The gated delta net in rollout: prompts, parts of them, and single tokens."""

    def __init__(self, block: GatedDelta, weight: Callable[[str], Tensor], linear: Linear, eps: float) -> None:
        def of(name: str) -> Tensor:
            return weight(f"self_attention.{name}")

        self._block, self._linear, self._eps = block, linear, eps
        self._in, self._gates, self._out = (of(f"{name}.weight") for name in ("in_proj", "in_proj_ba", "out_proj"))
        self._weights = MixingWeights(of("conv1d.weight"), of("A_log"), of("dt_bias"), of("norm.weight"))

    def __call__(self, layer: int, x: Tensor, attention: CachedAttention, rotate: Rotation) -> Tensor:
        """Map x (n, hidden) to this rank's part of the output (n, hidden)."""
        window, state = attention.states(layer)
        lengths = attention.lengths()
        if lengths is not None and max(lengths) == 1:
            lengths = None
        products = self._linear(x, self._in), self._linear(x, self._gates)
        output, states = mix(self._block, self._weights, self._eps, *products, lengths, (window, state))
        attention.save_states(layer, tuple(each.float() for each in states))
        return self._linear(output, self._out)

    def store(self, layer: int, x: Tensor, attention: CachedAttention, rotate: Rotation) -> None:
        """Write the states only."""
        self(layer, x, attention, rotate)
