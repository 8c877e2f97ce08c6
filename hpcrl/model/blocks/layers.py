"""Modules of megatron's layer spec: RMSNorm, SwiGLU, parallel linear layers in exact mode, scalar heads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor

from hpcrl.kernels.layers import add_rms_norm, rms_norm, swiglu
from hpcrl.model.exact import exact_linear, exact_sum
from hpcrl.runtime.megatron_versions import mlp_submodules

if TYPE_CHECKING:
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_layer import TransformerLayer
    from torch.distributed import ProcessGroup


LATENT_NORM_EPS = 1e-6  # of latents, in all models, independent of the other norms' eps


class RMSNorm(torch.nn.Module):
    """RMSNorm with megatron's interface; megatron's own torch wrapper does not support sequence parallelism.

    The native rollout engine calls the same function, so that log-probs agree.
    """

    zero_centered = False  # see `hpcrl.model.blocks.norms.Norms`

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: object) -> None:
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.empty(hidden_size, dtype=config.params_dtype))
        # Megatron sums the gradients of parameters with this mark over the tensor-parallel ranks.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, hidden_states: Tensor) -> Tensor:
        return rms_norm(hidden_states, norm_factor(self.weight, self.zero_centered), self.eps)


class ZeroCenteredRMSNorm(RMSNorm):
    zero_centered = True


class SplitRMSNorm(torch.nn.Module):
    """RMSNorm of all heads together, `width` numbers of a token, which the ranks of `group` divide."""

    def __init__(
        self,
        *,
        config: TransformerConfig,
        width: int,
        group: ProcessGroup,
        zero_centered: bool,
        eps: float,
        **_: object,
    ) -> None:
        super().__init__()
        self._width, self._group, self._eps, self._zero_centered = width, group, eps, zero_centered
        self.weight = torch.nn.Parameter(torch.empty(width // group.size(), dtype=config.params_dtype))

    def forward(self, heads: Tensor) -> Tensor:
        """(..., heads of this rank, head_dim) -> the same shape."""

        def total(squares: Tensor) -> Tensor:
            # Each rank's output depends on all squares, so their gradient is a sum over ranks, too.
            summed = reduce_from_tensor_model_parallel_region(squares, group=self._group)
            return copy_to_tensor_model_parallel_region(summed, group=self._group)

        weight = norm_factor(self.weight, self._zero_centered)
        return split_rms_norm(heads.flatten(-2), weight, self._eps, self._width, total).view(heads.shape)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Same as in megatron's linear layers."""
        assert metadata is not None
        groups = {"tp_group": self._group, "dp_cp_group": metadata["dp_cp_group"]}
        state = self.state_dict(keep_vars=True)
        return make_sharded_tensors_for_checkpoint(state, prefix, {"weight": 0}, sharded_offsets, **groups)


def split_rms_norm(x: Tensor, weight: Tensor, eps: float, width: int, total: Callable[[Tensor], Tensor]) -> Tensor:
    """Return RMSNorm over `width` numbers, of which `x` (..., width of this rank) has a part. total: the sum over the
    ranks."""
    x32 = x.float()
    squares = total(x32.square().sum(-1, keepdim=True))
    return (weight * (x32 * torch.rsqrt(squares / width + eps)).to(x.dtype)).to(x.dtype)


def norm_factor(weight: Tensor, zero_centered: bool) -> Tensor:
    """Return the factor of a normalised input: the weight w, or 1 + w in fp32."""
    return weight.float() + 1.0 if zero_centered else weight


@dataclass(frozen=True)
class NormStep:
    """RMSNorm in rollout. The weight may change between calls."""

    weight: Tensor
    eps: float
    zero_centered: bool = False

    def __call__(self, x: Tensor) -> Tensor:
        return rms_norm(x, norm_factor(self.weight, self.zero_centered), self.eps)

    def after_sum(self, x: Tensor, residual: Tensor) -> Tensor:
        """Add `x` to `residual` in place, and return the norm of the sum."""
        return add_rms_norm(x, residual, norm_factor(self.weight, self.zero_centered), self.eps)


