"""Modules of megatron's layer spec: RMSNorm, activations, parallel linear layers in exact mode, scalar heads."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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
from torch.nn.functional import softplus

from hpcrl.kernels.layers import add_rms_norm, rms_norm, swiglu
from hpcrl.model.blocks.feed_forward import XIELU
from hpcrl.model.exact import exact_linear, exact_sum
from hpcrl.runtime.megatron_versions import mlp_submodules

if TYPE_CHECKING:
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_layer import TransformerLayer
    from torch.distributed import ProcessGroup

    from hpcrl.model.blocks.block import Half
    from hpcrl.model.blocks.feed_forward import Activation as ActivationName


def mark(parameter: Tensor, **marks: bool) -> None:
    """Set attributes of a parameter that megatron reads."""
    for name, value in marks.items():
        setattr(parameter, name, value)


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
        mark(self.weight, sequence_parallel=config.sequence_parallel)

    def forward(self, hidden_states: Tensor) -> Tensor:
        return rms_norm(hidden_states, norm_factor(self.weight, self.zero_centered), self.eps)


class ZeroCenteredRMSNorm(RMSNorm):
    zero_centered = True


class SplitModule(torch.nn.Module):
    """A module whose parameters the ranks of `tp_group` split along `split_axes`, by name; the others are whole."""

    tp_group: ProcessGroup | None
    split_axes: Mapping[str, int] = {}

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Return the parameters for a checkpoint, as megatron's linear layers do."""
        assert metadata is not None
        groups = {"tp_group": self.tp_group, "dp_cp_group": metadata["dp_cp_group"]}
        state = self.state_dict(keep_vars=True)
        if not state:
            return {}
        return make_sharded_tensors_for_checkpoint(state, prefix, self.split_axes, sharded_offsets, **groups)


