"""Every named rollout correction of verl, as the fields it sets; see tools/record_cases.py."""

from __future__ import annotations

from typing import Any

FORMAT = "json"
IS = ("token_is", "seq_is", "token_icepop", "seq_is_rs")
RS = ("geo_rs", "geo_rs_seq_tis", "geo_rs_token_tis", "k3_rs", "k3_rs_seq_tis", "k3_rs_token_tis")
BYPASS = ("ppo_clip", "ppo_clip_geo_rs", "ppo_clip_k3_rs")
BYPASS_PG = ("is", "token_icepop", "geo_rs", "geo_rs_seq_tis", "geo_rs_token_tis")
CASES: dict[str, dict[str, Any]] = {
    name: {}
    for name in (
        "disabled",
        *(f"decoupled_{name}" for name in IS + RS),
        *(f"bypass_{name}" for name in BYPASS),
        *(f"bypass_pg_{name}" for name in BYPASS_PG),
    )
}


def reference(name: str, inputs: dict[str, Any]) -> dict[str, Any]:
    from dataclasses import fields

    from verl.trainer.config.algorithm import RolloutCorrectionConfig

    preset = getattr(RolloutCorrectionConfig, name)()
    return {field.name: getattr(preset, field.name) for field in fields(preset) if field.name != "_target_"}
