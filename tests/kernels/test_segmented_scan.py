from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hpcrl.kernels.reductions import Rows, discounted_returns, gae
from tests.kernels.close import DTYPES, assert_near

GAMMA, LAM = 0.97, 0.9
# tokens of each sequence; a tile of the tests has 8 tokens, a window 4 tiles
LENGTHS = ((), (0,), (1,), (8, 0, 9, 7), (0, 71, 3, 0), (64, 16))


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter takes half a millisecond for each token."""
    if not torch.cuda.is_available():
        from hpcrl.kernels import reductions_triton

        monkeypatch.setattr(reductions_triton, "SCAN_TILE", 8)
        monkeypatch.setattr(reductions_triton, "SCAN_WINDOW", 4)


def by_hand(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float) -> Tensor:
    """(S, T), by the formula: token after token."""
    found = torch.zeros_like(values)
    next_value = next_found = values.new_zeros(len(values))
    for t in reversed(range(values.shape[1])):
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        next_found = torch.where(mask[:, t] != 0, delta + gamma * lam * next_found, next_found)
        next_value = torch.where(mask[:, t] != 0, values[:, t], next_value)
        found[:, t] = next_found
    return found


def packed(lengths: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor, Tensor, Rows]:
    """Rewards, values and a mask of which a third is 0, over which both are NaN."""
    offsets = torch.tensor([0, *lengths], device=device).cumsum(0)
    rewards, values = torch.randn(2, sum(lengths), device=device)
    mask = torch.rand(sum(lengths), device=device) < 0.7
    rewards, values = (x.masked_fill(~mask, float("nan")) for x in (rewards, values + 10))
    return rewards, values, mask, Rows(offsets, max(lengths, default=0))


def sequence_by_sequence(rewards: Tensor, values: Tensor, mask: Tensor, rows: Rows, gamma: float, lam: float) -> Tensor:
    found = [rewards.new_empty(0)]
    for begin, end in zip(rows.offsets.tolist(), rows.offsets[1:].tolist(), strict=False):
        its = (x[None, begin:end] for x in (rewards, values, mask))
        found.append(by_hand(*its, gamma, lam)[0])
    return torch.cat(found)


@pytest.mark.parametrize("kind", [torch.bool, torch.int64, torch.float32], ids=str)
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_packed_sequences(device: torch.device, lengths: tuple[int, ...], kind: torch.dtype) -> None:
    rewards, values, mask, rows = packed(lengths, device)
    found = gae(rewards, values, mask.to(kind), GAMMA, LAM, rows)
    expected = sequence_by_sequence(rewards.double(), values.double(), mask, rows, GAMMA, LAM)
    assert_near(found, expected, found.dtype)
    returns = discounted_returns(rewards, mask.to(kind), GAMMA, rows)
    none = torch.zeros_like(values, dtype=torch.float64)
    assert_near(returns, sequence_by_sequence(rewards.double(), none, mask, rows, GAMMA, 1.0), returns.dtype)


@pytest.mark.parametrize("of_values", DTYPES)
@pytest.mark.parametrize("of_rewards", DTYPES)
def test_padded_rows_and_dtypes(device: torch.device, of_rewards: torch.dtype, of_values: torch.dtype) -> None:
    rewards, values = torch.randn(3, 9, device=device).to(of_rewards), torch.randn(9, 3, device=device).to(of_values).T
    mask = (torch.rand(3, 9, device=device) < 0.7).long()
    found = gae(rewards, values, mask, GAMMA, LAM)
    assert found.dtype == torch.promote_types(of_rewards, of_values)
    assert_near(found, by_hand(rewards.double(), values.double(), mask, GAMMA, LAM), found.dtype)


def test_a_sequences_bits_are_its_own(device: torch.device) -> None:
    """Wherever it lies, and whether its neighbours are longer."""
    alone, beside = packed((21,), device), packed((5, 40, 3), device)
    rewards, values, mask = (torch.cat([y[:5], x, y[5:]]) for x, y in zip(alone[:3], beside[:3], strict=True))
    rows = Rows(torch.tensor([0, 5, 26, 66, 69], device=device), 40)
    among = gae(rewards, values, mask, GAMMA, LAM, rows)
    assert torch.equal(among[5:26], gae(*alone[:3], GAMMA, LAM, alone[3]))


def test_values_far_from_zero(device: torch.device) -> None:
    """No worse than token after token in the same dtype."""
    rewards, mask = torch.randn(2, 50, device=device), torch.ones(2, 50, device=device)
    values = 1e4 + torch.randn(2, 50, device=device)
    exact = by_hand(rewards.double(), values.double(), mask, 1.0, 0.95)
    found, plain = ((run(rewards, values, mask, 1.0, 0.95) - exact).norm() / exact.norm() for run in (gae, by_hand))
    assert found <= 2 * plain


@pytest.mark.parametrize("shape", [(5, 40), (1, 1), (0, 7), (3, 0)])
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
def test_on_the_cpu_bits_are_those_of_the_formula(
    shape: tuple[int, int], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plain path does for all positions at once what does not depend on the advantage behind."""
    monkeypatch.setenv("HPCRL_KERNELS", "torch")
    rewards, values = torch.randn(2, *shape).to(dtype)
    mask = torch.rand(shape) < 0.7
    assert torch.equal(gae(rewards, values, mask, GAMMA, LAM), by_hand(rewards, values, mask, GAMMA, LAM))
    rewards, values, mask, rows = packed((3, 0, 12, 1), torch.device("cpu"))
    expected = sequence_by_sequence(rewards, values, mask, rows, GAMMA, LAM)
    assert torch.equal(gae(rewards, values, mask, GAMMA, LAM, rows), expected)
