"""Values derived from a config and a number of ranks, and the checks before any model is built.

Pure functions without torch or MPI, so a job template can be checked on a login node.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

from hpcrl.algorithms.aggregation import LossAggMode
from hpcrl.config.plugins import check_algorithms
from hpcrl.config.roles import (
    ACTOR,
    CRITIC,
    JUDGE,
    PLACED,
    REF,
    REWARD,
    ROLLOUT,
    TEACHER,
    PlacedRole,
    RoleSpec,
    place,
    with_own,
)
from hpcrl.config.rules import check_algorithm, check_checkpoints, check_judge, check_lora, check_rollout, loss_mode
from hpcrl.config.schema import Config
from hpcrl.config.yaml_core import ConfigError
from hpcrl.runtime.launcher import format_spans


@dataclass(frozen=True)
class RoleLayouts:
    """What every job derives from its config: the ranks and layout of each role that it needs."""

    world_size: int
    roles: dict[str, PlacedRole]
    rows: list[tuple[str, object, str]]  # further derived values for the log: name, value, unit


class JobDescription(Protocol):
    """What tools of a login node ask of a job's class, which is `hpcrl.run.job.Job` or one of its subclasses."""

    name: str
    file: str | None  # of a user's job
    trained_role: str | None  # "actor" for the policy
    saves_last: bool  # a checkpoint after the last step, whatever trainer.save_freq is

    def read_config(self, path: str, overrides: Sequence[str] = ()) -> Config: ...

    def prepare(self, config: Config) -> Config: ...

    def check(self, config: Config, num_ranks: int) -> RoleLayouts: ...

    def check_with_torch(self, config: Config, num_ranks: int) -> RoleLayouts: ...

    def own_specs(self) -> list[RoleSpec]: ...


@dataclass(frozen=True)
class Derived(RoleLayouts):
    """Derived values of `hpcrl train`. Token counts are per model replica, sizes are over all ranks."""

    needs_critic: bool
    needs_ref: bool
    ref_in_actor: bool  # the reference is the actor without its adapters, and no role of its own
    old_log_prob_in_update: bool  # the forward pass of a step's only update computes them
    needs_sum_pi_squared: bool
    needs_reward_baseline: bool  # one greedy response per prompt (ReMax)
    loss_mode: str  # the policy loss that runs
    max_sequence_length: int  # tokens of prompt and response
    samples_per_step: int
    actor_mini_batch_samples: int
    actor_updates_per_step: int  # optimizer steps
    critic_mini_batch_size: int  # prompts
    critic_ppo_epochs: int
    critic_loss_agg_mode: LossAggMode
    critic_updates_per_step: int  # optimizer steps; 0 without a critic
    loss_scale_factor: float  # the actor's divisor of seq-mean-token-sum-norm
    critic_loss_scale_factor: float


