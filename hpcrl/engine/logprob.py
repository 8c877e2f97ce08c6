"""Log-probability and entropy of logits whose vocabulary is split over tensor-parallel ranks.

Logits are (R, V / tp): this rank's columns, rank i of `group` holding the i-th block. Columns of ids >= vocab_size are
padding and have probability 0. Every function is collective over `group`, whose ranks pass the same rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hpcrl.kernels.vocabulary import SplitSoftmax
from hpcrl.model.exact import exact_log_softmax

from megatron.core.tensor_parallel.mappings import gather_from_tensor_model_parallel_region  # isort: skip

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
    sum_pi_squared: bool = False,
    exact: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """log softmax(logits / temperature) at the targets; on request that distribution's entropy and sum of squares.

    targets: (R,) or (R, K) int64 global ids, of which those behind the first are distinct in a row. Gives log-probs in
    the shape of the targets, entropy -sum p log p (R,) and sum p^2 (R,), the last without a gradient; fp32, or fp64
    where the logits are. Temperature 0 means 1: the log-probability has one definition in this project, and that of
    greedy decoding is under temperature 1. `exact` gives the bits of the native engine's exact mode, from the logits of
    the whole vocabulary on every rank.
    """
    columns = targets.view(len(targets), -1)
    if exact:
        whole = gather_from_tensor_model_parallel_region(logits, group)
        log_p = exact_log_softmax(whole, vocab_size, temperature)
        return (
            log_p.gather(1, columns).view(targets.shape),
            -(log_p.exp() * log_p).sum(dim=1) if entropy else None,
            log_p.detach().mul(2).exp().sum(dim=1) if sum_pi_squared else None,
        )
    softmax = SplitSoftmax(group, vocab_size, temperature or 1.0)
    log_probs, entropies, squares = _LogProbs.apply(logits, columns, softmax, entropy, sum_pi_squared)
    return log_probs.view(targets.shape), entropies, squares


class _LogProbs(torch.autograd.Function):
    """One tensor of the size of the logits is kept for the backward pass."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, softmax: SplitSoftmax, entropy: bool, sum_pi_squared: bool
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        sums, x = softmax.sums(logits, targets, entropy, sum_pi_squared)
        ctx.save_for_backward(x.sub_(sums.log_sum.unsqueeze(1)), targets, sums.entropies)
        ctx.softmax, ctx.width, ctx.dtype = softmax, logits.size(1), logits.dtype
        ctx.set_materialize_grads(False)
        if sums.squares is not None:
            ctx.mark_non_differentiable(sums.squares)
        return sums.log_probs, sums.entropies, sums.squares

    @staticmethod
    def backward(
        ctx: Any, grad_log_probs: Tensor | None, grad_entropies: Tensor | None, _: None
    ) -> tuple[Tensor | None, ...]:
        log_p, targets, entropies = ctx.saved_tensors
        grad = ctx.softmax.gradient(log_p, targets, entropies, grad_log_probs, grad_entropies, ctx.width)
        return grad.to(ctx.dtype), None, None, None, None
