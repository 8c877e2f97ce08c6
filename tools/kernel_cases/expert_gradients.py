from __future__ import annotations

from collections.abc import Iterator

import torch
from kernel_cases.case import Case

from hpcrl.kernels.grouped_experts_triton import add_expert_gradients

EXPERTS, ROWS, SIZES = 32, 65536, ((1536, 1024), (1024, 768))  # 16,384 tokens with 4 experts each


def cases() -> Iterator[Case]:
    counts = torch.multinomial(torch.ones(EXPERTS), ROWS, replacement=True).bincount(minlength=EXPERTS)
    ends = counts.cumsum(0).to("cuda", torch.int32)
    for m, k in SIZES:
        grad, a = (torch.randn(ROWS, width, device="cuda", dtype=torch.bfloat16) for width in (m, k))
        sums = torch.zeros(EXPERTS, m, k, device="cuda")
        runs = {
            "hpcrl": lambda sums=sums, grad=grad, a=a: add_expert_gradients(sums, grad, a, ends),
            "torch, then a sum": lambda sums=sums, grad=grad, a=a: sums.add_(
                torch.nn.functional.grouped_mm(grad.t(), a, offs=ends)
            ),
        }
        nbytes = grad.nbytes + a.nbytes + 2 * sums.nbytes
        yield Case(f"expert_gradients {m} x {k}", runs, nbytes, 2 * ROWS * m * k)
