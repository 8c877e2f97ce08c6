from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from functools import partial

import torch
from kernel_cases.case import Case
from torch import Tensor

from hpcrl.kernels.sampling import sample

VOCABULARY, TEMPERATURE, TOP_P = 151936, 0.8, 0.95
BATCHES = (16, 256, 2048)  # the first fit into the L2 cache, which is emptied between runs


def cases() -> Iterator[Case]:
    for rows in BATCHES:
        logits = 3 * torch.randn(rows, VOCABULARY, device="cuda", dtype=torch.bfloat16)
        uniform = torch.rand(rows, device="cuda", dtype=torch.float64)
        for name, top_p in (("sample", 1.0), ("sample top-p", TOP_P)):
            runs = {"hpcrl": partial(sample, logits, uniform, VOCABULARY, TEMPERATURE, -1, top_p)}
            runs |= {who: partial(run, logits) for who, run in peers(top_p).items()}
            yield Case(f"{name} {rows}", runs, logits.nbytes)


def peers(top_p: float) -> dict[str, Callable[[Tensor], object]]:
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
