"""KL estimators, the penalty in the reward and the value loss, as verl has them; see tools/record_cases.py."""

from __future__ import annotations

from typing import Any

import numpy as np

KINDS = ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3", "kl+", "k1+", "abs+", "mse+", "k2+", "low_var_kl+", "k3+")


def _batch(seed: int, spread: float, dtype: str, mask: str) -> dict[str, np.ndarray]:
    """Two sets of log-probs `spread` nats apart, scores and values; one response has a hole, another no token."""
    rng = np.random.default_rng(seed)
    floats = {"log_prob": -rng.exponential(1.0, (4, 7)), "scores": rng.standard_normal((4, 7))}
    floats["ref_log_prob"] = floats["log_prob"] + spread * rng.standard_normal((4, 7))
    for name in ("vpreds", "values", "returns"):
        floats[name] = rng.standard_normal((4, 7))
    valid = np.arange(7) < np.array([7, 5, 0, 3])[:, None]
    valid[0, 2:4] = False
    return {**{name: x.astype(dtype) for name, x in floats.items()}, "response_mask": valid.astype(mask)}


CASES: dict[str, dict[str, Any]] = {
    "near": _batch(1, 0.2, "float32", "int64"),
    "far": _batch(2, 15.0, "float32", "float32"),
    "fp64": _batch(3, 1.0, "float64", "float64"),
    "fp64_int": _batch(4, 1.0, "float64", "int64"),
}


def reference(name: str, inputs: dict[str, Any]) -> dict[str, np.ndarray]:
    import torch
    from verl.protocol import DataProto
    from verl.trainer.ppo.core_algos import FixedKLController, compute_value_loss, kl_penalty
    from verl.trainer.ppo.ray_trainer import apply_kl_penalty
    from verl.utils.torch_functional import masked_mean

    batch = {key: torch.from_numpy(array) for key, array in inputs.items()}
    found = {}
    for kind in KINDS:
        log_prob = batch["log_prob"].clone().requires_grad_()
        value = kl_penalty(log_prob, batch["ref_log_prob"], kind)
        value.sum().backward()
        found[f"kl {kind}"] = np.stack([value.detach().numpy(), log_prob.grad.numpy()])
    data = DataProto.from_dict(
        {
            "old_log_probs": batch["log_prob"],
            "ref_log_prob": batch["ref_log_prob"],
            "token_level_scores": batch["scores"],
            "response_mask": batch["response_mask"],
        }
    )
    data, metrics = apply_kl_penalty(data, FixedKLController(0.3), "low_var_kl")
    found["rewards"] = data.batch["token_level_rewards"].numpy()
    found["reward_kl_penalty"] = np.array(metrics["actor/reward_kl_penalty"])
    vpreds = batch["vpreds"].clone().requires_grad_()
    loss, clipfrac = compute_value_loss(vpreds, batch["returns"], batch["values"], batch["response_mask"], 0.5)
    loss.backward()
    found["value_loss"], found["value_gradient"] = loss.detach().numpy(), vpreds.grad.numpy()
    found["value_metrics"] = np.array([clipfrac, masked_mean(vpreds, batch["response_mask"]).item()])
    return found
