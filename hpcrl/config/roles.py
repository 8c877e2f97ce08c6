"""Roles: their declarations (worker class, config section, head, what is offloaded), and where they run: pools of world
ranks, and how each role divides its pool. No torch."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from hpcrl.config.schema import Config, ModelConfig, RolePlacement, Section
from hpcrl.config.yaml_core import ConfigError
from hpcrl.runtime.layout import Layout

Head = Literal["lm", "value", "reward"]


@dataclass(frozen=True)
class RoleSpec:
    """Declaration of a role, from which its placement, groups, memory plan, checkpoint folder and offload follow.

    A role with a `head` has a megatron model. A role without `on` has a layout of its own, `placement.<name>`; one with
    `on` runs on the ranks of those roles, and may use their workers.
    """

    name: str
    worker: str | type = field(default="", repr=False)  # class, or "module:Class", which is imported when it is built
    section: str | type[Section] = ""  # dotted path of its config section, or the class of a new section <name>
    head: Head | None = None
    trains: bool = False  # the section has `optim`; checkpoints hold its model as <name>/
    on: tuple[str, ...] = ()
    metric_prefix: str = ""  # of the metrics of its calls: of a second role with the workers of a built-in one
    is_engine: bool = False  # generates: a rollout engine, whose weights are split by tp only
    max_tokens: str = ""  # key of the tokens of a micro-batch, in the section; null there: as many as the actor's

    @property
    def path(self) -> str:
        """Dotted path of the config section."""
        return self.section if isinstance(self.section, str) and self.section else self.name

    def config_of(self, config: Config) -> Any:
        """The role's config section; None if it has none."""
        found: Any = config
        for key in self.path.split("."):
            found = getattr(found, key, None)
        return found

    def architecture(self, config: Config) -> ModelConfig:
        """What the role's model looks like: `model` of its section, or else that of the policy."""
        own: ModelConfig | None = getattr(self.config_of(config), "model", None)
        return own or config.model

    def init_from(self, config: Config) -> str | None:
        """Where the weights of a frozen model come from."""
        section = self.config_of(config)
        own = getattr(section, "model", None)
        return getattr(section, "init_from", None) or (own.path if own is not None else None)

    def token_budget(self, config: Config) -> int:
        """Tokens of a micro-batch of one model replica."""
        own: int | None = getattr(self.config_of(config), self.max_tokens, None) if self.max_tokens else None
        return own or config.actor.ppo_max_token_len_per_gpu


ACTOR = RoleSpec(
    "actor", "hpcrl.workers.actor:ActorWorker", head="lm", trains=True, max_tokens="ppo_max_token_len_per_gpu"
)
# The actor's weights in the actor's layout, without gradients and optimizer.
POLICY = replace(ACTOR, worker="hpcrl.workers.frozen:PolicyWorker", trains=False)
CRITIC = RoleSpec(
    "critic", "hpcrl.workers.actor:CriticWorker", head="value", trains=True, max_tokens="ppo_max_token_len_per_gpu"
)
REF = RoleSpec("ref", "hpcrl.workers.frozen:RefWorker", head="lm", max_tokens="log_prob_max_token_len_per_gpu")
TEACHER = RoleSpec(
    "teacher", "hpcrl.workers.frozen:TeacherWorker", head="lm", max_tokens="log_prob_max_token_len_per_gpu"
)
REWARD = RoleSpec(
    "reward",
    "hpcrl.workers.frozen:RewardModelWorker",
    section="reward.reward_model",
    head="reward",
    max_tokens="max_token_len_per_gpu",
)
ROLLOUT = RoleSpec("rollout", "hpcrl.workers.rollout:RolloutWorker", is_engine=True)
JUDGE = RoleSpec("judge", "hpcrl.workers.judge:JudgeWorker", section="reward.judge", is_engine=True)
SCORER = RoleSpec("scorer", "hpcrl.workers.scorer:ScorerWorker", on=("rollout",))
REFIT = RoleSpec("refit", "hpcrl.workers.weight_transfer:RefitWorker", on=("actor", "rollout"))
EXPORT = RoleSpec("export", "hpcrl.workers.weight_transfer:ExportWorker", on=("actor",))
ARCHIVE = RoleSpec("archive", "hpcrl.workers.records:ArchiveWorker", on=("actor",))
GENERATIONS = RoleSpec("generations", "hpcrl.workers.records:GenerationsWorker", on=("rollout",))


def judge_weights(config: Config) -> str | None:
    """Where the judge's weights come from; None: random ones."""
    own = config.reward.judge.model
    return config.reward.judge.init_from or (own.path if own else config.model.init_from or config.model.path)


PLACED = (ACTOR, CRITIC, REF, TEACHER, REWARD, ROLLOUT, JUDGE)  # in the order in which they are built


def with_own(built_in: Iterable[RoleSpec], own: Iterable[RoleSpec]) -> list[RoleSpec]:
    """`built_in`, each replaced by the own role of the same name if there is one, then the other own roles."""
    left = {spec.name: spec for spec in own}
    return [*(left.pop(spec.name, spec) for spec in built_in), *left.values()]


Part = Literal["parameters", "gradients", "optimizer"]
KEYS: dict[Part, str] = {"parameters": "param_offload", "gradients": "grad_offload", "optimizer": "optimizer_offload"}
HOST_BLOCK = 64 * 2**20  # bytes; host memory for what is away comes in blocks of this size


def offloaded(config: Config, spec: RoleSpec) -> tuple[Part, ...]:
    """What of a role's model is in host memory while other roles compute."""
    section = spec.config_of(config)
    return tuple(part for part, key in KEYS.items() if getattr(section, key, False))


def shares_weights(config: Config) -> bool:
    """Whether the rollout engine may use the actor's own tensors: both run in turn, the weights are not offloaded, and
    no adapters have updates that the weights lack."""
    alias, mode = config.rollout.checkpoint_engine.alias, config.async_training.mode
    moves = "parameters" in offloaded(config, ACTOR)
    return alias and mode == "sync" and not moves and config.model.lora_rank == 0


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
