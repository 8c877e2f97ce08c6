"""What of `trainer.checkpoint:` does not go together."""

from __future__ import annotations

from hpcrl.config.errors import ConfigError
from hpcrl.config.schema import TrainerConfig


def check_checkpoints(trainer: TrainerConfig) -> None:
    """ConfigError with one line for the first combination that cannot work."""
    checkpoint = trainer.checkpoint
    if checkpoint.keep_best is not None and checkpoint.best_metric is None:
        raise ConfigError(
            f"trainer.checkpoint.keep_best={checkpoint.keep_best} does not say by which metric; set "
            "trainer.checkpoint.best_metric to a key of metrics.jsonl, such as val-core/countdown/acc/mean@1"
        )
    if checkpoint.best_metric is not None and checkpoint.keep_best is None:
        raise ConfigError(
            f"trainer.checkpoint.best_metric={checkpoint.best_metric} does not say how many checkpoints stay; set "
            "trainer.checkpoint.keep_best"
        )
    for key in ("keep_every", "keep_best"):
        number = getattr(checkpoint, key)
        if number is not None and trainer.max_ckpt_to_keep is None:
            raise ConfigError(
                f"trainer.checkpoint.{key}={number} changes nothing while all checkpoints stay; set "
                "trainer.max_ckpt_to_keep to how many of the newest stay beside them"
            )
