"""Random batches of responses for tests of policy losses."""

from __future__ import annotations

import numpy as np
import torch

LOSSES = "vanilla gspo sapo gpg cispo dppo_tv dppo_kl dro geo_mean clip_cov kl_cov bypass_mode".split()
CONFIG = {
    "clip_ratio_low": 0.15,
    "clip_ratio_high": 0.25,
    "clip_ratio_c": 1.8,
    "tau_pos": 1.5,
    "tau_neg": 2.0,
    "loss_scale_factor": 5.0,
    "policy_loss.dro_beta": 0.3,
    "policy_loss.clip_cov_ratio": 0.1,
    "policy_loss.clip_cov_lb": 0.01,
    "policy_loss.kl_cov_ratio": 0.2,
}


def batch_of(seed: int, size: int = 9, width: int = 7, dtype: torch.dtype = torch.float64) -> dict[str, torch.Tensor]:
    """Padded columns of `size` responses: tool tokens in the middle, some without tokens; finite in the padding."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, width + 1, size)
    valid = (np.arange(width) < lengths[:, None]) & (rng.random((size, width)) < 0.8)
    old = -rng.exponential(1.0, (size, width))
    columns = {
        "log_prob": old + 0.4 * rng.standard_normal((size, width)),
        "old_log_prob": old,
        "advantages": rng.standard_normal((size, width)),
        "rollout_is_weights": rng.uniform(0, 2, (size, width)),
    }
    tensors = {name: torch.tensor(column, dtype=dtype) for name, column in columns.items()}
    return {**tensors, "response_mask": torch.tensor(valid).to(dtype)}
