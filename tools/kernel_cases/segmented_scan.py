from __future__ import annotations

from collections.abc import Iterator

import torch
from kernel_cases.case import Case
from torch import Tensor

from hpcrl.kernels.reductions import gae

GAMMA, LAM = 0.99, 0.95


def cases() -> Iterator[Case]:
    for sequences, tokens in ((4096, 200), (16, 32768), (65536, 1024)):
        rewards, values = torch.randn(2, sequences, tokens, device="cuda")
        mask = torch.rand(sequences, tokens, device="cuda") < 0.9
        runs = {"hpcrl": lambda of=(rewards, values, mask): gae(*of, GAMMA, LAM)}
        if tokens <= 1024:  # of the peers, which start kernels for each position
            runs["torch eager"] = lambda of=(rewards, values, mask): by_position(*of)
        yield Case(f"gae {sequences} x {tokens}", runs, 3 * rewards.nbytes + mask.nbytes)


def by_position(rewards: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    found = torch.empty_like(values)
    next_value = following = values.new_zeros(len(values))
    for t in reversed(range(values.shape[1])):
        delta = rewards[:, t] + GAMMA * next_value - values[:, t]
        following = torch.where(mask[:, t], delta + GAMMA * LAM * following, following)
        next_value = torch.where(mask[:, t], values[:, t], next_value)
        found[:, t] = following
    return found
