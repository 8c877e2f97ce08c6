"""Log-probability, entropy and likeliest tokens of a vocabulary that is split over tensor-parallel ranks.

Logits are (R, V / tp): this rank's columns, rank i of `group` holding the i-th block. Columns of ids >= vocab_size are
padding and have probability 0. Every function is collective over `group`, whose ranks pass the same rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

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
    log_probs, entropies, squares = _LogProbs.apply(
        logits, columns, group, vocab_size, temperature or 1.0, entropy, sum_pi_squared
    )
    return log_probs.view(targets.shape), entropies, squares


def vocab_parallel_topk_ids(logits: Tensor, k: int, *, group: ProcessGroup, vocab_size: int) -> Tensor:
    """Ids of each row's k largest logits, the largest first, of equal ones the lower id first: (R, k) int64.

    So the choice does not depend on how the vocabulary is split. Logits are fp32 or narrower. ValueError where k is
    more than the vocabulary.
    """
    if k > vocab_size:
        raise ValueError(f"the {k} likeliest of {vocab_size} tokens asked for; ask for {vocab_size} or fewer")
    rows, width = logits.shape
    first = group.rank() * width
    x = logits.detach()[:, : max(0, min(width, vocab_size - first))]
    kept = min(k, x.size(1))
    values, ids = x.topk(kept)
    # Of equal logits torch takes any: where the last ones taken have equals, those are candidates too.
    candidates = max(kept, int((x >= values[:, -1:]).sum(dim=1).max()))
    if candidates > kept:
        values, ids = x.topk(candidates)
    keys = _order_keys(values, first + ids).topk(kept).values
    if group.size() > 1:
        keys = torch.nn.functional.pad(keys, (0, k - kept), value=torch.iinfo(torch.int64).min)
        gathered = keys.new_empty(group.size(), rows, k)
        dist.all_gather_into_tensor(gathered, keys, group=group)
        keys = gathered.transpose(0, 1).reshape(rows, -1).topk(k).values
    return _LOW - (keys & _LOW)


_LOW = 2**32 - 1


def _order_keys(values: Tensor, ids: Tensor) -> Tensor:
    """int64 keys, all different in a row, that order by (value, -id).

    The upper half is the bits of the fp32 value, negative ones turned over so that integers order as the values do.
    """
    bits = (values.float() + 0.0).view(torch.int32)  # the sum makes -0 a 0
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (ordered.to(torch.int64) << 32) | (_LOW - ids)


class _LogProbs(torch.autograd.Function):
    """With p = softmax(x / T), targets y and entropy H = -sum p log p:

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
        want_squares: bool,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        rows, width = logits.shape
        num_targets = targets.size(1)
        first = group.rank() * width
        valid = max(0, min(width, vocab_size - first))
        parallel = group.size() > 1
        x = logits[:, :valid].to(torch.promote_types(logits.dtype, torch.float32))
        top = x.amax(dim=1) if valid else x.new_full((rows,), -torch.inf)
        if parallel:
            dist.all_reduce(top, dist.ReduceOp.MAX, group=group)
        x = (x - top.unsqueeze(1)).div_(temperature)

        # The sums over the vocabulary travel together: exp, targets, exp * x, exp^2.
        sums = x.new_zeros(1 + num_targets + want_entropy + want_squares, rows)
        exponentials = x.exp()
        torch.sum(exponentials, dim=1, out=sums[0])
        column = targets - first
        here = (column >= 0) & (column < valid)
        column = column.clamp(0, max(valid - 1, 0))
        if valid:
            sums[1 : 1 + num_targets] = (x.gather(1, column) * here).T
        if want_squares:
            # A norm, for it needs no further tensor of the size of the logits.
            sums[-1] = torch.linalg.vector_norm(exponentials, dim=1).square()
        if want_entropy:
            torch.sum(exponentials.mul_(x), dim=1, out=sums[1 + num_targets])
        del exponentials
        if parallel:
            dist.all_reduce(sums, group=group)
        log_sum = sums[0].log()
        log_probs = (sums[1 : 1 + num_targets] - log_sum).T.contiguous()
        entropies = log_sum - sums[1 + num_targets] / sums[0] if want_entropy else None
        squares = sums[-1] / sums[0].square() if want_squares else None

        x.sub_(log_sum.unsqueeze(1))
        ctx.save_for_backward(x, column, here, entropies)
        ctx.width, ctx.dtype, ctx.temperature = width, logits.dtype, temperature
        ctx.set_materialize_grads(False)
        if squares is not None:
            ctx.mark_non_differentiable(squares)
        return log_probs, entropies, squares

    @staticmethod
    def backward(
        ctx: Any, grad_log_probs: Tensor | None, grad_entropies: Tensor | None, _: None
    ) -> tuple[Tensor | None, ...]:
        log_p, column, here, entropies = ctx.saved_tensors
        p = log_p.exp()
        factor = torch.zeros((), dtype=p.dtype, device=p.device)
        if grad_log_probs is not None:
            factor = -grad_log_probs.sum(dim=1, keepdim=True)
        if grad_entropies is not None:
            factor = factor - grad_entropies.unsqueeze(1) * (log_p + entropies.unsqueeze(1))
        grad = p.mul_(factor)
        if grad_log_probs is not None and grad.size(1):
            # Twice, for the first target may be among the others, and an addition in any order would change bits.
            at_targets = grad_log_probs * here
            for part in (slice(0, 1), slice(1, None)):
                grad.scatter_add_(1, column[:, part], at_targets[:, part])
        grad.div_(ctx.temperature)
        grad = torch.nn.functional.pad(grad, (0, ctx.width - grad.size(1)))
        return grad.to(ctx.dtype), None, None, None, None, None, None