class SplitRMSNorm(SplitModule):
    """RMSNorm of all heads together, `width` numbers of a token, which the ranks of `tp_group` divide; subclasses
    have these."""

    width: int
    tp_group: ProcessGroup
    split_axes = {"weight": 0}
    zero_centered = False

    def __init__(self, config: TransformerConfig, eps: float, **_: object) -> None:
        super().__init__()
        self._eps = eps
        self.weight = torch.nn.Parameter(torch.empty(self.width // self.tp_group.size(), dtype=config.params_dtype))

    def forward(self, heads: Tensor) -> Tensor:
        """(..., heads of this rank, head_dim) -> the same shape."""

        def total(squares: Tensor) -> Tensor:
            # Each rank's output depends on all squares, so their gradient is a sum over ranks, too.
            summed = reduce_from_tensor_model_parallel_region(squares, group=self.tp_group)
            return copy_to_tensor_model_parallel_region(summed, group=self.tp_group)

        weight = norm_factor(self.weight, self.zero_centered)
        return split_rms_norm(heads.flatten(-2), weight, self._eps, self.width, total).view(heads.shape)


def split_rms_norm(x: Tensor, weight: Tensor, eps: float, width: int, total: Callable[[Tensor], Tensor]) -> Tensor:
    """Return RMSNorm over `width` numbers, of which `x` (..., width of this rank) has a part.

    Args:
        total: returns the sum over the ranks.
    """
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


def with_output_norms(
    layer_class: type[TransformerLayer], norm_module: type[RMSNorm], halves: Sequence[Half]
) -> type[TransformerLayer]:
    """Return a class of layers with norms of the outputs of attention and MLP, of `halves` that the layers have."""

    class Normed(layer_class):  # type: ignore[misc, valid-type]
        def __init__(self, config: TransformerConfig, *args: Any, **kwargs: Any) -> None:
            super().__init__(config, *args, **kwargs)
            for name in halves:
                module = self.self_attention if name == "attention" else self.mlp
                norm = norm_module(config, config.hidden_size, config.layernorm_epsilon)
                self.add_module(f"post_{name}_layernorm", norm)
                module.register_forward_hook(partial(_normed, norm))

    return Normed


def _normed(
    norm: RMSNorm, module: torch.nn.Module, inputs: Any, output: tuple[Tensor, Tensor | None]
) -> tuple[Tensor, None]:
    product, bias = output
    return norm(plus(product, bias)), None


def embedding_factor(scale: float, like: Tensor) -> Tensor:
    """Return the factor of embeddings, rounded to their dtype, as the models that have one were trained."""
    return torch.full((), scale, dtype=like.dtype, device=like.device)


def activate(
    x: Tensor, activation: ActivationName, is_gated: bool, *numbers: Any, weights: Tensor | None = None
) -> Tensor:
    """Return f(gate) * up of `x` (..., 2 m) = [gate, up], or without a gate f of `x` (..., m): (..., m), times
    `weights` (...) fp32.

    gelu_tanh: GELU by its approximation with tanh (Hendrycks and Gimpel 2016, arXiv:1606.08415, section 2). relu2: the
    square of ReLU (So et al. 2021, arXiv:2109.08668, section 4). xielu: see `_XIELU`; its `numbers` are alpha_p and
    alpha_n, (1,) each. clamped_swiglu: gate sigmoid(alpha gate) (up + 1), with the gate at most `limit` and up between
    -limit and limit (Agarwal et al. 2025, arXiv:2508.10925, section 2.2); its `numbers` are alpha and limit.
    """
    if activation == "silu" and is_gated:
        return swiglu(x, weights)
    if weights is not None:
        return (activate(x, activation, is_gated, *numbers) * weights.unsqueeze(-1)).to(x.dtype)
    if activation == "clamped_swiglu":
        (alpha, limit), (gate, linear) = numbers, x.chunk(2, dim=-1)
        gate = gate.clamp(max=limit)
        return gate * torch.sigmoid(gate * alpha) * (linear.clamp(-limit, limit) + 1)
    of_gate, up = x.chunk(2, dim=-1) if is_gated else (x, None)
    if activation == "silu":
        active = torch.nn.functional.silu(of_gate)
    elif activation == "gelu_tanh":
        active = torch.nn.functional.gelu(of_gate, approximate="tanh")
    elif activation == "relu2":
        active = torch.nn.functional.relu(of_gate).square()
    else:
        active = _XIELU.apply(of_gate, *numbers)
    return active if up is None else active * up


class _XIELU(torch.autograd.Function):
    """xIELU (Huang 2024, arXiv:2411.13010, eq. 8): alpha_p x^2 + beta x above 0, alpha_n (exp(x) - 1 - x) + beta x
    elsewhere, with alpha_p = softplus(p), alpha_n = beta + softplus(n), beta = 0.5. It keeps x only."""

    BETA, LEAST = 0.5, -1e-6  # exp(x) - 1 is computed of numbers up to LEAST

    @staticmethod
    def forward(ctx: Any, x: Tensor, p: Tensor, n: Tensor) -> Tensor:
        ctx.save_for_backward(x, p, n)
        above, below = softplus(p), _XIELU.BETA + softplus(n)
        negative = (torch.expm1(x.clamp(max=_XIELU.LEAST)) - x) * below
        return torch.where(x > 0, above * x * x, negative) + _XIELU.BETA * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x, p, n = ctx.saved_tensors
        above, below = softplus(p), _XIELU.BETA + softplus(n)
        is_above, growth = x > 0, torch.expm1(x.clamp(max=_XIELU.LEAST))
        of_x = grad * (torch.where(is_above, 2 * above * x, below * growth) + _XIELU.BETA)
        squares = torch.where(is_above, grad * x * x, 0.0).sum(dtype=torch.float32)
        others = torch.where(is_above, 0.0, grad * (growth - x)).sum(dtype=torch.float32)
        return of_x, (squares * p.float().sigmoid()).to(p.dtype), (others * n.float().sigmoid()).to(n.dtype)


class Activation(SplitModule):
    """The activation of an MLP. Subclasses have a name, its constants, and the tensor-parallel ranks `tp_group`."""

    name: ActivationName
    is_gated: bool
    tp_group: ProcessGroup
    constants: tuple[float, ...] = ()

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        for number in XIELU if self.name == "xielu" else ():
            self.register_parameter(number, torch.nn.Parameter(torch.empty(1, dtype=config.params_dtype)))

    def forward(self, x: Tensor) -> Tensor:
        # Each rank has the gradient of its columns.
        numbers = [copy_to_tensor_model_parallel_region(number, group=self.tp_group) for number in self.parameters()]
        return activate(x, self.name, self.is_gated, *self.constants, *numbers)


class FeedForwardStep:
    """A feed-forward network in rollout."""

    num_chosen = 0
    needs_host = False

    def __init__(
        self,
        fc1: Tensor,
        fc2: Tensor,
        linear: Callable[[Tensor, Tensor], Tensor],
        activate: Callable[[Tensor], Tensor],
    ) -> None:
        self._fc1, self._fc2, self._linear, self._activate = fc1, fc2, linear, activate

    def __call__(self, x: Tensor, chosen: list[Tensor] | None = None) -> Tensor:
        """Map x (n, hidden) to this rank's part of the output (n, hidden)."""
        return self._linear(self._activate(self._linear(x, self._fc1)), self._fc2)


def plus(product: Tensor, bias: Tensor | None) -> Tensor:
    return product if bias is None else product + bias


def use_activation(
    spec: ModuleSpec, name: ActivationName, is_gated: bool, group: ProcessGroup, constants: tuple[float, ...] = ()
) -> None:
    """Set the activation in all networks of a layer's MLP, in place.

    Args:
        group: the tensor-parallel ranks.
    """
    options = {"name": name, "is_gated": is_gated, "tp_group": group, "constants": constants}
    for mlp in mlp_submodules(spec):
        mlp.activation_func = type(name, (Activation,), options)


class BiasedColumnParallel(ColumnParallelLinear):
    """Has a bias; megatron's config would give one to the linear layers of all blocks."""

    def __init__(self, *args: Any, bias: bool, **options: Any) -> None:
        super().__init__(*args, bias=True, **options)


class BiasedRowParallel(RowParallelLinear):
    """Has a bias, which the caller adds to the sum over ranks."""

    def __init__(self, *args: Any, bias: bool, **options: Any) -> None:
        super().__init__(*args, bias=True, **options)


class BiasedExpertOutput(BiasedRowParallel):
    """Weights of an expert's second layer. All ranks that divide it have the gradient of its bias."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        mark(self.bias, sequence_parallel=False)


def use_exact_linear(model: torch.nn.Module) -> None:
    """Make every parallel linear layer of `model` (without sequence parallelism) compute by `exact_linear`; logits are
    fp32."""
    for name, module in model.named_modules():
        if isinstance(module, ColumnParallelLinear):
            dtype = torch.float32 if name == "output_layer" else None
            module._forward_impl = partial(_column_product, module, dtype)
        elif isinstance(module, RowParallelLinear):
            module.forward = partial(_row_parallel, module)
        if getattr(module, "gradient_accumulation_fusion", False) and isinstance(module.weight, Tensor):
            mark(module.weight, sums_in_fp32=True)


def _column_product(
    layer: ColumnParallelLinear,
    dtype: torch.dtype | None,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    **options: Any,
) -> Tensor:
    if options["allreduce_dgrad"]:  # megatron sums the input's gradient over ranks in the product's backward pass
        input = copy_to_tensor_model_parallel_region(input, group=layer.tp_group)
    product = exact_linear(input, weight, dtype)
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
