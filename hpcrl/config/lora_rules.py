"""What of `model.lora_rank` does not go together with the rest."""

from __future__ import annotations

from hpcrl.config.errors import ConfigError
from hpcrl.config.schema import Config


def check_lora(config: Config) -> None:
    """ConfigError with one line where models that are trained whole, or not at all, are to have adapters."""
    others = {"teacher.model": config.teacher.model, "reward.reward_model.model": config.reward.reward_model.model}
    for key, model in others.items():
        if model is not None and model.lora_rank > 0:
            raise ConfigError(f"{key}.lora_rank={model.lora_rank}: only the policy has adapters; use 0")
    if config.model.lora_rank > 0 and config.rollout.exact:
        raise ConfigError(
            f"model.lora_rank={config.model.lora_rank} with rollout.exact=true: the engine computes with merged "
            "weights, whose log-probs have other last bits than those of training; set rollout.exact=false"
        )


def refuse_lora(config: Config, command: str) -> None:
    """ConfigError for a job that trains a whole model."""
    if config.model.lora_rank > 0:
        raise ConfigError(
            f"model.lora_rank={config.model.lora_rank} is for the policy, and `hpcrl {command}` trains a whole model; "
            "use model.lora_rank=0"
        )
