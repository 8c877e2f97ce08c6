from __future__ import annotations

from typing import Any

import pytest

from hpcrl.config.rules import check_checkpoints
from hpcrl.config.schema import TrainerConfig
from hpcrl.config.yaml_core import ConfigError

CASES: list[tuple[dict[str, Any], str]] = [
    ({"keep_best": 2}, "set trainer.checkpoint.best_metric to a key"),
    ({"best_metric": "val/loss"}, "set trainer.checkpoint.keep_best"),
    ({"keep_every": 100}, "trainer.max_ckpt_to_keep=null"),
    ({"keep_best": 1, "best_metric": "val/loss"}, "trainer.max_ckpt_to_keep=null"),
]


@pytest.mark.parametrize(("checkpoint", "told"), CASES)
def test_what_would_do_nothing_is_refused(checkpoint: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        check_checkpoints(TrainerConfig.model_validate({"checkpoint": checkpoint, "max_ckpt_to_keep": None}))


@pytest.mark.parametrize("given", [{}, {"max_ckpt_to_keep": 2}])
def test_rules_together(given: dict[str, int]) -> None:
    checkpoint = {"keep_every": 100, "keep_best": 1, "best_metric": "val/loss", "best_mode": "min"}
    check_checkpoints(TrainerConfig.model_validate({"checkpoint": checkpoint} | given))
