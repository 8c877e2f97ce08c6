"""What recurrent blocks share: a layer of megatron, the step in rollout, a short convolution's weight."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint, sharded_state_dict_default
from torch import Tensor
from torch.nn.functional import pad

from hpcrl.model.blocks.attention_modules import CachedAttention, Linear, Rotation
from hpcrl.model.gpt import PackedTokens

if TYPE_CHECKING:
    from megatron.core.transformer import TransformerConfig

States: TypeAlias = tuple[Tensor, ...]  # as the `cached` of a block says
# Maps the products of a token with `projections` to the input of `out_proj`, and returns the states after the tokens;
# lengths: tokens of the packed sequences; None: one of each, without gradients. states: before them; None: 0.
Mix: TypeAlias = Callable[[Sequence[Tensor], Sequence[int] | None, States | None], tuple[Tensor, States | None]]


class RecurrentNet(MegatronModule):
    """A recurrent layer of megatron. Padding tokens belong to no sequence, and their output is 0.

    Subclasses have linear layers named `projections`, `out_proj`, and vectors, of which `whole` are not split by tensor
    parallelism.
    """

    projections: ClassVar[tuple[str, ...]]
    whole: ClassVar[tuple[str, ...]] = ()
    out_proj: RowParallelLinear

    def __init__(self, config: TransformerConfig, pg_collection: ProcessGroupCollection) -> None:
        super().__init__(config)
        self.tp_group = pg_collection.tp
        self._options: dict[str, Any] = {"config": config, "init_method": config.init_method, "bias": False}
        self._options["tp_group"] = pg_collection.tp

    def column_parallel(self, width: int, rows: int) -> ColumnParallelLinear:
        return ColumnParallelLinear(width, rows, gather_output=False, **self._options)

    def row_parallel(self, cols: int, width: int) -> RowParallelLinear:
        return RowParallelLinear(cols, width, input_is_parallel=True, skip_bias_add=True, **self._options)

    def vector(self, numbers: int) -> torch.nn.Parameter:
        """This rank's part of so many numbers."""
        return torch.nn.Parameter(torch.empty(numbers // self.tp_group.size(), dtype=self.config.params_dtype))

    @property
    def mix(self) -> Mix:
        raise NotImplementedError

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None, *, packed_seq_params: PackedTokens, **_: Any
    ) -> tuple[Tensor, None]:
        """`hidden_states` (S / tp, 1, hidden) with sequence parallelism, else (S, 1, hidden) -> the same shape."""
        products = [getattr(self, name)(hidden_states)[0].squeeze(1) for name in self.projections]
        lengths = packed_seq_params.lengths
        assert lengths is not None  # without context parallelism
        tokens, size = sum(lengths), len(products[0])
        output, _states = self.mix([product[:tokens] for product in products], lengths, None)
        if tokens < size:
            output = pad(output, (0, 0, 0, size - tokens))
        return self.out_proj(output.unsqueeze(1))[0], None

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        assert metadata is not None
        linear = *self.projections, "out_proj"
        groups = {"tp_group": self.tp_group, "dp_cp_group": metadata["dp_cp_group"]}
        own = {name: it for name, it in self.named_parameters() if name.rpartition(".")[0] not in linear}
        axes = {name: 0 for name in own if name not in self.whole}
        tensors: dict[str, Any] = make_sharded_tensors_for_checkpoint(own, prefix, axes, sharded_offsets, **groups)
        for name in linear:
            tensors |= sharded_state_dict_default(
                getattr(self, name), f"{prefix}{name}.", sharded_offsets, metadata, tp_group=self.tp_group
            )
        return tensors


class ShortConvolution(torch.nn.Module):
    """The parameters of a convolution of each channel, in the shapes of `torch.nn.Conv1d`."""

    bias: torch.nn.Parameter | None

    def __init__(self, config: TransformerConfig, channels: int, width: int, *, has_bias: bool = False) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(channels, 1, width, dtype=config.params_dtype))
        bias = torch.nn.Parameter(torch.empty(channels, dtype=config.params_dtype)) if has_bias else None
        self.register_parameter("bias", bias)


class RecurrentStep:
    """A recurrent layer in rollout: prompts, parts of them, and single tokens.

    Args:
        projections: weights of the linear layers of its input.
    """

    def __init__(self, projections: Sequence[Tensor], out_proj: Tensor, linear: Linear, mix: Mix) -> None:
        self._projections, self._out, self._linear, self._mix = projections, out_proj, linear, mix

    def __call__(self, layer: int, x: Tensor, attention: CachedAttention, rotate: Rotation) -> Tensor:
        """Map x (n, hidden) to this rank's part of the output (n, hidden)."""
        lengths = attention.lengths()
        if lengths is not None and max(lengths) == 1:
            lengths = None
        products = [self._linear(x, weight) for weight in self._projections]
        output, states = self._mix(products, lengths, attention.states(layer))
        assert states is not None
        attention.save_states(layer, tuple(each.float() for each in states))
        return self._linear(output, self._out)

    def store(self, layer: int, x: Tensor, attention: CachedAttention, rotate: Rotation) -> None:
        """Write the states only."""
        self(layer, x, attention, rotate)
