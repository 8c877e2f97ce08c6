"""AdamW whose moments take fewer bytes than its weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim.adamw import adamw

MOMENTS = ("exp_avg", "exp_avg_sq")


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
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                exp_avg, exp_avg_sq = (state[name].float() for name in MOMENTS)
                adamw(
                    [parameter],
                    [parameter.grad],
                    [exp_avg],
                    [exp_avg_sq],
                    [],
                    [state["step"]],
                    fused=True,
                    amsgrad=False,
                    beta1=group["betas"][0],
                    beta2=group["betas"][1],
                    lr=group["lr"],
                    weight_decay=group["weight_decay"],
                    eps=group["eps"],
                    maximize=False,
                )
                state["exp_avg"].copy_(exp_avg)
                state["exp_avg_sq"].copy_(exp_avg_sq)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Torch brings all state to the parameters' dtype."""
        super().load_state_dict(state_dict)
        for state in self.state.values():
            for name, dtype in self.dtypes.items():
                state[name] = state[name].to(dtype)
