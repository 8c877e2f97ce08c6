"""Log-probability and entropy of a vocabulary that is split over tensor-parallel ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def vocab_parallel_log_probs(
    logits: Tensor,
    targets: Tensor,
    *,
    group: ProcessGroup,
    vocab_size: int,
    temperature: float = 1.0,
    entropy: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """log softmax(logits / temperature)[target], and the entropy of that distribution, both (R,) fp32.

    logits: (R, V / tp) this rank's columns, rank i of `group` holding the i-th block. targets: (R,) int64 global ids.
    Columns of ids >= vocab_size are padding and have probability 0. Temperature 0 means 1: the log-probability has one
    definition in this project, and that of greedy decoding is under temperature 1.
    """
    log_probs, entropies = _LogProbs.apply(logits, targets, group, vocab_size, temperature or 1.0, entropy)
    return log_probs, entropies


class _LogProbs(torch.autograd.Function):
    """With p = softmax(x / T), target y and entropy H = -sum p log p:

    d log p_y / d x_i = (1[i = y] - p_i) / T and d H / d x_i = -p_i (log p_i + H) / T.
    One tensor of the size of the logits is kept for the backward pass.
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        targets: Tensor,
        group: ProcessGroup,
        vocab_size: int,
        temperature: float,
        want_entropy: bool,
    ) -> tuple[Tensor, Tensor | None]:
        rows, width = logits.shape
        first = group.rank() * width
        valid = max(0, min(width, vocab_size - first))
        parallel = group.size() > 1
        x = logits[:, :valid].float()
        top = x.amax(dim=1) if valid else x.new_full((rows,), -torch.inf)
        if parallel:
            dist.all_reduce(top, dist.ReduceOp.MAX, group=group)
        x = (x - top.unsqueeze(1)).div_(temperature)

        # The three sums over the vocabulary travel together.
        sums = x.new_zeros(3 if want_entropy else 2, rows)
        exponentials = x.exp()
        torch.sum(exponentials, dim=1, out=sums[0])
        column = targets - first
        here = (column >= 0) & (column < valid)
        column = column.clamp(0, max(valid - 1, 0)).unsqueeze(1)
        if valid:
            sums[1] = x.gather(1, column).squeeze(1) * here
        if want_entropy:
            torch.sum(exponentials.mul_(x), dim=1, out=sums[2])
        del exponentials
        if parallel:
            dist.all_reduce(sums, group=group)
        log_sum = sums[0].log()
        log_probs = sums[1] - log_sum
        entropies = log_sum - sums[2] / sums[0] if want_entropy else None

        x.sub_(log_sum.unsqueeze(1))
        ctx.save_for_backward(x, column, here, entropies)
        ctx.width, ctx.dtype, ctx.temperature = width, logits.dtype, temperature
        ctx.set_materialize_grads(False)
        return log_probs, entropies

    @staticmethod
    def backward(ctx: Any, grad_log_probs: Tensor | None, grad_entropies: Tensor | None) -> tuple[Tensor | None, ...]:
        log_p, column, here, entropies = ctx.saved_tensors
        p = log_p.exp()
        factor = torch.zeros((), dtype=p.dtype, device=p.device)
        if grad_log_probs is not None:
            factor = -grad_log_probs.unsqueeze(1)
        if grad_entropies is not None:
            factor = factor - grad_entropies.unsqueeze(1) * (log_p + entropies.unsqueeze(1))
        grad = p.mul_(factor)
        if grad_log_probs is not None and grad.size(1):
            grad.scatter_add_(1, column, (grad_log_probs * here).unsqueeze(1))
        grad.div_(ctx.temperature)
        grad = torch.nn.functional.pad(grad, (0, ctx.width - grad.size(1)))
        return grad.to(ctx.dtype), None, None, None, None, None
