"""Log-probs, entropy and most likely tokens from hidden states, without all logits in memory at a time.

The plain path runs the output layer on a few rows at a time, as in Liger Kernel (Hsu et al. 2024, arXiv:2410.10989,
fused linear cross entropy); on CUDA it runs on a few columns at a time. The backward pass recomputes the logits,
because the loss is not part of the operation.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from hpcrl.kernels.dispatch import use_triton
from hpcrl.kernels.fp32_product import add_product, added, product, slices, sums_in_fp32
from hpcrl.kernels.vocabulary import RowSums, SplitSoftmax, vocab_parallel_topk_ids

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def logits_of(hidden: Tensor, weight: Tensor) -> Tensor:
    """Return hidden @ weight^T, (n, V) of (n, k) and (V, k), without gradients; fp32 on CUDA.

    On a CPU in the dtype of the operands, because their conversion made decoding in bf16 11 to 33% slower.
    """
    return product(hidden, weight.T) if hidden.device.type == "cuda" else hidden @ weight.T


MAX_TARGETS = 8  # of a row, in Triton, which compares every column with each of them


class HeadOutputs(NamedTuple):
    """fp32, or fp64 if the hidden states are; None if not requested."""

    log_probs: Tensor  # (R, K) at the targets
    entropies: Tensor | None  # (R,) -sum p log p
    squares: Tensor | None  # (R,) sum p^2, without a gradient
    topk_ids: Tensor | None = None  # (R, k) int64, most likely first
    topk_log_probs: Tensor | None = None  # (R, k) at these, without a gradient


def linear_log_probs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    chunk_rows: int,
    group: ProcessGroup,
    vocab_size: int,
    temperature: float = 1.0,
    entropy: bool = False,
    sum_pi_squared: bool = False,
    k: int = 0,
) -> HeadOutputs:
    """Return log-probs and more of the logits hidden @ weight^T, of which only a part exists at a time, forward and
    backward: some rows (`chunk_rows`), or in Triton some columns.

    The gradient of `hidden` is this rank's part, to be summed over the group; that of the weight is summed over the
    chunks in fp32. Collective over `group`, in the forward pass only.

    2 R (V / tp) hidden operations forward and 6 backward, a third of them to recompute the logits. At the sizes of
    language models these take longer than the memory traffic.

    The other arguments are those of `vocab_parallel_log_probs`, and k that of `vocab_parallel_topk_ids`.

    Args:
        hidden: (R, hidden).
        weight: (V / tp, hidden), this rank's rows.
        targets: (R, K) int64.
    """
    softmax = SplitSoftmax(group, vocab_size, temperature or 1.0)
    if use_triton("linear_log_prob", hidden, unless=_reason(targets, k)):
        from hpcrl.kernels.linear_log_prob_triton import LinearLogProbs

        return HeadOutputs(*LinearLogProbs.apply(hidden, weight, targets, softmax, entropy, sum_pi_squared))
    return HeadOutputs(*_ChunkedHead.apply(hidden, weight, targets, chunk_rows, softmax, entropy, sum_pi_squared, k))


def _reason(targets: Tensor, k: int) -> str:
    if k:
        return "the most likely tokens are requested"
    return f"a row has more than {MAX_TARGETS} targets" if targets.size(1) > MAX_TARGETS else ""


class _ChunkedHead(torch.autograd.Function):
    """Keeps three numbers per row for the backward pass, and the inputs."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        chunk_rows: int,
        softmax: SplitSoftmax,
        entropy: bool,
        sum_pi_squared: bool,
        k: int,
    ) -> tuple[Tensor | None, ...]:
        ids, chunks = [], []
        for rows in slices(len(hidden), chunk_rows):
            logits, ids_of_rows = logits_of(hidden[rows], weight), targets[rows]
            if k:
                ids.append(vocab_parallel_topk_ids(logits, k, group=softmax.group, vocab_size=softmax.vocab_size))
                ids_of_rows = torch.cat([ids_of_rows, ids[-1]], dim=1)
            chunks.append(softmax.sums(logits, ids_of_rows, entropy, sum_pi_squared)[0])
            del logits  # before the next chunk
        whole = RowSums._make(None if parts[0] is None else torch.cat(parts) for parts in zip(*chunks, strict=True))
        ctx.save_for_backward(hidden, weight, targets, whole.top, whole.log_sum, whole.entropies)
        ctx.softmax, ctx.chunk_rows = softmax, chunk_rows
        ctx.set_materialize_grads(False)
        log_probs, topk_log_probs = whole.log_probs.tensor_split([targets.size(1)], dim=1)
        topk = [torch.cat(ids), topk_log_probs.contiguous()] if k else [None, None]
        ctx.mark_non_differentiable(*(output for output in (whole.squares, *topk) if output is not None))
        return log_probs.contiguous(), whole.entropies, whole.squares, *topk

    @staticmethod
    def backward(
        ctx: Any, grad_log_probs: Tensor | None, grad_entropies: Tensor | None, *_: None
    ) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, top, log_sum, entropies = ctx.saved_tensors
        grad_hidden = torch.empty_like(hidden)
        into_sum = sums_in_fp32(weight)
        grad_weight = None
        if ctx.needs_input_grad[1]:
            grad_weight = weight.main_grad if into_sum else torch.zeros_like(weight, dtype=top.dtype)
        for rows in slices(len(hidden), ctx.chunk_rows):
            logits = logits_of(hidden[rows], weight)
            log_p = ctx.softmax.log_p(logits, top[rows], log_sum[rows])
            del logits
            grad = ctx.softmax.gradient(
                log_p,
                targets[rows],
                None if entropies is None else entropies[rows],
                None if grad_log_probs is None else grad_log_probs[rows],
                None if grad_entropies is None else grad_entropies[rows],
                len(weight),
            ).to(weight.dtype)
            del log_p
            grad_hidden[rows] = grad @ weight
            if grad_weight is not None and (into_sum or grad_weight.dtype == weight.dtype):
                add_product(grad_weight, grad.T, hidden[rows])
            elif grad_weight is not None:
                grad_weight.add_(grad.T @ hidden[rows])
            del grad
        if grad_weight is not None:
            grad_weight = added(weight) if into_sum else grad_weight.to(weight.dtype)
        return grad_hidden, grad_weight, *[None] * 6
