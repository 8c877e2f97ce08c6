from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator

import torch
from kernel_cases.case import Case
from torch.nn.functional import silu

from hpcrl.kernels.layers import swiglu

ROWS, WIDTHS = 16384, (14336, 768)  # of a dense layer and of an expert


def eager(x: torch.Tensor) -> torch.Tensor:
    gate, up = x.chunk(2, -1)
    return silu(gate) * up


def implementations() -> dict[str, Callable[[torch.Tensor], torch.Tensor]]:
    found = {"hpcrl": swiglu, "torch eager": eager, "torch.compile": torch.compile(eager)}
    if importlib.util.find_spec("liger_kernel"):
        from liger_kernel.ops.swiglu import LigerSiLUMulFunction

        # It takes two matrices, which it copies where they are halves of one.
        found["liger_kernel"] = lambda x: LigerSiLUMulFunction.apply(*x.chunk(2, -1))
    if importlib.util.find_spec("transformer_engine"):
        from transformer_engine.pytorch.ops import SwiGLU

        found["te"] = SwiGLU()
    return found


def cases() -> Iterator[Case]:
    for width in WIDTHS:
        rows = ROWS * WIDTHS[0] // width
        x = torch.randn(rows, 2 * width, device="cuda", dtype=torch.bfloat16)
        grad = torch.randn(rows, width, device="cuda", dtype=torch.bfloat16)
        with torch.no_grad():
            runs = {name: lambda run=run, x=x: run(x) for name, run in implementations().items()}
            yield Case(f"swiglu {width}", runs, x.nbytes + grad.nbytes)
        leaf = x.requires_grad_()
        results = {name: run(leaf) for name, run in implementations().items()}
        # Liger's gradient takes the place of what it kept: its numbers are wrong from the second time on, its time not.
        runs = {
            name: lambda y=y, leaf=leaf, grad=grad: torch.autograd.grad(y, leaf, grad, retain_graph=True)
            for name, y in results.items()
        }
        yield Case(f"swiglu backward {width}", runs, 2 * x.nbytes + grad.nbytes)
