"""Softmax and most likely tokens of a vocabulary that is split over tensor-parallel ranks.

Logits are (R, V / tp): this rank's columns, rank i of `group` holding the i-th block. Columns of ids >= vocab_size have
no token and probability 0. Every function is collective over `group`, whose ranks pass the same rows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

LOG2_E = math.log2(math.e)


def vocab_parallel_topk_ids(logits: Tensor, k: int, *, group: ProcessGroup, vocab_size: int) -> Tensor:
    """Return the ids of each row's k largest logits, in descending order, lower ids first among equal ones: (R, k)
    int64.

    The result so does not depend on how the vocabulary is split. Logits are fp32 or narrower. Raises ValueError if k is
    larger than the vocabulary.
    """
    if k > vocab_size:
        raise ValueError(f"k={k} is larger than vocab_size={vocab_size}; use {vocab_size} or fewer")
    rows, width = logits.shape
    first = group.rank() * width
    x = logits.detach()[:, : max(0, min(width, vocab_size - first))]
    count = min(k, x.size(1))
    values, ids = x.topk(count)
    # torch.topk breaks ties arbitrarily: logits equal to the last one are candidates too.
    candidates = max(count, int((x >= values[:, -1:]).sum(dim=1).max()))
    if candidates > count:
        values, ids = x.topk(candidates)
    keys = _order_keys(values, first + ids).topk(count).values
    if group.size() > 1:
        keys = torch.nn.functional.pad(keys, (0, k - count), value=torch.iinfo(torch.int64).min)
        gathered = keys.new_empty(group.size(), rows, k)
        dist.all_gather_into_tensor(gathered, keys, group=group)
        keys = gathered.transpose(0, 1).reshape(rows, -1).topk(k).values
    return _LOW - (keys & _LOW)


_LOW = 2**32 - 1


def _order_keys(values: Tensor, ids: Tensor) -> Tensor:
    """Return int64 keys, all different in a row, ordered by (value, -id).

    The upper half is the bits of the fp32 value; those of negative values are inverted so that integers order as the
    values do.
    """
    bits = (values.float() + 0.0).view(torch.int32)  # the sum makes -0 a 0
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (ordered.to(torch.int64) << 32) | (_LOW - ids)


class RowSums(NamedTuple):
    """Results of the sums over the vocabulary for R rows; fp32, or fp64 if the logits are."""

    log_probs: Tensor  # (R, K) log p at the targets
    entropies: Tensor | None  # (R,) -sum p log p
    squares: Tensor | None  # (R,) sum p^2
    top: Tensor  # (R,) the largest logit
    log_sum: Tensor  # (R,) log sum exp((x - top) / T)

    @classmethod
    def of(cls, sums: Tensor, top: Tensor, num_targets: int, entropy: bool, sum_pi_squared: bool) -> RowSums:
        """`sums` (1 + K + entropy + sum_pi_squared, R) over the vocabulary, with z = (x - top) / T: of exp(z); z at the
        K targets; of z exp(z); of exp(z)^2."""
        log_sum = sums[0].log()
        return cls(
            log_probs=(sums[1 : 1 + num_targets] - log_sum).T.contiguous(),
            entropies=log_sum - sums[1 + num_targets] / sums[0] if entropy else None,
            squares=sums[-1] / sums[0].square() if sum_pi_squared else None,
            top=top,
            log_sum=log_sum,
        )


class OwnSums(NamedTuple):
    """Sums over one rank's columns for R rows, with e = exp((x - top) / T); fp32."""

    top: Tensor  # (R,) the largest logit; -inf if the rank has no column
    total: Tensor  # (R,) sum e
    weighted: Tensor | None  # (R,) sum e (x - top) / T
    squares: Tensor | None  # (R,) sum e^2
    at_targets: Tensor  # (R, K) logits at the targets that are in these columns
    here: Tensor  # (R, K) bool: targets in these columns


def fast_exp(x: Tensor) -> Tensor:
    """Return exp(x) as a power of 2, which torch's CPU kernel computes four times faster; with the error of a rounded
    x log2(e), 6e-8 |x| in fp32."""
    return (x * LOG2_E).exp2_() if x.device.type == "cpu" else x.exp()


