"""Log-probs over a vocabulary, and draws from it."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from hpcrl.kernels.linear_log_prob import linear_log_probs
from hpcrl.kernels.sampling import sample
from kernel_cases import Case

ALONE: Any = SimpleNamespace(rank=lambda: 0, size=lambda: 1)  # a group of one rank
Run = Callable[[Tensor, Tensor, Tensor], Tensor]
TEMPERATURE, TOP_P = 0.8, 0.95


def log_probs_eagerly(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    log_p = (hidden @ weight.T).float().log_softmax(1)
    return log_p.gather(1, targets).sum() - (log_p.exp() * log_p).sum()


def log_prob_peers() -> Iterator[tuple[str, Run]]:
    yield "torch eager", log_probs_eagerly
    yield "torch.compile", torch.compile(log_probs_eagerly)
    try:
        from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss
    except ImportError:
        return
    loss = LigerFusedLinearCrossEntropyLoss(reduction="sum")
    # Its gradients are made in the forward pass, and it tells no entropy.
    yield "Liger, no entropy", lambda hidden, weight, targets: loss(weight, hidden, targets[:, 0])


def linear_log_prob(
    rows: int = 8192, hidden: int = 4096, vocabulary: int = 152064, chunk_rows: int = 1024
) -> Iterator[Case]:
    """Log-probs and entropies of `rows` tokens, from `hidden` numbers each."""
    states = torch.randn(rows, hidden, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(vocabulary, hidden, device="cuda", dtype=torch.bfloat16) * hidden**-0.5
    targets = torch.randint(vocabulary, (rows, 1), device="cuda")
    product = 2 * rows * hidden * vocabulary

    def ours(states: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        outputs = linear_log_probs(
            states, weight, targets, chunk_rows=chunk_rows, group=ALONE, vocab_size=vocabulary, entropy=True
        )
        assert outputs.entropies is not None
        return outputs.log_probs.sum() + outputs.entropies.sum()

    runs = {"hpcrl": ours, **dict(log_prob_peers())}

    def without_gradients(run: Run) -> Tensor:
        with torch.no_grad():
            return run(states, weight, targets)

    def with_gradients(run: Run) -> tuple[Tensor, ...]:
        leaves = states.detach().requires_grad_(), weight.detach().requires_grad_()
        return torch.autograd.grad(run(*leaves, targets), leaves)

    for name, passes, products in (("forward", without_gradients, 1), ("forward and backward", with_gradients, 3)):
        yield Case(
            f"linear_log_prob {name}",
            {who: lambda run=run, passes=passes: passes(run) for who, run in runs.items()},
            products * (states.nbytes + weight.nbytes),
            products * product,
        )


def sampling(vocabulary: int = 151936, batches: tuple[int, ...] = (16, 256, 2048)) -> Iterator[Case]:
    """The first batch fits into the L2 cache, which is emptied between runs."""
    for rows in batches:
        logits = 3 * torch.randn(rows, vocabulary, device="cuda", dtype=torch.bfloat16)
        uniform = torch.rand(rows, device="cuda", dtype=torch.float64)
        for name, top_p in (("sample", 1.0), ("sample top-p", TOP_P)):
            runs = {"hpcrl": partial(sample, logits, uniform, vocabulary, TEMPERATURE, -1, top_p)}
            runs |= {who: partial(run, logits) for who, run in sampling_peers(top_p).items()}
            yield Case(f"{name} {rows}", runs, logits.nbytes)


def sampling_peers(top_p: float) -> dict[str, Callable[[Tensor], object]]:
    """Their random numbers are their own, and flashinfer says no log-prob."""

    def eager(logits: Tensor) -> tuple[Tensor, Tensor]:
        probs = (logits.float() / TEMPERATURE).softmax(-1)
        filtered = probs
        if top_p < 1:
            ordered, ids = probs.sort(dim=-1, descending=True)
            ordered = ordered.masked_fill(ordered.cumsum(-1) - ordered >= top_p, 0)
            filtered = torch.zeros_like(probs).scatter_(-1, ids, ordered)
        # as torch.multinomial draws one: the largest of probabilities over exponential numbers
        tokens = (filtered / torch.empty_like(filtered).exponential_()).argmax(-1, keepdim=True)
        return tokens, probs.gather(-1, tokens).log()

    runs: dict[str, Callable[[Tensor], object]] = {"torch eager": eager, "torch.compile": torch.compile(eager)}
    if importlib.util.find_spec("flashinfer"):
        from flashinfer.sampling import sampling_from_probs, top_p_sampling_from_probs

        def library(logits: Tensor) -> Tensor:
            probs = (logits.float() / TEMPERATURE).softmax(-1)
            return sampling_from_probs(probs) if top_p == 1 else top_p_sampling_from_probs(probs, top_p)

        runs["flashinfer"] = library
    return runs
