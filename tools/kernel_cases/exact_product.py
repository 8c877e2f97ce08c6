"""Products of exact mode for few and many rows, beside the library's, whose rows depend on their number."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from kernel_cases.case import Case

from hpcrl.model.exact import exact_linear

ROWS = (1, 256, 16384)
WEIGHTS = ((17920, 1536), (1536, 8960))


def cases() -> Iterator[Case]:
    for columns, terms in WEIGHTS:
        weight = torch.randn(columns, terms, device="cuda", dtype=torch.bfloat16)
        for rows in ROWS:
            x = torch.randn(rows, terms, device="cuda", dtype=torch.bfloat16)
            runs = {
                "hpcrl": lambda x=x, weight=weight: exact_linear(x, weight),
                "torch eager": lambda x=x, weight=weight: x @ weight.T,
            }
            nbytes = x.nbytes + weight.nbytes + rows * columns * 2
            yield Case(f"exact product {rows} x {terms} x {columns}", runs, nbytes, 2 * rows * columns * terms)
