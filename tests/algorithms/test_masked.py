"""Masked means and whitening."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hpcrl.algorithms.aggregation import finite_outside, masked_mean, masked_whiten
from tests.algorithms.replicas import on_replicas


def test_masked_mean_has_its_epsilon_and_ignores_padding():
    x = torch.tensor([[1.0, 3.0, math.nan], [5.0, math.inf, 7.0]], dtype=torch.float64)
    mask = torch.tensor([[1, 1, 0], [0, 0, 0]])
    assert masked_mean(x, mask).item() == pytest.approx(4 / (2 + 1e-8))
    assert masked_mean(x, mask.double(), dim=-1).tolist() == pytest.approx([4 / (2 + 1e-8), 0.0])


def test_whiten_by_hand():
    x = torch.tensor([[1.0, 2.0, 100.0], [6.0, -100.0, 0.0]], dtype=torch.float64)
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    scale = 1 / math.sqrt(7 + 1e-8)  # mean 3, squares 4 + 1 + 9 = 14, over 3 - 1
    expected = [[-2 * scale, -scale, 97 * scale], [3 * scale, -103 * scale, -3 * scale]]  # masked ones move along
    torch.testing.assert_close(masked_whiten(x, mask), torch.tensor(expected, dtype=torch.float64))


def test_whiten_ignores_garbage():
    x = torch.tensor([[1.0, 2.0, math.nan], [6.0, math.inf, 0.0]])
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    valid = mask.bool()
    assert torch.equal(masked_whiten(x, mask)[valid], masked_whiten(x.masked_fill(~valid, 0.0), mask)[valid])
    kept = finite_outside(x, mask)
    assert torch.equal(kept, torch.tensor([[1.0, 2.0, 0.0], [6.0, 0.0, 0.0]])) and x.isnan().any()


def test_whiten_of_one_token_or_none_is_zero():
    assert masked_whiten(torch.tensor([[5.0]]), torch.ones(1, 1)).tolist() == [[0.0]]
    assert masked_whiten(torch.ones(2, 2), torch.zeros(2, 2)).tolist() == [[0.0, 0.0], [0.0, 0.0]]
    assert masked_whiten(torch.zeros(0, 0), torch.zeros(0, 0)).shape == (0, 0)


def test_a_fractional_mask_weighs():
    x, mask = torch.randn(4, 100, dtype=torch.float64), torch.rand(4, 100, dtype=torch.float64)
    n, mean = mask.sum(), (x * mask).sum() / mask.sum()
    variance = ((x - mean).square() * mask).sum() / (n - 1)
    torch.testing.assert_close(masked_whiten(x, mask), (x - mean) * torch.rsqrt(variance + 1e-8))


def test_whiten_survives_a_far_mean():
    x = (torch.arange(8, dtype=torch.float64) + 1e6).reshape(2, 4)
    white = masked_whiten(x, torch.ones(2, 4))
    assert white.mean().abs() < 1e-9 and white.flatten().var() == pytest.approx(1.0)


@given(st.integers(0, 2**31), st.integers(1, 5), st.integers(0, 12))
def test_whiten_over_replicas_is_whiten_of_the_whole(seed, replicas, size):
    rng = np.random.default_rng(seed)
    x = torch.tensor(rng.normal(3, 2, (size, 6)), dtype=torch.float32)
    mask = torch.tensor(rng.integers(0, 2, (size, 6)), dtype=torch.int32)
    owner = torch.tensor(rng.integers(0, replicas, size))
    parts = on_replicas(replicas, lambda r, reduce: masked_whiten(x[owner == r], mask[owner == r], reduce))
    whole = masked_whiten(x, mask)
    for replica, part in enumerate(parts):
        assert part.dtype == torch.float32
        torch.testing.assert_close(part, whole[owner == replica], rtol=1e-6, atol=1e-7)
