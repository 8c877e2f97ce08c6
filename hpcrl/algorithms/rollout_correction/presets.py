"""Rollout corrections by name, as verl's `RolloutCorrectionConfig.<name>()`."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from hpcrl.algorithms.registry import Registry
from hpcrl.algorithms.rollout_correction.settings import RolloutCorrection

TOKEN_TIS: dict[str, Any] = {"rollout_is": "token", "rollout_is_threshold": 2.0}
SEQ_TIS: dict[str, Any] = {"rollout_is": "sequence", "rollout_is_threshold": 2.0}
TOKEN_ICEPOP: dict[str, Any] = {"rollout_is": "token", "rollout_is_threshold": "0.5_5.0"}
GEO_RS: dict[str, Any] = {"rollout_rs": "seq_mean_k1", "rollout_rs_threshold": "0.999_1.001"}
K3_RS: dict[str, Any] = {"rollout_rs": "seq_mean_k3", "rollout_rs_threshold": 0.01}
SEQ_RS: dict[str, Any] = {"rollout_rs": "seq_sum_k1", "rollout_rs_threshold": "0.5_2.0"}
PPO_CLIP: dict[str, Any] = {"bypass_mode": True, "loss_type": "ppo_clip"}
REINFORCE: dict[str, Any] = {"bypass_mode": True, "loss_type": "reinforce"}

PRESETS: Registry[RolloutCorrection] = Registry("rollout correction preset")
for _name, _parts in {
    "disabled": (),
    "decoupled_token_is": (TOKEN_TIS,),
    "decoupled_seq_is": (SEQ_TIS,),
    "decoupled_token_icepop": (TOKEN_ICEPOP,),
    "decoupled_seq_is_rs": (SEQ_TIS, SEQ_RS),
    "decoupled_geo_rs": (GEO_RS,),
    "decoupled_geo_rs_seq_tis": (GEO_RS, SEQ_TIS),
    "decoupled_geo_rs_token_tis": (GEO_RS, TOKEN_TIS),
    "decoupled_k3_rs": (K3_RS,),
    "decoupled_k3_rs_seq_tis": (K3_RS, SEQ_TIS),
    "decoupled_k3_rs_token_tis": (K3_RS, TOKEN_TIS),
    "bypass_ppo_clip": (PPO_CLIP,),
    "bypass_ppo_clip_geo_rs": (PPO_CLIP, GEO_RS),
    "bypass_ppo_clip_k3_rs": (PPO_CLIP, K3_RS),
    "bypass_pg_is": (REINFORCE, SEQ_TIS),
    "bypass_pg_token_icepop": (REINFORCE, TOKEN_ICEPOP),
    "bypass_pg_geo_rs": (REINFORCE, GEO_RS),
    "bypass_pg_geo_rs_seq_tis": (REINFORCE, GEO_RS, SEQ_TIS),
    "bypass_pg_geo_rs_token_tis": (REINFORCE, GEO_RS, TOKEN_TIS),
}.items():
    PRESETS.add(_name, RolloutCorrection(**{key: value for part in _parts for key, value in part.items()}))


def preset(name: str, **overrides: Any) -> RolloutCorrection:
    """The preset with some fields set otherwise, as `rollout_is_threshold=4.0`."""
    known = [field.name for field in fields(RolloutCorrection)]
    unknown = sorted(set(overrides) - set(known))
    if unknown:
        raise ValueError(f"preset {name!r} was given {', '.join(unknown)}; expected fields out of {', '.join(known)}")
    return replace(PRESETS.get(name), **overrides)
