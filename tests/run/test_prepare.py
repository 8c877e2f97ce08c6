"""Rollout correction where samples are drawn with older weights."""

from __future__ import annotations

from typing import Any

import pytest

from hpcrl.config.schema import Config, RolloutCorrectionConfig
from hpcrl.run.job_config import with_presets


def resolved(mode: str, correction: dict[str, Any] | None) -> RolloutCorrectionConfig:
    template = {"async_training": {"mode": mode}, "algorithm": {"rollout_correction": correction}}
    first = with_presets(Config.model_validate(template))
    again = with_presets(Config.model_validate(first.model_dump()))
    assert again == first  # a resolved template means the same
    return first.algorithm.rollout_correction


@pytest.mark.parametrize("mode", ["one_step_off", "bounded_staleness"])
def test_asynchronous_modes_correct_by_token_unless_the_template_chooses(mode: str) -> None:
    for nothing in (None, {}, {"rollout_is": None}, {"rollout_is_threshold": 3.0}):
        found = resolved(mode, nothing)
        assert found.rollout_is == "token"
        assert found.rollout_is_threshold == (3.0 if nothing and "rollout_is_threshold" in nothing else 2.0)
    assert resolved(mode, {"preset": "disabled"}).rollout_is is None
    assert resolved(mode, {"rollout_is": "sequence"}).rollout_is == "sequence"
    assert resolved(mode, {"preset": "bypass_ppo_clip"}).rollout_is is None
    only_rejects = resolved(mode, {"rollout_rs": "token_k1", "rollout_rs_threshold": "0.5_2.0"})
    assert only_rejects.rollout_is is None


def test_synchronous_training_is_not_corrected_unasked() -> None:
    assert resolved("sync", None).rollout_is is None
