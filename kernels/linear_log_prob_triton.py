"""Log-probs from hidden states by columns of the vocabulary: the library's matrix products, and kernels that read each
product once.

Columns rather than rows, because a chunk's gradient of the weight is then complete and nothing of the weight's size is
summed. Logits and their sums are fp32, also for bf16 operands: products return their accumulators.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from hpcrl.kernels import HEAD_CHUNK_BYTES, HEAD_CHUNKS
from hpcrl.kernels.fp32_product import add_product, added, product, slices, sums_in_fp32
from hpcrl.kernels.vocabulary import OwnSums, SplitSoftmax

MAX_COLUMNS, MIN_COLUMNS = 16384, 256  # of a chunk: a program processes a row; products need some width
BLOCK = 1024  # columns per step of a program


@triton.jit(do_not_specialize=["first"])
def add_columns(
    logits, targets, top, total, weighted, squares, at_targets, stride, first, columns, temperature, num_targets,
    ENTROPY: tl.constexpr, SQUARES: tl.constexpr, TARGETS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Add a chunk of logits, `columns` from `first` on, to the sums of `OwnSums`; one program per row.

    Online softmax (Milakov and Gimelshein 2018, arXiv:1805.02867).
    """
    row = tl.program_id(0).to(tl.int64)
    x_max, e_sum = tl.load(top + row), tl.load(total + row)
    if ENTROPY:
        ez_sum = tl.load(weighted + row)
    if SQUARES:
        ee_sum = tl.load(squares + row)
    for start in range(0, columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        x = tl.load(logits + row * stride + column, mask=column < columns, other=-float("inf")).to(tl.float32)
        new_max = tl.maximum(x_max, tl.max(x, 0))
        # While all logits are -inf, differences are undefined.
        shift = tl.where(e_sum > 0, (x_max - new_max) / temperature, 0.0)
        factor = tl.exp(shift)
        z = (x - tl.where(new_max == -float("inf"), 0.0, new_max)) / temperature
        e = tl.exp(z)
        if ENTROPY:
            ez_sum = factor * (ez_sum + shift * e_sum) + tl.sum(e * tl.where(e > 0, z, 0.0), 0)
        if SQUARES:
            ee_sum = factor * factor * ee_sum + tl.sum(e * e, 0)
        e_sum = factor * e_sum + tl.sum(e, 0)
        x_max = new_max
    tl.store(top + row, x_max)
    tl.store(total + row, e_sum)
    if ENTROPY:
        tl.store(weighted + row, ez_sum)
    if SQUARES:
        tl.store(squares + row, ee_sum)
    number = tl.arange(0, TARGETS)
    place = row * num_targets + number
    target = tl.load(targets + place, mask=number < num_targets, other=-1) - first
    here = (target >= 0) & (target < columns)
    x = tl.load(logits + row * stride + target, mask=here, other=0.0).to(tl.float32)
    tl.store(at_targets + place, x, mask=here)


@triton.jit(do_not_specialize=["first"])
def logits_gradient(
    logits, grad, targets, top, log_sum, entropies, grad_log_probs, grad_entropies, stride, grad_stride, first, columns,
    temperature, num_targets, LOG_PROBS: tl.constexpr, ENTROPY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The gradient of a chunk of logits as in `SplitSoftmax.gradient`; one program per BLOCK columns of a row."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + row * stride + column, mask=column < columns, other=-float("inf")).to(tl.float32)
    log_p = (x - tl.load(top + row)) / temperature - tl.load(log_sum + row)
    p = tl.exp(log_p)
    gradient = tl.zeros((BLOCK,), tl.float32)
    if ENTROPY:
        log_p = tl.where(p > 0, log_p, 0.0)
        gradient -= tl.load(grad_entropies + row) * p * (log_p + tl.load(entropies + row))
    if LOG_PROBS:
        for number in range(num_targets):
            upstream = tl.load(grad_log_probs + row * num_targets + number)
            target = tl.load(targets + row * num_targets + number) - first
            gradient += upstream * (tl.where(column == target, 1.0, 0.0) - p)
    gradient = (gradient / temperature).to(grad.dtype.element_ty)
    tl.store(grad + row * grad_stride + column, gradient, mask=column < columns)


class LinearLogProbs(torch.autograd.Function):
    """Keeps three numbers per row for the backward pass, and the inputs.

    Temporary memory: HEAD_CHUNK_BYTES of logits; in the backward pass also the gradients of HEAD_CHUNKS times as many
    in the weight's dtype, and the gradient of the hidden states in fp32. With more columns in the product that is added
    to the latter, it is read and written less often.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        softmax: SplitSoftmax,
        entropy: bool,
        sum_pi_squared: bool,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        hidden, targets = hidden.contiguous(), targets.contiguous()
        sums = softmax.combined(_own_sums(hidden, weight, targets, softmax, entropy, sum_pi_squared))
        ctx.save_for_backward(hidden, weight, targets, sums.top, sums.log_sum, sums.entropies)
        ctx.softmax = softmax
        ctx.set_materialize_grads(False)
        if sums.squares is not None:
            ctx.mark_non_differentiable(sums.squares)
        return sums.log_probs, sums.entropies, sums.squares

    @staticmethod
    def backward(
        ctx: Any, grad_log_probs: Tensor | None, grad_entropies: Tensor | None, _: None
    ) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, top, log_sum, entropies = ctx.saved_tensors
        rows, softmax = len(hidden), ctx.softmax
        upstream_grads = [None if grad is None else grad.contiguous() for grad in (grad_log_probs, grad_entropies)]
        first, valid = softmax.group.rank() * len(weight), softmax.num_columns(len(weight))
        grad_hidden = torch.zeros_like(hidden, dtype=torch.float32) if ctx.needs_input_grad[0] else None
        into_sum = sums_in_fp32(weight)
        grad_weight = torch.empty_like(weight) if ctx.needs_input_grad[1] and not into_sum else None
        if grad_weight is not None:  # the other columns have no token
            grad_weight[valid if rows else 0 :] = 0
        for columns in _chunks(rows, valid, HEAD_CHUNKS):
            part = weight[columns]
            grad = torch.empty(rows, len(part), dtype=weight.dtype, device=weight.device)
            for part_columns in _chunks(rows, len(part)):
                logits, place = product(hidden, part[part_columns].T), grad[:, part_columns]
                logits_gradient[(rows, triton.cdiv(logits.size(1), BLOCK))](
                    logits, place, targets, top, log_sum, entropies, *upstream_grads, logits.stride(0), place.stride(0),
                    first + columns.start + part_columns.start, logits.size(1), softmax.temperature, targets.size(1),
                    LOG_PROBS=upstream_grads[0] is not None, ENTROPY=upstream_grads[1] is not None, BLOCK=BLOCK,
                )  # fmt: skip
                del logits  # before the next chunk
            if grad_hidden is not None:
                add_product(grad_hidden, grad, part)
            if grad_weight is not None:
                torch.mm(grad.T, hidden, out=grad_weight[columns])
            elif ctx.needs_input_grad[1]:
                add_product(weight.main_grad[columns], grad.T, hidden)
            del grad, place
        if ctx.needs_input_grad[1] and into_sum:
            grad_weight = added(weight)
        return None if grad_hidden is None else grad_hidden.to(hidden.dtype), grad_weight, *[None] * 4


def _own_sums(
    hidden: Tensor, weight: Tensor, targets: Tensor, softmax: SplitSoftmax, entropy: bool, sum_pi_squared: bool
) -> OwnSums:
    rows, valid = len(hidden), softmax.num_columns(len(weight))
    begin = softmax.group.rank() * len(weight)
    top, total, weighted, squares = hidden.new_zeros(4, rows, dtype=torch.float32)
    top.fill_(-torch.inf)
    at_targets = torch.zeros_like(targets, dtype=torch.float32)
    for columns in _chunks(rows, valid):
        logits = product(hidden, weight[columns].T)
        add_columns[(rows,)](
            logits, targets, top, total, weighted, squares, at_targets, logits.stride(0), begin + columns.start,
            logits.size(1), softmax.temperature, targets.size(1),
            ENTROPY=entropy, SQUARES=sum_pi_squared, TARGETS=triton.next_power_of_2(targets.size(1)), BLOCK=BLOCK,
        )  # fmt: skip
        del logits  # before the next chunk
    here = (targets >= begin) & (targets < begin + valid)
    return OwnSums(top, total, weighted if entropy else None, squares if sum_pi_squared else None, at_targets, here)


def row_sums(logits: Tensor, columns: int, temperature: float) -> tuple[Tensor, Tensor]:
    """Return top and total of `OwnSums` of whole rows, fp32 (R, 1), over their first `columns`, always in one order."""
    top, total, unused = (logits.new_full((len(logits), 1), at, dtype=torch.float32) for at in (-torch.inf, 0.0, 0.0))
    if len(logits):
        add_columns[(len(logits),)](
            logits, torch.zeros_like(top, dtype=torch.int64), top, total, unused, unused, unused, logits.stride(0), 0,
            columns, float(temperature), 1, ENTROPY=False, SQUARES=False, TARGETS=1, BLOCK=BLOCK,
        )  # fmt: skip
    return top, total


def _chunks(rows: int, columns: int, times: int = 1) -> Iterator[slice]:
    """Divide `columns` into chunks whose logits take `times` HEAD_CHUNK_BYTES; none without rows."""
    width = HEAD_CHUNK_BYTES // (4 * max(rows, 1)) // MIN_COLUMNS * MIN_COLUMNS
    width = times * min(max(width, MIN_COLUMNS), MAX_COLUMNS)
    return slices(columns if rows else 0, width)
