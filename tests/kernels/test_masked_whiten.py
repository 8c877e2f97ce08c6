from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from hpcrl.algorithms.aggregation import masked_whiten
from hpcrl.kernels.reductions import masked_values
from tests.kernels.close import DTYPES, assert_near

SHAPES = ((0, 5), (1, 1), (3, 7), (2, 3000), (4, 2048))  # a tile has 4096 numbers


def by_hand(x: Tensor, mask: Tensor) -> Tensor:
    """In fp64, two passes."""
    values, weight = x.double(), mask.double()
    counted = torch.where(mask != 0, values, 0.0)
    n = weight.sum()
    mean = (counted * weight).sum() / n.clamp(min=1e-8)
    squares = (torch.where(mask != 0, values - mean, 0.0).square() * weight).sum()
    variance = squares / (n - 1).clamp(min=1)
    return (values - mean) * (torch.rsqrt(variance + 1e-8) if n > 1 else 0.0)


@pytest.mark.parametrize("kind", [torch.bool, torch.int64, torch.float32], ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_whitened(device: torch.device, shape: tuple[int, int], dtype: torch.dtype, kind: torch.dtype) -> None:
    x = (3 + torch.randn(shape, device=device)).to(dtype)
    mask = (torch.rand(shape, device=device) < 0.7).to(kind)
    found = masked_whiten(x, mask)
    assert found.dtype == dtype
    assert_near(found, by_hand(x, mask), dtype)


def test_a_far_mean_costs_nothing(device: torch.device) -> None:
    """Squares around zero would have lost all of it: 1e12 against 1, in fp32 and nearly so in fp64."""
    x = 2.0**20 + torch.randint(-8, 9, (5, 2000), device=device) / 8
    mask = torch.ones_like(x)
    assert_near(masked_whiten(x, mask), by_hand(x, mask), torch.float32)


def test_what_does_not_count_may_be_anything(device: torch.device) -> None:
    """Numbers there are shifted and scaled as well; whole tiles may count nothing."""
    x = torch.randn(3, 4096, device=device)
    mask = torch.zeros_like(x)
    mask[1, 5:50] = 1
    expected = by_hand(x, mask)
    x[0], x[1, 2] = float("nan"), float("inf")
    found = masked_whiten(x, mask)
    assert found[0].isnan().all() and found[1, 2].isinf()
    assert_near(found[1, 3:], expected[1, 3:], x.dtype)
    assert_near(found[2], expected[2], x.dtype)


@pytest.mark.parametrize("count", [0, 1])
def test_fewer_than_two_tokens_give_zero(device: torch.device, count: int) -> None:
    x, mask = torch.randn(2, 6, device=device), torch.zeros(2, 6, device=device)
    mask[0, :count] = 1
    assert not masked_whiten(x, mask).any()


def test_equal_numbers_give_zero(device: torch.device) -> None:
    x = torch.full((3, 4000), 0.1, device=device)
    assert masked_whiten(x, torch.ones_like(x)).abs().max() < 1e-9


def test_replicas_are_asked_twice_and_give_what_the_whole_gives(device: torch.device) -> None:
    """One has nothing, and the means of the others lie apart."""
    x = torch.randn(8, 700, device=device) + torch.arange(8, device=device)[:, None]
    mask = (torch.rand(8, 700, device=device) < 0.5).long()
    rows = (slice(0, 2), slice(2, 2), slice(2, 8))
    replicas = [masked_values(x[its], mask[its]) for its in rows]
    total = sum(replica.sums() for replica in replicas)
    squares = sum(replica.squares(total[1] / total[0]) for replica in replicas)

    def answers() -> Iterator[Tensor]:
        yield total
        yield squares

    whole = masked_whiten(x, mask)
    for its in rows:
        left = answers()
        part = masked_whiten(x[its], mask[its], lambda sums, left=left: next(left))
        assert next(left, None) is None
        assert_near(part, whole[its].double(), x.dtype, factor=0.1)


def test_a_fractional_mask_weighs(device: torch.device) -> None:
    x, mask = torch.randn(4, 100, device=device), torch.rand(4, 100, device=device)
    assert_near(masked_whiten(x, mask), by_hand(x, mask), x.dtype)