@dataclass(frozen=True)
class SplitSoftmax:
    """p = softmax(x / T) of logits x (R, V / tp), of which this rank's v columns below `vocab_size` count."""

    group: ProcessGroup
    vocab_size: int
    temperature: float

    def sums(self, logits: Tensor, targets: Tensor, entropy: bool, sum_pi_squared: bool) -> tuple[RowSums, Tensor]:
        """Return the sums for targets (R, K) int64, and (x - top) / T, (R, v). Collective, without gradients."""
        rows, width = logits.shape
        num_targets = targets.size(1)
        valid = self.num_columns(width)
        parallel = self.group.size() > 1
        x = logits[:, :valid].to(torch.promote_types(logits.dtype, torch.float32))
        top = x.amax(dim=1) if valid else x.new_full((rows,), -torch.inf)
        if parallel:
            dist.all_reduce(top, dist.ReduceOp.MAX, group=self.group)
        x = self._scaled(x - top.unsqueeze(1))

        # One all-reduce for all sums over the vocabulary: exp, targets, exp * x, exp^2.
        sums = x.new_zeros(1 + num_targets + entropy + sum_pi_squared, rows)
        exponentials = fast_exp(x)
        torch.sum(exponentials, dim=1, out=sums[0])
        if valid:
            column, here = self.columns_of(targets, width)
            sums[1 : 1 + num_targets] = (x.gather(1, column) * here).T
        if sum_pi_squared:
            # A norm, because it needs no further tensor of the size of the logits.
            sums[-1] = torch.linalg.vector_norm(exponentials, dim=1).square()
        if entropy:
            torch.sum(exponentials.mul_(x), dim=1, out=sums[1 + num_targets])
        del exponentials
        if parallel:
            dist.all_reduce(sums, group=self.group)
        return RowSums.of(sums, top, num_targets, entropy, sum_pi_squared), x

    def combined(self, own: OwnSums) -> RowSums:
        """Combine the sums of all ranks' columns. Collective."""
        top = own.top
        if self.group.size() > 1:
            top = top.clone()
            dist.all_reduce(top, dist.ReduceOp.MAX, group=self.group)
        # A rank without columns has the largest logit -inf and nothing to shift.
        shift = torch.where(own.total > 0, (own.top - top) / self.temperature, 0.0)
        factor = shift.exp()
        x = ((own.at_targets - top.unsqueeze(1)) / self.temperature).masked_fill_(~own.here, 0.0)
        sums = [own.total * factor, *x.T]
        if own.weighted is not None:
            sums.append(factor * (own.weighted + shift * own.total))
        if own.squares is not None:
            sums.append(own.squares * factor.square())
        stacked = torch.stack(sums)
        if self.group.size() > 1:
            dist.all_reduce(stacked, group=self.group)
        num_targets = own.at_targets.size(1)
        return RowSums.of(stacked, top, num_targets, own.weighted is not None, own.squares is not None)

    def log_p(self, logits: Tensor, top: Tensor, log_sum: Tensor) -> Tensor:
        """Return log p (R, v), bitwise as in `sums`; on this rank only."""
        x = logits[:, : self.num_columns(logits.size(1))].to(top.dtype)
        return self._scaled(x - top.unsqueeze(1)).sub_(log_sum.unsqueeze(1))

    def gradient(
        self,
        log_p: Tensor,
        targets: Tensor,
        entropies: Tensor | None,
        grad_log_probs: Tensor | None,
        grad_entropies: Tensor | None,
        width: int,
    ) -> Tensor:
        """Return the gradient of the logits (R, width), from those of log p at the targets (R, K) and of the entropy H
        (R,).

        d log p_y / d x_i = (1[i = y] - p_i) / T and d H / d x_i = -p_i (log p_i + H) / T. On this rank only.
        """
        factor = 0.0 if grad_log_probs is None else -grad_log_probs.sum(dim=1, keepdim=True)
        if grad_entropies is not None:
            assert entropies is not None
            factor = (log_p + entropies.unsqueeze(1)).mul_(-grad_entropies.unsqueeze(1)).add_(factor)
        grad = fast_exp(log_p).mul_(factor)
        if grad_log_probs is not None and grad.size(1):
            column, here = self.columns_of(targets, width)
            # In two steps: the first target may be among the others, and the order of additions must be fixed.
            at_targets = grad_log_probs * here
            for part in (slice(0, 1), slice(1, None)):
                grad.scatter_add_(1, column[:, part], at_targets[:, part])
        grad = self._scaled(grad)
        return torch.nn.functional.pad(grad, (0, width - grad.size(1))) if grad.size(1) < width else grad

    def _scaled(self, x: Tensor) -> Tensor:
        """Divide `x` by the temperature in place."""
        return x if self.temperature == 1 else x.div_(self.temperature)

    def num_columns(self, width: int) -> int:
        return max(0, min(width, self.vocab_size - self.group.rank() * width))

    def columns_of(self, targets: Tensor, width: int) -> tuple[Tensor, Tensor]:
        """Return this rank's column of each target, an arbitrary one if it has none, and whether it has one."""
        valid = self.num_columns(width)
        column = targets - self.group.rank() * width
        return column.clamp(0, max(valid - 1, 0)), (column >= 0) & (column < valid)
