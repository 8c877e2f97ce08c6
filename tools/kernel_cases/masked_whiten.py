from __future__ import annotations

from collections.abc import Iterator

import torch
from kernel_cases.case import Case
from torch import Tensor

from hpcrl.algorithms.aggregation import masked_whiten

SEQUENCES, TOKENS = 8192, 8192


def cases() -> Iterator[Case]:
    x = torch.randn(SEQUENCES, TOKENS, device="cuda")
    mask = torch.rand(SEQUENCES, TOKENS, device="cuda") < 0.9

    def eager(x: Tensor, mask: Tensor) -> Tensor:
        values, count = x.double(), mask.sum()
        mean = torch.where(mask, values, 0.0).sum() / count
        squares = torch.where(mask, values - mean, 0.0).square().sum()
        return ((values - mean) * torch.rsqrt(squares / (count - 1) + 1e-8)).float()

    compiled = torch.compile(eager)
    runs = {
        "hpcrl": lambda: masked_whiten(x, mask),
        "torch eager": lambda: eager(x, mask),
        "torch.compile": lambda: compiled(x, mask),
    }
    yield Case("masked_whiten", runs, 3 * x.nbytes + mask.nbytes)
