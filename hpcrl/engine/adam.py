"""AdamW whose moments take fewer bytes than its weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

MOMENTS = ("exp_avg", "exp_avg_sq")
ELEMENTS_AT_ONCE = 2**24  # of parameters on a GPU: their two moments in fp32 take 128 MiB
ELEMENTS_IN_CACHE = 2**18  # of parameters on a CPU, which is slower outside its cache


class CompactAdam(torch.optim.AdamW):
    """Torch's AdamW, which computes in fp32, over moments that are kept in dtypes of their own and rounded to them, to
    the nearest, after each step. Gradients and weights are fp32.

    Transformer Engine's FusedAdam can do that, too, on CUDA alone; here every device gives the same numbers.
    """

    def __init__(
        self,
        params: Iterable[Any],
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        exp_avg_dtype: torch.dtype,
        exp_avg_sq_dtype: torch.dtype,
    ) -> None:
        super().__init__(params, lr=lr, betas=betas, eps=eps)
        self.dtypes = dict(zip(MOMENTS, (exp_avg_dtype, exp_avg_sq_dtype), strict=True))

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameters in batches([each for each in group["params"] if each.grad is not None]):
                states = [self.state[parameter] for parameter in parameters]
                moments = {name: [state[name] for state in states] for name in MOMENTS}
                in_fp32 = {name: as_fp32(tensors) for name, tensors in moments.items()}
                adamw(
                    parameters,
                    [parameter.grad for parameter in parameters if parameter.grad is not None],
                    in_fp32["exp_avg"],
                    in_fp32["exp_avg_sq"],
                    [],
                    [state["step"] for state in states],
                    fused=True,
                    amsgrad=False,
                    beta1=group["betas"][0],
                    beta2=group["betas"][1],
                    lr=group["lr"],
                    weight_decay=group["weight_decay"],
                    eps=group["eps"],
                    maximize=False,
                )
                for name, tensors in moments.items():
                    if in_fp32[name] is not tensors:
                        torch._foreach_copy_(tensors, in_fp32[name])

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Torch brings all state to the parameters' dtype."""
        super().load_state_dict(state_dict)
        for state in self.state.values():
            for name, dtype in self.dtypes.items():
                state[name] = state[name].to(dtype)


def batches(tensors: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Successive tensors of ELEMENTS_AT_ONCE or ELEMENTS_IN_CACHE elements in all, or one that is larger."""
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
    """Copies in fp32, or the tensors themselves where they are fp32."""
    if all(tensor.dtype is torch.float32 for tensor in tensors):
        return tensors
    copies = [torch.empty_like(tensor, dtype=torch.float32) for tensor in tensors]
    torch._foreach_copy_(copies, tensors)
    return copies
