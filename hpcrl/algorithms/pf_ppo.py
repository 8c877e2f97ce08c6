"""PF-PPO: resampling of a batch by score."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hpcrl.algorithms.parameters import np, param


@dataclass(frozen=True)
class PfPpo:
    """`algorithm.pf_ppo`."""

    reweight_method: Literal["pow", "max_min", "max_random"] = param("pow", help="weights of the resampling")
    weight_pow: float = param(2.0, help="pow: exponent of the absolute score")


def pf_ppo_weights(scores: np.ndarray, params: PfPpo) -> np.ndarray:
    """Weights by which samples are drawn: fp64 (N,) (PF-PPO, arXiv 2409.06957).

    pow: |score|^weight_pow; max_min: 1 at the highest and the lowest score, else 0; max_random: 0.4 at the highest
    score, else 0.1; to all of them 1e-8 is added. Quirk of verl: pow prefers very negative scores as it does very
    positive ones.

    Args:
        scores: (N,), before a KL penalty (verl: the sum of token_level_scores), of the whole batch over all replicas.
    """
    scores = np.asarray(scores, dtype=np.float64)
    if not len(scores):
        return scores
    highest, lowest = scores.max(), scores.min()
    if params.reweight_method == "pow":
        weights = np.abs(scores) ** params.weight_pow
    elif params.reweight_method == "max_min":
        weights = np.where((scores == highest) | (scores == lowest), 1.0, 0.0)
    else:
        weights = np.where(scores == highest, 0.4, 0.1)
    if not np.isfinite(weights).all():
        raise ValueError(f"pf_ppo weights need finite scores and |score|^{params.weight_pow}; some are NaN or infinite")
    return np.maximum(weights + 1e-8, 1e-8)


def pf_ppo_rows(scores: np.ndarray, uniforms: np.ndarray, params: PfPpo) -> np.ndarray:
    """int64 (N,): the sample that stands at each place of the new batch, drawn with replacement.

    Nothing else is random, so every layout of ranks draws the same.

    Args:
        uniforms: (N,) in [0, 1), from a generator keyed by seed and step: place i gets the first sample whose
            cumulative share exceeds uniforms[i].
    """
    if np.shape(uniforms) != np.shape(scores):
        raise ValueError(f"{np.shape(uniforms)} uniforms for {np.shape(scores)} scores; expected one per place")
    cumulative = np.cumsum(pf_ppo_weights(scores, params))
    if not len(cumulative):
        return np.zeros(0, dtype=np.int64)
    drawn = np.searchsorted(cumulative, np.asarray(uniforms) * cumulative[-1], side="right")
    return np.minimum(drawn, len(cumulative) - 1)
