"""Where roles run: pools of world ranks, and how each role divides its pool."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hpcrl.config.roles import RoleSpec
from hpcrl.config.schema import Config, ModelConfig, RolePlacement
from hpcrl.config.yaml_core import ConfigError
from hpcrl.runtime.layout import Layout

AXES = ("tp", "pp", "cp", "vpp", "ep", "etp")


@dataclass(frozen=True)
class PlacedRole(Layout):
    """Where a role runs: its layout, on the ranks of a pool in ascending order."""

    pool: str = ""

    @property
    def grid(self) -> dict[str, Any]:
        """The arguments of `Layout`."""
        return {"ranks": self.ranks, **{axis: getattr(self, axis) for axis in AXES}}


def place(config: Config, used: Sequence[RoleSpec], world_size: int) -> dict[str, PlacedRole]:
    """Ranks and layout of each role; ConfigError, one line, where its pool or its model cannot be divided so."""
    placement = config.placement
    pools = {
        name: parse_ranks(text, world_size, key=f"placement.pools.{name}") for name, text in placement.pools.items()
    }
    roles = {}
    for spec in used:
        name = spec.name
        role: RolePlacement = getattr(placement, name)
        if role.pool not in pools:
            nearest = difflib.get_close_matches(role.pool, pools, n=1)
            hint = f"did you mean {nearest[0]}?" if nearest else f"known pools: {', '.join(pools)}"
            raise ConfigError(f"placement.{name}.pool={role.pool} is not in placement.pools; {hint}")
        for axis in AXES[1:] if spec.is_engine else ():
            if (axis_size := getattr(role, axis)) > 1:
                raise ConfigError(
                    f"placement.{name}.{axis}={axis_size} is not supported: a rollout engine splits all weights by tp, "
                    "and has as many replicas as that leaves; use 1"
                )
        model = spec.architecture(config)
        # A config.json has its own sizes, which are checked where it is read.
        if model.path is None and not model.hf_config:
            _check_shape(model)
            _check_divides_model(name, role, model)
        ranks = pools[role.pool]
        sizes = {axis: getattr(role, axis) for axis in AXES}
        for axes in (("tp", "pp", "cp"), ("etp", "ep", "pp")):
            factors = [sizes[axis] for axis in axes]
            if len(ranks) % math.prod(factors):
                raise ConfigError(
                    f"placement.{name}: {'*'.join(axes)}={'*'.join(map(str, factors))}={math.prod(factors)} does not "
                    f"divide the {len(ranks)} ranks of pool {role.pool}; the product must be "
                    f"{_either(divisors(len(ranks)))}"
                )
        roles[name] = PlacedRole(ranks, **sizes, pool=role.pool)
    return roles


def _check_shape(model: ModelConfig) -> None:
    heads, groups = model.num_attention_heads, model.num_query_groups
    if heads % groups:
        raise ConfigError(
            f"model.num_query_groups={groups} does not divide num_attention_heads={heads}; "
            f"use {_either(divisors(heads))}"
        )
    if model.head_dim is None and model.hidden_size % heads:
        raise ConfigError(
            f"model.num_attention_heads={heads} does not divide hidden_size={model.hidden_size}; "
            "change one of them or set model.head_dim"
        )
    head_dim = model.head_dim or model.hidden_size // heads
    if head_dim % 2:
        raise ConfigError(f"model.head_dim={head_dim} is odd; rotary embeddings turn pairs, so use an even one")


def _check_divides_model(name: str, role: RolePlacement, model: ModelConfig) -> None:
    sizes = {
        "num_attention_heads": model.num_attention_heads,
        "num_query_groups": model.num_query_groups,
        "ffn_hidden_size": model.ffn_hidden_size,
    }
    for key, size in sizes.items():
        if size % role.tp:
            raise ConfigError(
                f"placement.{name}.tp={role.tp} does not divide {key}={size}; "
                f"use {_either(divisors(math.gcd(*sizes.values())))}"
            )
    experts = {"ep": ("num_experts", model.num_experts)}
    experts["etp"] = "moe_ffn_hidden_size", model.moe_ffn_hidden_size or model.ffn_hidden_size
    for axis, (key, number) in experts.items():
        size = getattr(role, axis)
        if size > 1 and not model.num_experts:
            raise ConfigError(f"placement.{name}.{axis}={size} divides experts, and model: has none; use 1")
        if number % size:
            raise ConfigError(
                f"placement.{name}.{axis}={size} does not divide {key}={number}; use {_either(divisors(number))}"
            )
    if role.pp > model.num_layers:
        raise ConfigError(
            f"placement.{name}.pp={role.pp} exceeds num_layers={model.num_layers}; use {model.num_layers} or less"
        )


def parse_ranks(text: str, world_size: int, *, key: str = "ranks") -> tuple[int, ...]:
    """World ranks of a pool string, ascending: "*" is all, "0-3,6" is 0 1 2 3 6. `key` names it in errors."""
    if text.strip() == "*":
        return tuple(range(world_size))
    ranks: set[int] = set()
    for item in text.split(","):
        match = re.fullmatch(r"\s*(\d+)\s*(?:-\s*(\d+)\s*)?", item, re.ASCII)
        if not match:
            raise ConfigError(
                f'{key}={text!r} has {item.strip()!r}; expected "*", or ranks such as "0-63" or "0,2,4-7"'
            )
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first:
            raise ConfigError(f"{key}={text!r} counts down in {item.strip()!r}; use {last}-{first}")
        if last >= world_size:
            raise ConfigError(
                f"{key}={text!r} names rank {max(first, world_size)}, and the job has {world_size} "
                f"(0 to {world_size - 1}); start more ranks or name fewer"
            )
        span = range(first, last + 1)
        if not ranks.isdisjoint(span):
            raise ConfigError(f"{key}={text!r} names rank {min(ranks.intersection(span))} twice; name it once")
        ranks.update(span)
    return tuple(sorted(ranks))


def divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]


def _either(choices: Sequence[int]) -> str:
    """(1, 2, 4) is "1, 2 or 4"."""
    *most, last = map(str, choices)
    return f"{', '.join(most)} or {last}" if most else last
