"""Stochastic gradient descent with momentum, as torch has it; every replica holds all of its state."""

from __future__ import annotations

from dataclasses import dataclass

from hpcrl.algorithms.optimizers.optimizer import Groups, Optimizer, WholeMatrices, register_optimizer
from hpcrl.algorithms.parameters import param, torch


@dataclass(frozen=True)
class SgdParameters:
    momentum: float = param(0.0, ge=0, le=1, help="momentum of SGD")


@register_optimizer("sgd", params=SgdParameters)
class Sgd(Optimizer):
    is_sharded = False
    params: SgdParameters

    def state(self, *, is_matrix: bool) -> dict[str, str]:
        return {"momentum_buffer": "float32"} if self.params.momentum else {}

    def make(self, groups: Groups, matrices: WholeMatrices) -> torch.optim.Optimizer:
        return torch.optim.SGD(list(groups), momentum=self.params.momentum)
