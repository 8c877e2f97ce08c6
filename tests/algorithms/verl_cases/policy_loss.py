"""Batches and settings on which policy losses are compared with verl's; see tools/record_cases.py.

Outputs of a case: `loss` (5,) and `gradient` (5, B, T) by log_prob, one per aggregation mode; `names` and `metrics`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

MODES = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean")
LOSSES = "vanilla gspo sapo gpg cispo dppo_tv dppo_kl dro geo_mean clip_cov kl_cov bypass_mode".split()


def _batch(seed: int, spread: float, dtype: str, mask: str, size: int = 6, width: int = 9) -> dict[str, np.ndarray]:
    """Log-probs that moved by `spread` nats; tool tokens in the middle, a response without tokens, advantages that are
    0 or equal over a response, and numbers in the padding."""
    rng = np.random.default_rng(seed)
    old = -rng.exponential(1.0, (size, width))
    new = np.minimum(old + spread * rng.standard_normal((size, width)), -1e-3)
    advantages = rng.standard_normal((size, width))
    advantages[0] = 0.7
    lengths = rng.integers(1, width + 1, size)
    lengths[0] = width
    valid = np.arange(width) < lengths[:, None]
    valid[0, 2:4] = False
    if size > 1:
        advantages[1], valid[2] = 0.0, False
    floats = {"log_prob": new, "old_log_prob": old, "advantages": advantages, "weights": rng.uniform(0, 2, old.shape)}
    return {**{name: x.astype(dtype) for name, x in floats.items()}, "response_mask": valid.astype(mask)}


def _huge(seed: int) -> dict[str, np.ndarray]:
    """Ratios far beyond every clip, both ways, under advantages of both signs."""
    batch = _batch(seed, 0.5, "float32", "bool")
    for column, (row, jump) in enumerate([(0, 4.0), (0, -4.0), (1, 25.0), (3, 3.0), (3, -3.0), (4, 5.0), (4, -25.0)]):
        batch["response_mask"][row, column] = True
        batch["old_log_prob"][row, column] = -30.0 if jump > 0 else -0.01
        batch["log_prob"][row, column] = batch["old_log_prob"][row, column] + jump
        batch["advantages"][row, column] = (-1.0) ** column
    return batch


BATCHES = {
    "near": _batch(1, 0.1, "float32", "float32"),
    "wide": _batch(2, 0.8, "float32", "int64"),
    "fp64": _batch(3, 0.5, "float64", "float64"),
    "fp64_bool": _batch(4, 0.5, "float64", "bool"),
    "huge": _huge(5),
    "single": _batch(6, 0.4, "float32", "float32", size=1),
    "on_policy": _batch(7, 0.0, "float32", "float32"),
}
PLAIN: dict[str, Any] = {"clip_ratio_c": 3.0, "policy_loss.dro_beta": 0.5}
TUNED: dict[str, Any] = {
    "clip_ratio": 0.9,
    "clip_ratio_low": 0.15,
    "clip_ratio_high": None,
    "clip_ratio_c": 2.0,
    "tau_pos": 1.5,
    "tau_neg": 0.7,
    "loss_scale_factor": 5,
    "policy_loss.dro_beta": 0.1,
    "policy_loss.clip_cov_ratio": 0.2,
    "policy_loss.clip_cov_lb": 0.05,
    "policy_loss.clip_cov_ub": 2.0,
    "policy_loss.kl_cov_ratio": 0.3,
    "policy_loss.ppo_kl_coef": None,
}
CORRECTION = "policy_loss.rollout_correction"
CORRECTIONS: dict[str, dict[str, Any]] = {
    "clip": {"rollout_is": "token", "rollout_rs": "token_k1", "rollout_rs_threshold": "0.5_2.0"},
    "reinforce": {"loss_type": "reinforce"},
    "reinforce_is": {"loss_type": "reinforce", "rollout_is": "sequence", "rollout_is_batch_normalize": True},
    "reinforce_rs": {
        "loss_type": "reinforce",
        "rollout_is": "token",
        "rollout_is_threshold": "0.5_1.5",
        "rollout_rs": "seq_mean_k3",
        "rollout_rs_threshold": 0.1,
    },
}
MICRO = {  # the batch is one of two replicas' share of a larger mini-batch
    **TUNED,
    "global_batch_info.dp_size": 2,
    "global_batch_info.batch_num_tokens": 100,
    "global_batch_info.global_batch_size": 40,
    "global_batch_info.loss_scale_factor": 7,
}
CASES: dict[str, dict[str, Any]] = {}
for _loss in LOSSES:
    for _batch_name, _config, _weighted in (
        ("near", PLAIN, False),
        ("wide", TUNED, True),
        ("fp64", TUNED, True),
        ("fp64_bool", PLAIN, False),
        ("huge", PLAIN, True),
        ("single", TUNED, False),
        ("on_policy", PLAIN, False),
    ):
        CASES[f"{_loss}-{_batch_name}"] = {
            "loss": _loss,
            "batch": BATCHES[_batch_name],
            "weighted": _weighted,
            "config": _config,
        }
for _loss in ("vanilla", "sapo", "geo_mean", "bypass_mode"):
    CASES[f"{_loss}-micro"] = {"loss": _loss, "batch": BATCHES["fp64"], "weighted": True, "config": MICRO}
for _loss in ("dppo_tv", "dppo_kl"):
    CASES[f"{_loss}-no_bound"] = {"loss": _loss, "batch": BATCHES["huge"], "weighted": False, "config": {}}
for _name, _correction in CORRECTIONS.items():
    for _batch_name in ("wide", "fp64"):
        CASES[f"bypass_mode-{_batch_name}-{_name}"] = {
            "loss": "bypass_mode",
            "batch": BATCHES[_batch_name],
            "weighted": False,
            "config": {f"{CORRECTION}.{key}": value for key, value in _correction.items()},
        }


def reference(name: str, inputs: dict[str, Any]) -> dict[str, np.ndarray]:
    import torch
    from omegaconf import OmegaConf
    from verl.trainer.ppo.core_algos import get_policy_loss_fn
    from verl.workers.config import ActorConfig, PolicyLossConfig

    correction: dict[str, Any] = {}
    nested: dict[str, Any] = {"rollout_correction": correction}
    actor: dict[str, Any] = {}
    batch_info: dict[str, Any] = {}
    folders = {"": actor, "policy_loss": nested, CORRECTION: correction, "global_batch_info": batch_info}
    for key, value in inputs["config"].items():
        folder, _, last = key.rpartition(".")
        folders[folder][last] = value
    batch_info = {"loss_scale_factor": actor.pop("loss_scale_factor", None), **batch_info}
    if inputs["config"]:
        config = ActorConfig(
            strategy="fsdp",
            rollout_n=1,
            ppo_micro_batch_size_per_gpu=1,
            policy_loss=PolicyLossConfig(**nested),
            **actor,
        )
        config.global_batch_info.update(batch_info)
    else:  # the fallbacks of the code, which ActorConfig's defaults hide
        clips = {"clip_ratio": 0.2, "clip_ratio_low": None, "clip_ratio_high": None}
        config = OmegaConf.create({**clips, "global_batch_info": batch_info})
    batch = {key: torch.from_numpy(array) for key, array in inputs["batch"].items()}
    weights = batch.pop("weights") if inputs["weighted"] else None
    batch.pop("weights", None)
    losses, gradients = [], []
    for mode in MODES:
        batch["log_prob"] = batch["log_prob"].detach().clone().requires_grad_()
        torch.manual_seed(0)
        loss, metrics = get_policy_loss_fn(inputs["loss"])(
            **batch, loss_agg_mode=mode, config=config, rollout_is_weights=weights
        )
        loss.backward()
        losses.append(loss.detach().numpy())
        gradients.append(batch["log_prob"].grad.numpy())
    names = sorted(metrics)
    return {
        "loss": np.stack(losses),
        "gradient": np.stack(gradients),
        "names": np.array(names, dtype=str),
        "metrics": np.array([metrics[key] for key in names], dtype=np.float64),
    }
