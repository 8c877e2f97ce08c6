"""Log-probs and entropies of 8k tokens, from 4k numbers each, over a vocabulary of 152k."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
from kernel_cases.case import Case

from hpcrl.kernels.linear_log_prob import linear_log_probs

ROWS, HIDDEN, VOCABULARY, CHUNK_ROWS = 8192, 4096, 152064, 1024
ALONE: Any = SimpleNamespace(rank=lambda: 0, size=lambda: 1)  # a group of one rank
Run = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def ours(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    found = linear_log_probs(
        hidden, weight, targets, chunk_rows=CHUNK_ROWS, group=ALONE, vocab_size=VOCABULARY, entropy=True
    )
    assert found.entropies is not None
    return found.log_probs.sum() + found.entropies.sum()


def eager(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    log_p = (hidden @ weight.T).float().log_softmax(1)
    return log_p.gather(1, targets).sum() - (log_p.exp() * log_p).sum()


def peers() -> Iterator[tuple[str, Run]]:
    yield "torch eager", eager
    yield "torch.compile", torch.compile(eager)
    try:
        from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss
    except ImportError:
        return
    loss = LigerFusedLinearCrossEntropyLoss(reduction="sum")
    # Its gradients are made in the forward pass, and it tells no entropy.
    yield "Liger, no entropy", lambda hidden, weight, targets: loss(weight, hidden, targets[:, 0])


def cases() -> Iterator[Case]:
    hidden = torch.randn(ROWS, HIDDEN, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(VOCABULARY, HIDDEN, device="cuda", dtype=torch.bfloat16) * HIDDEN**-0.5
    targets = torch.randint(VOCABULARY, (ROWS, 1), device="cuda")
    product = 2 * ROWS * HIDDEN * VOCABULARY
    runs = {"hpcrl": ours, **dict(peers())}

    def without_gradients(run: Run) -> torch.Tensor:
        with torch.no_grad():
            return run(hidden, weight, targets)

    def with_gradients(run: Run) -> tuple[torch.Tensor, ...]:
        leaves = hidden.detach().requires_grad_(), weight.detach().requires_grad_()
        return torch.autograd.grad(run(*leaves, targets), leaves)

    for name, passes, products in (("forward", without_gradients, 1), ("forward and backward", with_gradients, 3)):
        yield Case(
            f"linear_log_prob {name}",
            {who: lambda run=run, passes=passes: passes(run) for who, run in runs.items()},
            products * (hidden.nbytes + weight.nbytes),
            products * product,
        )
