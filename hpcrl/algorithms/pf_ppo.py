"""PF-PPO: a batch drawn anew from itself, by score."""

from __future__ import annotations

import numpy as np

from hpcrl.algorithms.registry import UnknownName

METHODS = ("pow", "max_min", "max_random")


def pf_ppo_weights(scores: np.ndarray, method: str = "pow", weight_pow: float = 2.0) -> np.ndarray:
    """How likely each sample is drawn, up to a factor: fp64 (N,) (PF-PPO, arXiv 2409.06957).

    scores: (N,), before a KL penalty (verl: the sum of token_level_scores), of the whole batch over all replicas.
    pow: |score|^weight_pow; max_min: 1 at the highest and the lowest score, else 0; max_random: 0.4 at the highest
    score, else 0.1; to all of them 1e-8 is added. Quirk of verl: pow likes a very negative score as much as a very
    positive one.
    """
    scores = np.asarray(scores, dtype=np.float64)
    if method not in METHODS:
        raise UnknownName(f"unknown pf_ppo.reweight_method {method!r}; there are {', '.join(METHODS)}")
    if not len(scores):
        return scores
    highest, lowest = scores.max(), scores.min()
    if method == "pow":
        weights = np.abs(scores) ** weight_pow
    elif method == "max_min":
        weights = np.where((scores == highest) | (scores == lowest), 1.0, 0.0)
    else:
        weights = np.where(scores == highest, 0.4, 0.1)
    if not np.isfinite(weights).all():
        raise ValueError(f"pf_ppo weights need finite scores and |score|^{weight_pow}; some are NaN or infinite")
    return np.maximum(weights + 1e-8, 1e-8)


def pf_ppo_rows(scores: np.ndarray, uniforms: np.ndarray, method: str = "pow", weight_pow: float = 2.0) -> np.ndarray:
    """int64 (N,): the sample that stands at each place of the new batch, drawn with replacement.

    uniforms: (N,) in [0, 1), from a generator keyed by seed and step: place i gets the first sample whose cumulative
    share exceeds uniforms[i]. Nothing else is random, so every layout of ranks draws the same.
    """
    if np.shape(uniforms) != np.shape(scores):
        raise ValueError(f"{np.shape(uniforms)} uniforms for {np.shape(scores)} scores; expected one per place")
    cumulative = np.cumsum(pf_ppo_weights(scores, method, weight_pow))
    if not len(cumulative):
        return np.zeros(0, dtype=np.int64)
    drawn = np.searchsorted(cumulative, np.asarray(uniforms) * cumulative[-1], side="right")
    return np.minimum(drawn, len(cumulative) - 1)
