"""Correction of the mismatch between the policy that wrote the tokens and the one that is trained, by name.

Modes. Decoupled: three policies, rollout, old (recomputed by the training engine) and current; weights and rejection
come from old against rollout, once per step. Bypass: old is rollout, and the loss itself calls `correct_rollout` with
the current policy's log-probs. "When Speed Kills Stability", Liu et al. 2025, richardli.xyz/rl-collapse.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from hpcrl.algorithms.masked import Reduce, one_replica
from hpcrl.algorithms.metrics import Metric
from hpcrl.algorithms.rollout_correction.metrics import off_policy_metrics
from hpcrl.algorithms.rollout_correction.rejection import reject
from hpcrl.algorithms.rollout_correction.settings import RolloutCorrection
from hpcrl.algorithms.rollout_correction.weights import importance_weights


class Corrected(NamedTuple):
    """weights: (B, T) in the log-probs' dtype, 0 where the mask was 0, or None; response_mask: (B, T) without what was
    rejected, in its own dtype; metrics: `rollout_corr/*`, mergeable over replicas and micro-batches."""

    weights: torch.Tensor | None
    response_mask: torch.Tensor
    metrics: dict[str, Metric]


def correct_rollout(
    old_log_probs: torch.Tensor,
    rollout_log_probs: torch.Tensor,
    response_mask: torch.Tensor,
    cfg: RolloutCorrection,
    reduce: Reduce = one_replica,
) -> Corrected:
    """Weights, mask and metrics from log_ratio = old_log_probs - rollout_log_probs; all (B, T), log-probs in nats.

    In bypass mode `old_log_probs` are the current policy's. Nothing returned carries gradients. Without rollout_is and
    rollout_rs only the metrics are new. Weights and rejection both read the given mask: a rejected token keeps its
    weight and counts in every metric. `reduce` is called once where rollout_is_batch_normalize is set (by replicas
    without samples too), else never. verl raises where no token of the batch counts; here metrics are NaN.
    """
    shapes = {tuple(x.shape) for x in (old_log_probs, rollout_log_probs, response_mask)}
    if len(shapes) != 1:
        found = f"{tuple(old_log_probs.shape)}, {tuple(rollout_log_probs.shape)} and {tuple(response_mask.shape)}"
        raise ValueError(f"old, rollout log-probs and mask are {found}; expected one shape (B, T); pad them alike")
    unused = response_mask == 0
    log_probs = old_log_probs.detach().masked_fill(unused, 0.0)
    rollout = rollout_log_probs.detach().masked_fill(unused, 0.0)
    log_ratio = log_probs - rollout
    metrics = off_policy_metrics(log_probs, rollout, response_mask)
    weights, mask = None, response_mask
    if cfg.rollout_is is not None:
        weights, of_weights = importance_weights(
            log_ratio, response_mask, cfg.rollout_is, cfg.bounds, cfg.rollout_is_batch_normalize, reduce
        )
        metrics |= of_weights
    if cfg.rollout_rs is not None:
        mask, of_rejection = reject(log_ratio, response_mask, cfg.criteria)
        metrics |= of_rejection
    return Corrected(weights, mask, metrics)
