"""Entropy from logits."""

from __future__ import annotations

import math

import torch

from hpcrl.algorithms.entropy import entropy_from_logits


def test_known_entropies():
    logits = torch.tensor([[0.0, 0.0, 0.0, 0.0], [100.0, 0.0, 0.0, 0.0], [math.log(3.0), 0.0, -1e4, -1e4]])
    expected = [math.log(4), 0.0, -(0.75 * math.log(0.75) + 0.25 * math.log(0.25))]
    assert torch.allclose(entropy_from_logits(logits), torch.tensor(expected), atol=1e-5)


def test_against_the_definition():
    logits = torch.randn(2, 3, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 4
    p = logits.softmax(-1)
    assert torch.allclose(entropy_from_logits(logits), -(p * p.log()).sum(-1))
    assert torch.allclose(entropy_from_logits(logits + 500.0), entropy_from_logits(logits))
