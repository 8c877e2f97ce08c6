"""Muon against singular value decomposition, and one step by hand."""

from __future__ import annotations

import math

import pytest
import torch

from hpcrl.algorithms.optimizers.muon import Muon, MuonParameters, orthogonalized


class Whole(set):
    """Matrices that one process holds whole."""

    def apply(self, function, ranges):
        return {weight: function(tensor) for weight, tensor in ranges.items()}


@pytest.mark.parametrize("shape", [(48, 64), (64, 48), (5, 200), (1, 7), (33, 33)])
def test_singular_vectors_stay_and_singular_values_are_near_one(shape: tuple[int, int]) -> None:
    """Of those that are not far below the largest; Jordan et al. give 0.7 to 1.2 for five iterations."""
    generator = torch.Generator().manual_seed(0)
    matrix = torch.randn(shape, generator=generator) * 1e-4
    left, values, right = torch.linalg.svd(matrix, full_matrices=False)
    found = left.T @ orthogonalized(matrix, 5) @ right.T
    kept = found.diagonal()[values > 0.05 * values[0]]
    assert len(kept) >= 0.9 * min(shape) and kept.min() > 0.67 and kept.max() < 1.21
    assert (found - found.diagonal().diag()).abs().max() < 1e-4
    torch.testing.assert_close(orthogonalized(matrix, 5), orthogonalized(1e6 * matrix, 5), rtol=0, atol=1e-4)
    assert not orthogonalized(torch.zeros(shape), 5).any()


@pytest.mark.parametrize("nesterov", [True, False])
def test_two_steps_by_hand(nesterov: bool) -> None:
    chosen = Muon(MuonParameters(muon_momentum=0.9, muon_use_nesterov=nesterov, betas=[0.5, 0.5], eps=1e-12))
    matrix, vector = torch.nn.Parameter(torch.ones(2, 4)), torch.nn.Parameter(torch.ones(3))
    optimizer = chosen.make([{"params": [matrix, vector], "lr": 0.1, "weight_decay": 0.5}], Whole([matrix]))
    for weight in (matrix, vector):
        zeros = {name: torch.zeros_like(weight) for name in chosen.state(is_matrix=weight is matrix)}
        optimizer.state[weight] = {"step": torch.zeros(()), **zeros}
    momentum, expected = torch.zeros(2, 4), torch.ones(2, 4)
    for step in (1, 2):
        matrix.grad, vector.grad = torch.eye(2, 4) * step + 0.1, torch.full((3,), float(step))
        momentum = 0.9 * momentum + matrix.grad
        direction = matrix.grad + 0.9 * momentum if nesterov else momentum
        expected = expected * 0.95 - 0.1 * 0.2 * math.sqrt(4) * orthogonalized(direction, 5)
        optimizer.step()
        torch.testing.assert_close(matrix.detach(), expected)
        assert optimizer.state[matrix]["step"] == optimizer.state[vector]["step"] == step
    # AdamW: decay by 0.95, and a step of 0.1 against gradients that keep their sign; 10/9 of the mean of 1 and 2 ...
    first, second = (0.25 * 1 + 0.5 * 2) / 0.75, (0.25 * 1 + 0.5 * 4) / 0.75
    by_hand = (1.0 * 0.95 - 0.1) * 0.95 - 0.1 * first / math.sqrt(second)
    torch.testing.assert_close(vector.detach(), torch.full((3,), by_hand))


def test_operations_are_those_of_the_products() -> None:
    chosen = Muon(MuonParameters(muon_num_ns_steps=3))
    assert chosen.operations(10, 20) == chosen.operations(20, 10) == 3 * 2 * (10 * 20 * 10 + 10**3 + 10 * 10 * 20)
