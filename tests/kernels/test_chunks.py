from __future__ import annotations

import torch

from hpcrl.kernels.chunks import decays


def test_a_strong_decay_costs_later_factors_no_digits() -> None:
    logs = -torch.rand(3, 32, 2, generator=torch.Generator().manual_seed(0))
    logs[:, 0] = -700.0  # differences of fp32 sums would have errors of 6e-5
    between, to_end, from_start = decays(logs)
    exact = logs.double()
    for i in range(32):
        for j in range(32):
            expected = exact[:, j + 1 : i + 1].sum(1).exp() if j <= i else torch.zeros(3, 2)
            torch.testing.assert_close(between[:, :, i, j].double(), expected.double(), rtol=1e-6, atol=0)
        torch.testing.assert_close(to_end[:, i].double(), exact[:, i + 1 :].sum(1).exp(), rtol=1e-6, atol=0)
    assert torch.equal(from_start, torch.zeros(3, 32, 2))
