"""A job template as the loop wants it: names written out as values, and what the algorithms object to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import TypeVar

from hpcrl.algorithms.registry import UnknownName
from hpcrl.algorithms.rollout_correction import RolloutCorrection, preset
from hpcrl.config.derive import Derived, check
from hpcrl.config.roles import RoleSpec
from hpcrl.config.schema import Config
from hpcrl.config.yaml_core import ConfigError

T = TypeVar("T")

ASYNCHRONOUS = "decoupled_token_is"  # truncated importance sampling, token by token


def with_presets(config: Config) -> Config:
    """`config` with the values of algorithm.rollout_correction.preset where the template gives none of its own.

    An asynchronous mode trains on samples of older weights: a template that chooses no correction there gets
    ASYNCHRONOUS; `preset: disabled` is a choice.

    Raises ConfigError for an unknown preset and for values that do not go together.
    """
    section = config.algorithm.rollout_correction
    chosen = (section.preset, section.rollout_is, section.rollout_rs, section.bypass_mode or None)
    if config.async_training.mode != "sync" and all(choice is None for choice in chosen):
        section = section.model_copy(update={"preset": ASYNCHRONOUS, "rollout_is": "token"})
    given = {name: getattr(section, name) for name in section.model_fields_set if name != "preset"}
    values = _in_section(
        "algorithm.rollout_correction",
        lambda: preset(section.preset, **given) if section.preset is not None else RolloutCorrection(**given),
    )
    algorithm = config.algorithm.model_copy(update={"rollout_correction": section.model_copy(update=asdict(values))})
    return config.model_copy(update={"algorithm": algorithm})


def derive(config: Config, world_size: int, own_roles: Sequence[RoleSpec] = ()) -> Derived:
    """Derived values of `hpcrl train`; ConfigError for what config, estimator and losses cannot do together."""
    from hpcrl.workers.actor_objective import ActorObjective  # with torch

    derived = check(config, world_size, own_roles=own_roles)
    _in_section("actor", lambda: ActorObjective(config, derived))
    return derived


def _in_section(section: str, make: Callable[[], T]) -> T:
    try:
        return make()
    except UnknownName:
        raise  # its line says what is unknown
    except ValueError as error:
        raise ConfigError(f"{section}: {error}") from None
