"""Batches and settings on which rollout correction is compared with verl's; see tools/record_cases.py."""

from __future__ import annotations

from typing import Any

import numpy as np


def _batch(seed: int, spread: float, dtype: str = "float32", size: int = 6, width: int = 9) -> dict[str, np.ndarray]:
    """Log-probs of a rollout and of a training engine that differs by `spread` nats; numbers in the padding too."""
    rng = np.random.default_rng(seed)
    rollout = -rng.exponential(1.0, (size, width))
    old = np.minimum(rollout + spread * rng.standard_normal((size, width)), 0.0)
    lengths = rng.integers(1, width + 1, size)
    lengths[0] = width
    mask = (np.arange(width) < lengths[:, None]).astype(np.int64)
    return {"old": old.astype(dtype), "rollout": rollout.astype(dtype), "mask": mask}


def _tools_and_empty(seed: int, spread: float, dtype: str = "float32") -> dict[str, np.ndarray]:
    """Tool tokens in the middle of the first two sequences, no response in the third, one token in the fourth."""
    batch = _batch(seed, spread, dtype)
    batch["mask"][0, 3:6] = 0
    batch["mask"][1, 1] = 0
    batch["mask"][2] = 0
    batch["mask"][3] = np.arange(9) == 0
    return batch


def _equal(seed: int) -> dict[str, np.ndarray]:
    batch = _batch(seed, 0.0)
    return {**batch, "old": batch["rollout"]}


def _huge(seed: int) -> dict[str, np.ndarray]:
    """Log-ratios beyond the safety bound, both ways."""
    batch = _batch(seed, 0.3)
    batch["old"][0, 1], batch["old"][1, 0] = -30.0, -25.0
    batch["rollout"][3, 0], batch["rollout"][4, 0] = -28.0, -2.0
    batch["old"][3, 0] = -0.01
    batch["mask"][:5, :2] = 1
    return batch


BATCHES = {
    "small": _batch(1, 0.05),
    "wide": _batch(2, 0.7),
    "tools": _tools_and_empty(3, 0.5),
    "fp64": _tools_and_empty(4, 0.4, "float64"),
    "equal": _equal(5),
    "huge": _huge(6),
    "single": {name: column[:1] for name, column in _batch(7, 0.4).items()},
    "one_token": _batch(8, 0.4, size=1, width=1),
}
RS_OPTIONS = {
    "k1": ("token_k1,seq_sum_k1,seq_mean_k1", "0.6_1.5,0.3_4.0,0.9_1.05"),
    "k2": ("token_k2,seq_sum_k2,seq_mean_k2,seq_max_k2", "0.1"),
    "k3": ("seq_max_k3,seq_mean_k3,seq_sum_k3,token_k3", "0.2,0.05,0.4,0.1"),
}
CONFIGS: dict[str, dict[str, Any]] = {
    "off": {},
    "token_tis": {"rollout_is": "token", "rollout_is_threshold": 1.3},
    "sequence_tis_normalized": {
        "rollout_is": "sequence",
        "rollout_is_threshold": "2.0",
        "rollout_is_batch_normalize": True,
    },
    "token_icepop_normalized": {
        "rollout_is": "token",
        "rollout_is_threshold": "0.4_1.6",
        "rollout_is_batch_normalize": True,
    },
    "sequence_icepop": {"rollout_is": "sequence", "rollout_is_threshold": "0.1_9.0"},
    **{f"rs_{name}": {"rollout_rs": options, "rollout_rs_threshold": t} for name, (options, t) in RS_OPTIONS.items()},
    "both": {
        "rollout_is": "token",
        "rollout_is_threshold": 2,
        "rollout_rs": "seq_mean_k1, token_k1,token_k1",
        "rollout_rs_threshold": 1.2,
    },
}
CASES: dict[str, dict[str, Any]] = {
    f"{batch}-{config}": {**BATCHES[batch], "config": CONFIGS[config]} for batch in BATCHES for config in CONFIGS
}
for _config in ("token_icepop_normalized", "sequence_tis_normalized"):  # with an fp64 mask the 1e-8 of a mean shows
    _fp64 = {**BATCHES["fp64"], "mask": BATCHES["fp64"]["mask"].astype(np.float64)}
    CASES[f"fp64_mask-{_config}"] = {**_fp64, "config": CONFIGS[_config]}


def reference(name: str, inputs: dict[str, Any]) -> dict[str, np.ndarray]:
    """weights where there are any, mask, and the metrics as sorted names and their values."""
    import torch
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_rejection_mask

    weights, mask, metrics = compute_rollout_correction_and_rejection_mask(
        torch.tensor(inputs["old"]), torch.tensor(inputs["rollout"]), torch.tensor(inputs["mask"]), **inputs["config"]
    )
    names = sorted(metrics)
    found = {
        "mask": mask.numpy().astype(np.int8),
        "metric_names": np.array(names),
        "metrics": np.array([metrics[key] for key in names]),
    }
    return found if weights is None else {**found, "weights": weights.batch["rollout_is_weights"].numpy()}
