"""Sums over the tokens that count, and from one loss per token to one number."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias, get_args

from hpcrl.algorithms.metrics import Mean, Metric
from hpcrl.algorithms.parameters import UnknownName, torch

if TYPE_CHECKING:
    from torch import Tensor

LossAggMode = Literal["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean"]
Reduce: TypeAlias = "Callable[[Tensor], Tensor]"  # fp64 sums of one replica -> sums over all replicas


def one_replica(sums: Tensor) -> Tensor:
    """The `reduce` of a batch that is whole."""
    return sums


def masked_sum(x: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Sum of x * mask (same shape), over all or along dim; what x holds where mask is 0 does not matter."""
    return (x.masked_fill(mask == 0, 0.0) * mask).sum(dim)


def masked_mean(x: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Sum of x * mask / (sum of mask + 1e-8), over all or along dim."""
    return masked_sum(x, mask, dim) / (mask.sum(dim) + 1e-8)


def masked_whiten(x: Tensor, mask: Tensor, reduce: Reduce = one_replica) -> Tensor:
    """(x - mean) * rsqrt(var + 1e-8) with mean and unbiased variance of the valid tokens of all replicas.

    The variance is taken in a second pass, all sums in fp64, so that the split over replicas does not show. Fewer than
    two valid tokens on all replicas give 0 everywhere (verl raises).

    Quirks of verl: tokens with mask 0 are shifted and scaled like the others, so a caller that needs 0 there masks the
    result; means divide by count + 1e-8; what is done with the count is done in the dtype of the mask, fp32 for
    integers, which shows under fp64 values. One that is not followed: under fp32 verl sums in fp32, and where all
    values are equal what it returns is that rounding error times 1e4; here it is 0.

    Args:
        x, mask: (B, T); B may be 0 on a replica, which calls `reduce` (two times) like the others.
    """
    values, outside, weight = x.double(), mask == 0, mask.double()
    count, total = reduce(torch.stack([weight.sum(), (values.masked_fill(outside, 0.0) * weight).sum()]))
    n = count.to(torch.promote_types(mask.dtype, torch.float32))
    deviation = values - total / (n + 1e-8)
    squares = reduce((deviation.masked_fill(outside, 0.0).square() * weight).sum().reshape(1))[0]
    variance = squares / (n + 1e-8) * (n / (n - 1).clamp(min=1))
    return (deviation * torch.where(count > 1, torch.rsqrt(variance + 1e-8), 0.0)).to(x.dtype)


def finite_outside(x: Tensor, mask: Tensor) -> Tensor:
    """x with 0 for each NaN and infinity that stands where mask is 0; finite numbers there stay, as in verl."""
    return x.masked_fill((mask == 0) & ~x.isfinite(), 0.0)


MODES: tuple[str, ...] = get_args(LossAggMode)


@dataclass(frozen=True)
class TokenLosses:
    """The result of a loss function: the losses before aggregation, and its metrics.

    values: (B, T), or (B,) from a loss that has one number per sequence; carries gradients.
    response_mask: (B, T), the mask to aggregate with, if it is not the one that the loss was given.
    loss_agg_mode: the mode of the loss, if it has one of its own.
    """

    values: Tensor
    metrics: dict[str, Metric]
    response_mask: Tensor | None = None
    loss_agg_mode: str | None = None


@dataclass(frozen=True)
class LossNorm:
    """Counts of the global mini-batch: over all its micro-batches and replicas.

    batch_num_tokens: tokens with mask 1. global_batch_size: sequences. loss_scale_factor: the divisor of
    seq-mean-token-sum-norm, in tokens (verl: the padded response length).
    """

    batch_num_tokens: float
    global_batch_size: float
    loss_scale_factor: float | None = None

    @classmethod
    def of_whole(cls, response_mask: Tensor, loss_scale_factor: float | None = None) -> LossNorm:
        """verl's fallback for a batch (B, T) that is the whole mini-batch: quirk, `global_batch_size` leaves
        out sequences without tokens, and `loss_scale_factor` is the padded width T."""
        with_tokens = (response_mask.sum(dim=-1) > 0).sum()
        scale = response_mask.shape[-1] if loss_scale_factor is None else loss_scale_factor
        return cls(float(response_mask.sum()), float(with_tokens), float(scale))


def agg_loss(token_loss: Tensor, response_mask: Tensor, mode: str, norm: LossNorm) -> Tensor:
    """This part's share of the loss, a scalar: the sum over all micro-batches and replicas is the loss.

    There is no factor dp_size: gradients are summed over replicas, not averaged.
    With l the token losses, m the mask, N tokens and B sequences of the global mini-batch:
    token-mean: sum(l m) / N (DAPO, arXiv 2503.14476, eq. 12); token-sum: sum(l m);
    seq-mean-token-sum: sum(l m) / B; seq-mean-token-sum-norm: that / loss_scale_factor (Dr.GRPO, arXiv 2503.20783);
    seq-mean-token-mean: sum over sequences of [sum_t(l m) / (sum_t m + 1e-8)] / B (GRPO, arXiv 2402.03300, eq. 3).
    Quirk kept from verl: the 1e-8 has the mask's dtype, so it is lost in fp32. Not kept: without any token verl
    divides 0 by 0; here the share is 0.

    Args:
        token_loss, response_mask: (B, T).
    """
    match mode:
        case "token-mean":
            return masked_sum(token_loss, response_mask) / max(norm.batch_num_tokens, 1)
        case "token-sum":
            return masked_sum(token_loss, response_mask)
        case "seq-mean-token-sum":
            return masked_sum(token_loss, response_mask) / max(norm.global_batch_size, 1)
        case "seq-mean-token-sum-norm":
            if norm.loss_scale_factor is None:
                raise ValueError(f"loss_agg_mode={mode} needs loss_scale_factor; max_response_length is usual")
            scale = max(norm.global_batch_size, 1) * norm.loss_scale_factor
            return masked_sum(token_loss, response_mask) / scale
        case "seq-mean-token-mean":
            return masked_mean(token_loss, response_mask, dim=-1).sum() / max(norm.global_batch_size, 1)
    raise UnknownName(f"unknown loss_agg_mode {mode!r}; there are {', '.join(MODES)}")


def aggregate(losses: TokenLosses, response_mask: Tensor, mode: str, norm: LossNorm) -> Tensor:
    """`agg_loss` of what a loss function returned, with its own mask and mode where it has them.

    Losses per sequence (B,) are summed and divided by `global_batch_size`, whatever the mode.
    """
    if losses.values.ndim == 1:
        return losses.values.sum() / max(norm.global_batch_size, 1)
    mask = response_mask if losses.response_mask is None else losses.response_mask
    return agg_loss(losses.values, mask, losses.loss_agg_mode or mode, norm)


def token_mean(x: Tensor, mask: Tensor) -> Mean:
    """Mean of x (B, T), any dtype, over the tokens with mask 1, in fp64; 0 without tokens.

    As verl's masked_mean, the weight is sum(mask) + 1e-8 in the mask's dtype.
    """
    return Mean(masked_sum(x.detach().double(), mask.double()), (mask.sum() + 1e-8).double())
