from __future__ import annotations

import pytest
import torch

from hpcrl.kernels.reductions import group_moments, group_sum
from tests.kernels.close import DTYPES, poisoned

ALL = (*DTYPES, torch.float64)
# samples and groups: none, one, groups of one, one of all, more groups than a program has, numbers that nobody has
SIZES = ((0, 1), (1, 1), (20, 20), (17, 1), (90, 40), (30, 200))


@pytest.mark.parametrize("dtype", ALL)
@pytest.mark.parametrize(("samples", "groups"), SIZES)
def test_moments(device: torch.device, samples: int, groups: int, dtype: torch.dtype) -> None:
    score = (100 + torch.randn(samples, device=device)).to(dtype)
    group = torch.randint(groups, (samples,), device=device)
    found = group_moments(score, group)
    for sample, number in enumerate(group.tolist()):
        its = score[group == number].double()
        size, mean, std = (part[sample].item() for part in found)
        assert size == len(its)
        assert mean == pytest.approx(its.mean().item(), rel=1e-14)
        assert std == pytest.approx(its.std().item() if len(its) > 1 else 0.0, rel=1e-10, abs=1e-13)
    assert all(part.dtype == torch.float64 and len(part) == samples for part in found)


@pytest.mark.parametrize("dtype", ALL)
@pytest.mark.parametrize("rest", [(), (1,), (300,), (3, 5), (0,)])
def test_sums_are_those_of_the_cpu_bit_for_bit(device: torch.device, rest: tuple[int, ...], dtype: torch.dtype) -> None:
    x = torch.randn(40, *rest, device=device).to(dtype)
    group = torch.randint(12, (40,), device=device)
    expected = torch.zeros(int(group.max()) + 1, *rest, dtype=torch.float64)
    expected.index_add_(0, group.cpu(), x.cpu().double())
    assert torch.equal(group_sum(x, group).cpu(), expected)


def test_equal_scores_have_no_deviation_at_all(device: torch.device) -> None:
    """Whoever divides by it would else divide rounding errors by rounding errors."""
    score = torch.full((32,), 0.5, device=device)
    group = torch.arange(32, device=device) % 4
    assert not group_moments(score, group).std.any()


def test_a_column_of_a_matrix(device: torch.device) -> None:
    table = poisoned((9, 3), torch.float32, device)
    table[:, 1] = torch.arange(9, device=device)
    found = group_moments(table[:, 1], torch.arange(9, device=device) // 3)
    assert found.mean.tolist() == [1.0] * 3 + [4.0] * 3 + [7.0] * 3 and found.std.tolist() == [1.0] * 9
