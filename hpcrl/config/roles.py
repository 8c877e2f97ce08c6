"""Declarations of roles: worker class, config section, head, whether it trains, what is offloaded. No torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from hpcrl.config.schema import Config, ModelConfig, Section

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
