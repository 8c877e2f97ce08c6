"""Advantage estimators: rewards of tokens to advantages and returns of tokens, by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

# importing a family registers its estimators
from hpcrl.algorithms.advantages import outcome, token_baseline, token_level  # noqa: F401
from hpcrl.algorithms.advantages.estimator import (
    ESTIMATORS,
    SETTINGS,
    AdvantageConfig,
    AdvEstimator,
    Result,
    register_adv_est,
)
from hpcrl.algorithms.config_keys import flat_config

__all__ = ["AdvEstimator", "AdvantageConfig", "advantage", "get_adv_estimator", "register_adv_est"]

# the other keys of the `algorithm` section, which estimators have no use for
OTHER_KEYS = frozenset(
    {
        "adv_estimator",
        "use_kl_in_reward",
        "kl_penalty",
        *(f"kl_ctrl.{key}" for key in ("type", "kl_coef", "horizon", "target_kl")),
        "use_pf_ppo",
        *(f"pf_ppo.{key}" for key in ("reweight_method", "weight_pow")),
        *(f"filter_groups.{key}" for key in ("enable", "metric", "max_num_gen_batches", "max_inflight_gen_batches")),
        *(f"rollout_correction.{key}" for key in ("preset", "bypass_mode", "loss_type")),
        *(f"rollout_correction.rollout_is{key}" for key in ("", "_threshold", "_batch_normalize")),
        *(f"rollout_correction.rollout_rs{key}" for key in ("", "_threshold")),
    }
)


def get_adv_estimator(name: str) -> AdvEstimator:
    return ESTIMATORS.get(name)


def advantage(
    name: str,
    config: Mapping[str, Any] | None = None,
    *,
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    **tensors: Any,
) -> Result:
    """Advantages and returns, both (B, T), of a whole batch, by the estimator that the YAML calls `name`.

    config: keys of verl's `algorithm` section, nested or dotted, or a whole config that has one; those that the
    estimator has no use for are ignored, unknown ones are a ValueError. tensors: what the estimator needs
    (`AdvEstimator.__call__` says of which shape), and `gamma` and `lam` where it uses them, which win over the config;
    anything else is a TypeError.

    >>> advantage("grpo", {"norm_adv_by_std_in_grpo": False}, token_level_rewards=r, response_mask=m, index=uid)
    """
    estimator = get_adv_estimator(name)
    settings = flat_config(config, "algorithm", SETTINGS | OTHER_KEYS)
    settings |= {key: tensors.pop(key) for key in ("gamma", "lam") if key in estimator.settings and key in tensors}
    cfg = AdvantageConfig(**{key: value for key, value in settings.items() if key in SETTINGS and value is not None})
    return estimator(token_level_rewards, response_mask, cfg=cfg, **tensors)