def with_output_norms(layer_class: type[TransformerLayer], norm_module: type[RMSNorm]) -> type[TransformerLayer]:
    """Return a class of layers with norms of the outputs of attention and MLP."""

    class Normed(layer_class):  # type: ignore[misc, valid-type]
        def __init__(self, config: TransformerConfig, *args: Any, **kwargs: Any) -> None:
            super().__init__(config, *args, **kwargs)
            for name, module in (("attention", self.self_attention), ("mlp", self.mlp)):
                norm = norm_module(config, config.hidden_size, config.layernorm_epsilon)
                self.add_module(f"post_{name}_layernorm", norm)
                module.register_forward_hook(partial(_normed, norm))

    return Normed


def _normed(norm: RMSNorm, module: torch.nn.Module, inputs: Any, output: tuple[Tensor, None]) -> tuple[Tensor, None]:
    return norm(output[0]), None


class SwiGLU(torch.nn.Module):
    def __init__(self, config: object) -> None:
        super().__init__()

    def forward(self, x: Tensor) -> Tensor:
        return swiglu(x)

    def sharded_state_dict(self, *_: object, **__: object) -> dict[str, Any]:
        """Empty; megatron's MLP calls it on each of its modules."""
        return {}


class FeedForwardStep:
    """The SwiGLU network in rollout."""

    num_chosen = 0

    def __init__(self, fc1: Tensor, fc2: Tensor, linear: Callable[[Tensor, Tensor], Tensor]) -> None:
        self._fc1, self._fc2, self._linear = fc1, fc2, linear

    def __call__(self, x: Tensor, chosen: list[Tensor] | None = None) -> Tensor:
        """Map x (n, hidden) to this rank's part of the output (n, hidden)."""
        return self._linear(swiglu(self._linear(x, self._fc1)), self._fc2)


def use_swiglu(spec: ModuleSpec) -> None:
    """Set the activation in all networks of a layer's MLP, in place."""
    for mlp in mlp_submodules(spec):
        mlp.activation_func = SwiGLU


def use_exact_linear(model: torch.nn.Module) -> None:
    """Make every parallel linear layer of `model` (without sequence parallelism) compute by `exact_linear`."""
    for module in model.modules():
        if isinstance(module, ColumnParallelLinear):
            module._forward_impl = partial(_column_product, module)
        elif isinstance(module, RowParallelLinear):
            module.forward = partial(_row_parallel, module)


def _column_product(
    layer: ColumnParallelLinear, input: Tensor, weight: Tensor, bias: Tensor | None = None, **options: Any
) -> Tensor:
    if options["allreduce_dgrad"]:  # megatron sums the input's gradient over ranks in the product's backward pass
        input = copy_to_tensor_model_parallel_region(input, group=layer.tp_group)
    product = exact_linear(input, weight)
    return product if bias is None else product + bias


def _row_parallel(layer: RowParallelLinear, input: Tensor) -> tuple[Tensor, None]:
    return _SumOverRanks.apply(exact_linear(input, layer.weight), layer.tp_group), None


class _SumOverRanks(torch.autograd.Function):
    """Sum over ranks; all ranks must use the result alike, so the gradient of each part is that of the sum."""

    @staticmethod
    def forward(ctx: Any, partial: Tensor, group: torch.distributed.ProcessGroup) -> Tensor:
        return exact_sum(partial, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class ScalarHead(torch.nn.Module):
    """One number per token: a linear layer without bias, in fp32, whole on every tensor-parallel rank.

    A critic's value or a reward model's score. Its weight starts at 0, so that a new critic's values and a new reward
    model's scores are 0.
    """

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1, hidden_size, dtype=torch.float32))

    def forward(self, hidden_states: Tensor, weight: None = None, **_: object) -> tuple[Tensor, None]:
        """(..., hidden_size) -> (..., 1) fp32, and no bias: the signature of megatron's output layer."""
        return torch.nn.functional.linear(hidden_states.float(), self.weight), None