def check(config: Config, world_size: int, *, own_roles: Sequence[RoleSpec] = ()) -> Derived:
    """Derived values of `hpcrl train` on `world_size` ranks; ConfigError with one line for an impossible combination.

    Loads run.plugins. Without torch, an estimator or a loss of a plugin that needs it is not checked.

    Args:
        own_roles: roles that a job adds.
    """
    algorithm, actor, critic, data = config.algorithm, config.actor, config.critic, config.data
    chosen = {"algorithm": algorithm.adv_estimator, "actor.policy_loss": loss_mode(config)}
    chosen["reward"] = config.reward.reward_manager.name
    if config.distillation.enabled:
        chosen["distillation.distillation_loss"] = config.distillation.distillation_loss.loss_mode
    estimator = check_algorithms(config, chosen).get("algorithm")
    inputs, optional = (estimator.inputs, estimator.optional) if estimator is not None else ((), ())
    needs_ref = algorithm.use_kl_in_reward or actor.use_kl_loss
    # The model that the adapters started from is on the actor's ranks already.
    ref_in_actor = needs_ref and config.model.lora_rank > 0 and config.placement.ref == config.placement.actor
    needs = {
        ACTOR: True,
        CRITIC: "values" in inputs,
        REF: needs_ref and not ref_in_actor,
        TEACHER: config.distillation.enabled,
        REWARD: config.reward.reward_model.enable,
        ROLLOUT: True,
        JUDGE: config.reward.judge.enable,
    }
    named = {spec.name for spec in own_roles}
    built_in = [spec for spec in PLACED if needs[spec] or spec.name in named]
    used = [spec for spec in with_own(built_in, own_roles) if not spec.on]
    needs_critic = needs[CRITIC]
    roles = place(config, used, world_size)
    if not data.train_files:
        raise ConfigError("data.train_files is empty; name at least one Parquet or JSONL file of prompts")
    longest = check_lengths(config)
    check_algorithm(config, inputs)
    check_rollout(config, roles)
    check_judge(config, compared=config.rollout.n, greedy="reward_baselines" in inputs)
    check_lora(config)
    check_checkpoints(config.trainer)
    _check_loop(config, inputs)
    critic_mini_batch = critic.ppo_mini_batch_size or actor.ppo_mini_batch_size
    for spec in [*used, REF] if ref_in_actor else used:
        if spec.max_tokens:
            check_budget(f"{spec.path}.{spec.max_tokens}", spec.token_budget(config), longest)

    critic_epochs = critic.ppo_epochs or actor.ppo_epochs
    critic_updates = math.ceil(data.train_batch_size / critic_mini_batch) * critic_epochs if needs_critic else 0
    critic_loss_agg_mode = critic.loss_agg_mode or actor.loss_agg_mode
    loss_scale_factor = actor.loss_scale_factor or float(data.max_response_length)
    needs_sum_pi_squared = actor.calculate_sum_pi_squared or "sum_pi_squared" in inputs
    actor_updates = math.ceil(data.train_batch_size / actor.ppo_mini_batch_size) * actor.ppo_epochs
    read_before_update = needs_sum_pi_squared or "old_log_probs" in (*inputs, *optional) or _reads_old_log_probs(config)
    in_update = actor_updates == 1 and not read_before_update and not actor.separate_old_log_prob
    n = config.rollout.n
    samples_per_step, actor_samples = data.train_batch_size * n, actor.ppo_mini_batch_size * n
    rows: list[tuple[str, object, str]] = [
        ("longest sequence", longest, "tokens"),
        ("step", samples_per_step, "samples"),
        ("actor mini-batch", actor_samples, "samples"),
        ("actor updates per step", actor_updates, "optimizer steps"),
    ]
    if in_update:
        rows.append(("old log-probs", "of the update's forward pass", ""))
    if needs_critic:
        rows += [
            ("critic mini-batch", critic_mini_batch * n, "samples"),
            ("critic epochs", critic_epochs, "passes over a step"),
            ("critic updates per step", critic_updates, "optimizer steps"),
            ("critic loss", critic_loss_agg_mode, ""),
        ]
    if needs_ref:
        rows.append(("reference micro-batch", REF.token_budget(config), "tokens"))
    if ref_in_actor:
        rows.append(("reference", "the actor without adapters", ""))
    if needs[TEACHER]:
        rows.append(("teacher micro-batch", TEACHER.token_budget(config), "tokens"))
    rows.append(("policy loss", chosen["actor.policy_loss"], ""))
    return Derived(
        world_size=world_size,
        roles=roles,
        rows=rows,
        needs_critic=needs_critic,
        needs_ref=needs_ref,
        ref_in_actor=ref_in_actor,
        old_log_prob_in_update=in_update,
        needs_sum_pi_squared=needs_sum_pi_squared,
        needs_reward_baseline="reward_baselines" in inputs,
        loss_mode=chosen["actor.policy_loss"],
        max_sequence_length=longest,
        samples_per_step=samples_per_step,
        actor_mini_batch_samples=actor_samples,
        actor_updates_per_step=actor_updates,
        critic_mini_batch_size=critic_mini_batch,
        critic_ppo_epochs=critic_epochs,
        critic_loss_agg_mode=critic_loss_agg_mode,
        critic_updates_per_step=critic_updates,
        loss_scale_factor=loss_scale_factor,
        critic_loss_scale_factor=critic.loss_scale_factor or loss_scale_factor,
    )


