"""Muon (Jordan et al. 2024, kellerjordan.github.io/posts/muon) for the matrices of the layers, AdamW for all else.

The scale is that of Liu et al. 2025 (arXiv:2502.16982, equation 4 and algorithm 1): the update of a matrix has the root
mean square that AdamW's usually has, so that AdamW's learning rate and weight decay are right for it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hpcrl.algorithms.optimizers.adamw import MOMENTS, Betas, adamw_step
from hpcrl.algorithms.optimizers.optimizer import Groups, Optimizer, States, WholeMatrices, register_optimizer
from hpcrl.algorithms.parameters import param, torch

if TYPE_CHECKING:
    from torch import Tensor

QUINTIC = (3.4445, -4.7750, 2.0315)  # Jordan et al.'s: singular values end between 0.7 and 1.2
RMS = 0.2  # of an update's elements, about that of AdamW's (Liu et al., section 2.2)


@dataclass(frozen=True)
class MuonParameters(Betas):
    muon_momentum: float = param(0.95, ge=0, lt=1, help="momentum of Muon's matrices")
    muon_use_nesterov: bool = param(True, help="Muon: Nesterov's momentum")
    muon_num_ns_steps: int = param(5, ge=1, help="Muon: Newton-Schulz iterations")


@register_optimizer("muon", params=MuonParameters)
class Muon(Optimizer):
    without_adapters = "Muon of a low-rank factor is not Muon of the matrix; use optimizer=adam, or lora_rank=0"
    params: MuonParameters

    def state(self, *, is_matrix: bool) -> dict[str, str]:
        return dict.fromkeys(("momentum_buffer",) if is_matrix else MOMENTS, "float32")

    def step(self, groups: Groups, state: States, matrices: WholeMatrices) -> None:
        of_layers = [[weight for weight in group["params"] if weight in matrices] for group in groups]
        directions: dict[Tensor, Tensor] = {}
        for group, weights in zip(groups, of_layers, strict=True):
            others = [weight for weight in group["params"] if weight not in matrices]
            adamw_step(others, state, self.params, group["lr"], group["weight_decay"])
            if weights:
                directions |= zip(weights, self._directions(weights, state), strict=True)
        updates = matrices.apply(self.update_of, directions)
        for group, weights in zip(groups, of_layers, strict=True):
            if weights:
                torch._foreach_mul_(weights, 1.0 - group["lr"] * group["weight_decay"])
                torch._foreach_add_(weights, [updates[weight] for weight in weights], alpha=-group["lr"])

    def _directions(self, weights: Sequence[Tensor], state: States) -> Sequence[Tensor]:
        """Return what is orthogonalised, after gradients are added to the momentum: m = mu m + g; g + mu m or m."""
        gradients = [weight.grad for weight in weights if weight.grad is not None]
        momenta = [state[weight]["momentum_buffer"] for weight in weights]
        torch._foreach_add_([state[weight]["step"] for weight in weights], 1)
        torch._foreach_mul_(momenta, self.params.muon_momentum)
        torch._foreach_add_(momenta, gradients)
        if not self.params.muon_use_nesterov:
            return momenta
        return torch._foreach_add(gradients, momenta, alpha=self.params.muon_momentum)

    def update_of(self, matrix: Tensor) -> Tensor:
        """Return the update of a projection, fp32, per unit of the learning rate."""
        return orthogonalized(matrix, self.params.muon_num_ns_steps) * (RMS * math.sqrt(max(matrix.shape)))

    def operations(self, rows: int, cols: int) -> float:
        """Return those of three products in each iteration."""
        few, many = sorted((rows, cols))
        return self.params.muon_num_ns_steps * (4.0 * few**2 * many + 2.0 * few**3)


def orthogonalized(matrix: Tensor, steps: int) -> Tensor:
    """Return nearly U V^T of the matrix U S V^T, fp32, by Newton-Schulz iterations; 0 of a matrix of zeros.

    x = a x + (b x x^T + c (x x^T)^2) x, from the matrix over its Frobenius norm. In bf16 on GPUs, as in Jordan et al.,
    in fp32 on CPUs.

    Args:
        matrix: (rows, cols) fp32.
    """
    a, b, c = QUINTIC
    x = matrix / matrix.norm().clamp(min=torch.finfo(torch.float32).tiny)
    if is_tall := x.size(0) > x.size(1):
        x = x.T
    if x.is_cuda:
        x = x.bfloat16()
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.T if is_tall else x).float()
