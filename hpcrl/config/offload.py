"""Which parts of a role's model leave the device while other roles compute, and what may be shared."""

from __future__ import annotations

from typing import Literal

from hpcrl.config.roles import ACTOR, RoleSpec
from hpcrl.config.schema import Config

Part = Literal["parameters", "gradients", "optimizer"]
KEYS: dict[Part, str] = {"parameters": "param_offload", "gradients": "grad_offload", "optimizer": "optimizer_offload"}
HOST_BLOCK = 64 * 2**20  # bytes; host memory for what is away comes in blocks of this size


def offloaded(config: Config, spec: RoleSpec) -> tuple[Part, ...]:
    section = spec.config_of(config)
    return tuple(part for part, key in KEYS.items() if getattr(section, key, False))


def shares_weights(config: Config) -> bool:
    """Whether the rollout engine may take the actor's own tensors: they take turns, the weights stay where they are,
    and no adapters have updates that are in none of them."""
    alias, mode = config.rollout.checkpoint_engine.alias, config.async_training.mode
    moves = "parameters" in offloaded(config, ACTOR)
    return alias and mode == "sync" and not moves and config.model.lora_rank == 0
