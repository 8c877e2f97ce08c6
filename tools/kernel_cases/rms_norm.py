from __future__ import annotations

from collections.abc import Iterator

import torch
from kernel_cases.case import Case
from torch.nn import functional

from hpcrl.kernels.layers import add_rms_norm, rms_norm

ROWS, WIDTH, EPS = 65536, 4096, 1e-5


def cases() -> Iterator[Case]:
    x, other = (torch.randn(ROWS, WIDTH, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    weight = torch.randn(WIDTH, device="cuda", dtype=torch.bfloat16, requires_grad=True)

    def eager(x: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(x, (WIDTH,), weight, EPS)

    def eager_sum(x: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
        total += x
        return eager(total)

    compiled, compiled_sum = torch.compile(eager), torch.compile(eager_sum)
    ours = {"hpcrl": lambda x: rms_norm(x, weight, EPS), "torch eager": eager, "torch.compile": compiled}
    total = torch.zeros_like(x)
    with torch.no_grad():
        yield Case("rms_norm", {name: lambda run=run: run(x) for name, run in ours.items()}, 2 * x.nbytes)
        sums = {
            "hpcrl": lambda: add_rms_norm(x, total, weight, EPS),
            "torch eager": lambda: eager_sum(x, total),
            "torch.compile": lambda: compiled_sum(x, total),
        }
        yield Case("add_rms_norm", sums, 4 * x.nbytes)
    leaf = x.detach().requires_grad_()
    results = {name: run(leaf) for name, run in ours.items()}
    yield Case(
        "rms_norm backward",
        {
            name: lambda y=y: torch.autograd.grad(y, (leaf, weight), other, retain_graph=True)
            for name, y in results.items()
        },
        3 * x.nbytes,
    )