def _reads_old_log_probs(config: Config) -> bool:
    """Whether a step uses old log-probs, or what their pass records, before its first update, or has them given."""
    algorithm, correction = config.algorithm, config.algorithm.rollout_correction
    return (
        correction.bypass_mode
        or correction.rollout_is is not None
        or correction.rollout_rs is not None
        or algorithm.use_kl_in_reward
        or algorithm.use_pf_ppo
        or config.actor.router_replay.mode == "R2"
    )


def describe(derived: RoleLayouts) -> str:
    """The derived values as a table, for the log."""
    lines = [f"derived values on {derived.world_size} ranks"]
    width = max(len(f"{name} ({role.pool})") for name, role in derived.roles.items())
    for name, role in derived.roles.items():
        layout = f"tp {role.tp}  pp {role.pp}  dp {role.dp}"
        layout += "".join(
            f"  {axis} {size}" for axis in ("cp", "vpp", "ep", "etp") if (size := getattr(role, axis)) > 1
        )
        lines.append(f"  {f'{name} ({role.pool})':<{width}}  {layout}  ranks {format_spans(role.ranks)}")
    idle = set(range(derived.world_size)).difference(*(role.ranks for role in derived.roles.values()))
    if idle:
        lines.append(f"  in no role: ranks {format_spans(sorted(idle))}")
    width = max((len(name) for name, _, _ in derived.rows), default=0)
    lines += [f"  {name:<{width}}  {value} {unit}".rstrip() for name, value, unit in derived.rows]
    return "\n".join(lines)


def check_lengths(config: Config) -> int:
    """Tokens of the longest sequence."""
    prompt, response = config.data.max_prompt_length, config.data.max_response_length
    longest, limit = prompt + response, config.model.max_position_embeddings
    if config.model.path is None and not config.model.hf_config and longest > limit:
        raise ConfigError(
            f"data.max_prompt_length + data.max_response_length = {prompt} + {response} exceeds "
            f"model.max_position_embeddings={limit}; shorten them or raise it"
        )
    return longest


def check_budget(key: str, tokens: int, longest: int) -> None:
    if tokens < longest:
        raise ConfigError(
            f"{key}={tokens} is less than the longest sequence, "
            f"data.max_prompt_length + data.max_response_length = {longest}; use {longest} or more"
        )


def _check_loop(config: Config, inputs: Collection[str]) -> None:
    """Check what the loop reads; `inputs` are the tensors that the advantage estimator takes."""
    trainer, needs_critic = config.trainer, "values" in inputs
    if "reward_baselines" in inputs and config.async_training.mode == "bounded_staleness":
        raise ConfigError(
            f"algorithm.adv_estimator={config.algorithm.adv_estimator} compares with a greedy response of the same "
            "weights, which async_training.mode=bounded_staleness does not draw; use one_step_off or sync"
        )
    if trainer.test_freq > 0 and not config.data.val_files:
        raise ConfigError(
            f"trainer.test_freq={trainer.test_freq} validates, and data.val_files is empty; name files or use -1"
        )
    if trainer.critic_warmup and not needs_critic:
        raise ConfigError(
            f"trainer.critic_warmup={trainer.critic_warmup} trains only a critic, and "
            f"algorithm.adv_estimator={config.algorithm.adv_estimator} has none; use 0"
        )
    if trainer.total_training_steps is not None and trainer.critic_warmup >= trainer.total_training_steps:
        raise ConfigError(
            f"trainer.critic_warmup={trainer.critic_warmup} leaves none of "
            f"trainer.total_training_steps={trainer.total_training_steps} to the actor; use less"
        )
    most = config.data.train_batch_size
    for section in ("actor", "critic") if needs_critic else ("actor",):
        prompts, optim = getattr(config, section).ppo_mini_batch_size, getattr(config, section).optim
        if prompts is not None and prompts > most:
            raise ConfigError(
                f"{section}.ppo_mini_batch_size={prompts} exceeds data.train_batch_size={most} (both in prompts); "
                f"use {most} or less"
            )
        if optim.min_lr > optim.lr:
            raise ConfigError(f"{section}.optim.min_lr={optim.min_lr} exceeds lr={optim.lr}; use {optim.lr} or less")
