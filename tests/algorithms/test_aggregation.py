"""Loss aggregation: by hand, and the same however the mini-batch is split."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hpcrl.algorithms.aggregation import MODES, LossNorm, TokenLosses, agg_loss, aggregate, token_mean

LOSS = torch.tensor([[1.0, 2.0, 50.0], [4.0, 50.0, 50.0], [50.0, 50.0, 50.0]], dtype=torch.float64)
MASK = torch.tensor([[1, 1, 0], [1, 0, 0], [0, 0, 0]])


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("token-mean", 7 / 3),
        ("token-sum", 7.0),
        ("seq-mean-token-sum", 7 / 3),
        ("seq-mean-token-sum-norm", 7 / 3 / 10),
        ("seq-mean-token-mean", (1.5 + 4.0) / 3),  # the empty sequence counts in the divisor only
    ],
)
def test_by_hand(mode, expected):
    norm = LossNorm(batch_num_tokens=3, global_batch_size=3, loss_scale_factor=10)
    assert agg_loss(LOSS, MASK, mode, norm).item() == pytest.approx(expected)


def test_divisors_are_those_of_the_global_mini_batch():
    norm = LossNorm(batch_num_tokens=14, global_batch_size=4, loss_scale_factor=10)
    found = [agg_loss(LOSS, MASK, mode, norm).item() for mode in MODES]
    assert found == pytest.approx([0.5, 7.0, 7 / 4, 7 / 40, 5.5 / 4])


@pytest.mark.parametrize("mode", MODES)
@given(seed=st.integers(0, 2**31), replicas=st.integers(1, 4), parts=st.integers(1, 4))
def test_any_split_gives_the_same_loss_and_gradient(mode, seed, replicas, parts):
    """Samples go to random replicas and micro-batches, each padded to its own width; shares are summed."""
    rng = np.random.default_rng(seed)
    size, width = 9, 7
    lengths = rng.integers(0, width + 1, size)
    mask = torch.tensor((np.arange(width)[None] < lengths[:, None]) & (rng.random((size, width)) < 0.8)).int()
    x = torch.tensor(rng.normal(size=(size, width)), dtype=torch.float64)
    norm = LossNorm(float(mask.sum()), float(size), 5.0)

    def loss_and_gradient(pieces: list[np.ndarray]) -> tuple[float, torch.Tensor]:
        weight = torch.tensor(1.5, dtype=torch.float64, requires_grad=True)
        total = 0.0
        for rows in pieces:
            longest = int(lengths[rows].max(initial=0))
            share = agg_loss((weight * x[rows]).square()[:, :longest], mask[rows][:, :longest], mode, norm)
            share.backward()
            total += share.item()
        return total, weight.grad

    home = rng.integers(0, replicas * parts, size)
    whole, gradient = loss_and_gradient([np.arange(size)])
    split, split_gradient = loss_and_gradient([np.flatnonzero(home == i) for i in range(replicas * parts)])
    assert split == pytest.approx(whole, rel=1e-12)
    torch.testing.assert_close(split_gradient, gradient, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("mode", MODES)
def test_a_mini_batch_without_tokens_is_zero_and_has_a_gradient(mode):
    x = torch.ones(1, 2, requires_grad=True)
    agg_loss(x, torch.zeros(1, 2), mode, LossNorm(0, 0, 1.0)).backward()
    assert x.grad.tolist() == [[0.0, 0.0]]


def test_padding_may_hold_nan():
    x = torch.tensor([[1.0, float("nan")]])
    for mode in MODES:
        assert agg_loss(x, torch.tensor([[1, 0]]), mode, LossNorm(1, 1, 1.0)).item() == pytest.approx(1.0)


def test_counts_of_a_whole_batch_leave_out_empty_sequences():
    assert LossNorm.of_whole(MASK) == LossNorm(3, 2, 3)
    assert LossNorm.of_whole(MASK.bool(), loss_scale_factor=10) == LossNorm(3, 2, 10)


def test_a_loss_may_bring_its_own_mask_and_mode_or_be_one_number_per_sequence():
    norm = LossNorm(3, 2, 10)
    own_mask = TokenLosses(LOSS, {}, response_mask=torch.tensor([[1, 0, 0], [1, 0, 0], [0, 0, 0]]))
    own_mode = TokenLosses(LOSS, {}, loss_agg_mode="token-sum")
    per_sequence = TokenLosses(LOSS[:, 0], {})
    found = [aggregate(losses, MASK, "token-mean", norm).item() for losses in (own_mask, own_mode, per_sequence)]
    assert found == pytest.approx([5 / 3, 7.0, 55 / 2])


def test_means_over_tokens_are_fp64_and_merge():
    x = torch.tensor([[0.1, 7.0], [float("nan"), 0.3]])
    mean = token_mean(x, torch.tensor([[1, 0], [0, 1]]))
    assert mean.finish() == pytest.approx(0.2, rel=1e-7) and mean.weight == 2 and mean.total.dtype == torch.float64
    empty = token_mean(x, torch.zeros(2, 2))
    assert empty.finish() == 0 and mean.merge(empty).finish() == pytest.approx(0.2, rel=1e-7)


def test_wrong_modes_are_named():
    with pytest.raises(ValueError, match="unknown loss_agg_mode 'mean'; there are token-mean") as caught:
        agg_loss(LOSS, MASK, "mean", LossNorm(1, 1))
    assert caught.value.user_error
    with pytest.raises(ValueError, match="needs loss_scale_factor"):
        agg_loss(LOSS, MASK, "seq-mean-token-sum-norm", LossNorm(1, 1))
