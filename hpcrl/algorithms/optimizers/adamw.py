"""AdamW (Loshchilov and Hutter 2019, arXiv:1711.05101), with moments in fp32 or bf16."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal

from hpcrl.algorithms.optimizers.optimizer import Groups, Optimizer, States, WholeMatrices, register_optimizer
from hpcrl.algorithms.parameters import param, torch

if TYPE_CHECKING:
    from torch import Tensor

MOMENTS = ("exp_avg", "exp_avg_sq")
ELEMENTS_AT_ONCE = 2**24  # of weights on a GPU: their two moments in fp32 take 128 MiB
ELEMENTS_IN_CACHE = 2**18  # of weights on a CPU, which is slower outside its cache


@dataclass(frozen=True)
class Betas:
    betas: list[float] = param([0.9, 0.999], ge=0, lt=1, length=2, help="Adam's decay rates")
    eps: float = param(1e-8, gt=0, help="Adam's epsilon")


@dataclass(frozen=True)
class AdamParameters(Betas):
    exp_avg_dtype: Literal["float32", "bfloat16"] = param("float32", help="dtype that keeps Adam's first moment")
    exp_avg_sq_dtype: Literal["float32", "bfloat16"] = param("float32", help="the same of its second moment")

    def __post_init__(self) -> None:
        """Raise ValueError for a moment that cannot decay: one that shrinks by less than half of bf16's spacing, 1 in
        2^8, is rounded back to what it was."""
        for name, beta in zip(MOMENTS, self.betas, strict=True):
            if getattr(self, f"{name}_dtype") == "bfloat16" and 1 - beta <= 2**-8:
                raise ValueError(
                    f"{name}_dtype=float32 beside a decay of {beta}: bfloat16 can follow decays up to 0.996"
                )


@register_optimizer("adam", params=AdamParameters)
class Adam(Optimizer):
    """Torch's AdamW, or Apex's fused one if it is installed; with other moments, AdamW in fp32 on every device."""

    params: AdamParameters

    def state(self, *, is_matrix: bool) -> dict[str, str]:
        return {name: getattr(self.params, f"{name}_dtype") for name in MOMENTS}

    def make(self, groups: Groups, matrices: WholeMatrices) -> torch.optim.Optimizer:
        if set(self.state(is_matrix=False).values()) != {"float32"}:
            return super().make(groups, matrices)
        options: dict[str, Any] = {"betas": tuple(self.params.betas), "eps": self.params.eps}
        fused = fused_adam()
        if fused is None:
            return torch.optim.AdamW(list(groups), fused=True, **options)
        return fused(list(groups), adam_w_mode=True, **options)

    def step(self, groups: Groups, state: States, matrices: WholeMatrices) -> None:
        for group in groups:
            adamw_step(group["params"], state, self.params, group["lr"], group["weight_decay"])


def adamw_step(weights: Sequence[Tensor], state: States, params: Betas, lr: float, weight_decay: float) -> None:
    """Update fp32 weights in place by torch's AdamW, computed in fp32, with moments rounded to nearest after the step.

    Args:
        state: by weight, "exp_avg" and "exp_avg_sq" of its shape in fp32 or bf16, and "step", () fp32.
    """
    from torch.optim.adamw import adamw

    for batch in batches([each for each in weights if each.grad is not None]):
        states = [state[weight] for weight in batch]
        moments = {name: [each[name] for each in states] for name in MOMENTS}
        in_fp32 = {name: as_fp32(tensors) for name, tensors in moments.items()}
        adamw(
            batch,
            [weight.grad for weight in batch if weight.grad is not None],
            in_fp32["exp_avg"],
            in_fp32["exp_avg_sq"],
            [],
            [each["step"] for each in states],
            fused=True,
            amsgrad=False,
            beta1=params.betas[0],
            beta2=params.betas[1],
            lr=lr,
            weight_decay=weight_decay,
            eps=params.eps,
            maximize=False,
        )
        for name, tensors in moments.items():
            if in_fp32[name] is not tensors:
                torch._foreach_copy_(tensors, in_fp32[name])


def batches(tensors: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Yield successive tensors of ELEMENTS_AT_ONCE or ELEMENTS_IN_CACHE elements in all, or one larger tensor."""
    batch: list[Tensor] = []
    elements = 0
    for tensor in tensors:
        most = ELEMENTS_IN_CACHE if tensor.device.type == "cpu" else ELEMENTS_AT_ONCE
        if batch and elements + tensor.numel() > most:
            yield batch
            batch, elements = [], 0
        batch.append(tensor)
        elements += tensor.numel()
    if batch:
        yield batch


def as_fp32(tensors: list[Tensor]) -> list[Tensor]:
    """Return copies in fp32, or the tensors themselves if they are fp32."""
    if all(tensor.dtype is torch.float32 for tensor in tensors):
        return tensors
    copies = [torch.empty_like(tensor, dtype=torch.float32) for tensor in tensors]
    torch._foreach_copy_(copies, tensors)
    return copies


def fused_adam() -> Any:
    """Return Apex's FusedAdam, which counts steps in its groups; None without Apex. Transformer Engine's, which was not
    compared with torch's, is not used."""
    try:
        return import_module("apex.optimizers").FusedAdam
    except (ImportError, AttributeError):
        return None
