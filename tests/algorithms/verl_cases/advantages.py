"""Inputs of every advantage estimator, and verl's advantages and returns of them."""

from __future__ import annotations

from typing import Any

import numpy as np

ESTIMATORS: dict[str, tuple[str, ...]] = {  # and the tensors that each needs
    "gae": ("values",),
    "grpo": ("index",),
    "grpo_vectorized": ("index",),
    "gdpo": ("index", "reward_components"),
    "grpo_passk": ("index",),
    "reinforce_plus_plus": (),
    "reinforce_plus_plus_baseline": ("index",),
    "rloo": ("index",),
    "rloo_vectorized": ("index",),
    "opo": ("index",),
    "remax": ("reward_baselines",),
    "gpg": ("index",),
    "optimal_token_baseline": ("index", "old_log_probs", "sum_pi_squared"),
    "tir_optimal_token_baseline": ("index", "old_log_probs", "sum_pi_squared"),
}
FP32_INSIDE = ("grpo_vectorized", "gdpo")  # verl computes these in fp32 whatever it is given


def batch(seed: int, kind: str, dtype: str, mask_dtype: str, width: int, sizes: tuple[int, ...]) -> dict[str, Any]:
    """Groups of the given sizes, shuffled; tool tokens in the middle, an empty response."""
    rng = np.random.default_rng(seed)
    index = rng.permutation(np.repeat([f"prompt {i}" for i in range(len(sizes))], sizes)).astype(object)
    size = len(index)
    lengths = rng.integers(1, width + 1, size)
    lengths[rng.integers(size)] = width
    lengths[rng.integers(size)] = 0
    inside = np.arange(width)[None] < lengths[:, None]
    mask = inside & (rng.random((size, width)) < 0.75)
    last = np.maximum(lengths - 1, 0)
    outcome = {"noise": rng.normal(size=size), "correct": rng.integers(0, 2, size) * 1.0, "equal": np.full(size, 0.5)}
    rewards = np.zeros((size, width))
    rewards[np.arange(size), last] = outcome.get(kind, outcome["noise"]) * (lengths > 0)
    if kind == "dense":
        rewards = rng.normal(size=(size, width)) * inside
    if kind == "large":
        rewards = rewards * 30
    chance = rng.uniform(0.05, 1.0, (size, width))
    return {
        "token_level_rewards": rewards.astype(dtype),
        "response_mask": mask.astype(mask_dtype),
        "index": index,
        "values": rng.normal(size=(size, width)).astype(dtype),  # in the padding too
        "old_log_probs": (np.log(chance) * inside).astype(dtype),
        "sum_pi_squared": (chance**2 + rng.uniform(0, 1, (size, width)) * (1 - chance) ** 2).astype(dtype),
        "rollout_is_weights": rng.uniform(0, 2, (size, width)).astype(dtype),
        "reward_baselines": rng.normal(size=size).astype(dtype),
        "reward_components": {
            "acc": rng.integers(0, 2, size).astype(dtype),
            "format": rng.normal(size=size).astype(dtype),
            "unused": rng.normal(size=size).astype(dtype),
        },
    }


BATCHES: dict[str, tuple[int, str, str, str, int, tuple[int, ...]]] = {
    "correct": (1, "correct", "float32", "int64", 9, (4, 4, 4)),
    "dense": (2, "dense", "float32", "float32", 9, (5, 2, 3)),
    "large": (3, "large", "float32", "int64", 7, (3, 6)),
    "alone": (4, "noise", "float64", "float64", 8, (1, 3, 1, 2)),
    "fp64": (5, "dense", "float64", "int64", 8, (3, 3, 4)),
    "fp64, fp64 mask": (6, "dense", "float64", "float64", 8, (2, 5)),
    "equal": (7, "equal", "float64", "int64", 6, (4, 4)),
}

# what is not the default, by estimator
OPTIONS: dict[str, list[dict[str, Any]]] = {
    "gae": [{"gamma": 0.9, "lam": 0.7}],
    "reinforce_plus_plus": [{"gamma": 0.9}],
    "grpo": [{"norm_adv_by_std_in_grpo": False}],
    "grpo_vectorized": [{"norm_adv_by_std_in_grpo": False}],
    "grpo_passk": [{"norm_adv_by_std_in_grpo": False}],
    "gdpo": [{"gdpo_reward_keys": ["format", "acc"], "gdpo_reward_weights": [0.3, 2.0]}],
    "optimal_token_baseline": [{"handle_zero_tail": False}],
    "tir_optimal_token_baseline": [{"handle_zero_tail": False}],
}


def cases() -> dict[str, dict[str, Any]]:
    """`<estimator>, <batch>[, <option>]` -> estimator, config, tensors."""
    found = {}
    for name, needs in ESTIMATORS.items():
        default = {"gdpo_reward_keys": ["acc", "format"]} if name == "gdpo" else {}
        for kind, how in BATCHES.items():
            if name == "grpo_passk" and 1 in how[-1]:
                continue
            inputs = batch(*how)
            tensors = {key: inputs[key] for key in ("token_level_rewards", "response_mask", *needs)}
            for config in [default, *OPTIONS.get(name, [])]:
                changed = "".join(f", {key}" for key in config if config is not default)
                found[f"{name}, {kind}{changed}"] = {"estimator": name, "config": config, "tensors": tensors}
            if name.endswith("token_baseline"):
                weighted = tensors | {"rollout_is_weights": inputs["rollout_is_weights"]}
                found[f"{name}, {kind}, weighted"] = {"estimator": name, "config": {}, "tensors": weighted}
    return found


CASES = cases()


def tolerance(inputs: dict[str, Any]) -> float:
    """Times max(1, |x|)."""
    fp64 = inputs["tensors"]["token_level_rewards"].dtype == np.float64
    return 1e-10 if fp64 and inputs["estimator"] not in FP32_INSIDE else 1e-5


def reference(name: str, inputs: dict[str, Any]) -> dict[str, np.ndarray]:
    import torch
    from verl.trainer.config import AlgoConfig
    from verl.trainer.ppo import core_algos

    estimator, config, given = inputs["estimator"], dict(inputs["config"]), dict(inputs["tensors"])
    components, index = given.pop("reward_components", None), given.pop("index", None)
    tensors: dict[str, Any] = {key: torch.from_numpy(array.copy()) for key, array in given.items()}
    if index is not None:
        tensors["index"] = index
    if estimator == "gae":
        tensors |= {"gamma": config.pop("gamma", 1.0), "lam": config.pop("lam", 1.0)}
    elif "norm_adv_by_std_in_grpo" in config and estimator != "grpo_passk":
        tensors["norm_adv_by_std_in_grpo"] = config.pop("norm_adv_by_std_in_grpo")
    elif "handle_zero_tail" in config:
        tensors["handle_zero_tail"] = config.pop("handle_zero_tail")
    if components is not None:
        width = tensors["response_mask"].shape[1]
        size = len(tensors["response_mask"])
        tensors["non_tensor_batch"] = components
        tensors["batch"] = {
            "prompts": torch.zeros(size, 1),
            "attention_mask": torch.ones(size, 1 + width, dtype=torch.int64),
        }
    if estimator != "gae":
        tensors["config"] = AlgoConfig(**config)
    advantages, returns = core_algos.get_adv_estimator_fn(estimator)(**tensors)
    return {"advantages": advantages.numpy(), "returns": returns.numpy()}
