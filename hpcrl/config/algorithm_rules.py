"""Which algorithm keys go together: ConfigError with one line for a combination that cannot work."""

from __future__ import annotations

from collections.abc import Collection

from hpcrl.config.errors import ConfigError
from hpcrl.config.plugins import parameters
from hpcrl.config.schema import Config


def check_algorithm(config: Config, inputs: Collection[str]) -> None:
    """`inputs` are the tensors that the advantage estimator takes."""
    algorithm = config.algorithm
    if "index" in inputs and config.rollout.n == 1:
        raise ConfigError(
            f"algorithm.adv_estimator={algorithm.adv_estimator} compares the samples of a prompt, "
            "and rollout.n=1 leaves nothing to compare; use rollout.n of 2 or more"
        )
    if algorithm.filter_groups.enable and config.rollout.n == 1:
        raise ConfigError(
            "algorithm.filter_groups.enable=true drops prompts whose samples all score the same, "
            "and rollout.n=1 would drop every prompt; use rollout.n of 2 or more"
        )
    if algorithm.use_pf_ppo and algorithm.adv_estimator != "gae":
        raise ConfigError(
            f"algorithm.use_pf_ppo=true with adv_estimator={algorithm.adv_estimator}; PF-PPO resamples a step of "
            "gae; use adv_estimator=gae or use_pf_ppo=false"
        )
    _check_gdpo(config, inputs)
    _check_policy_loss(config, inputs)
    _check_reward(config)
    _check_distillation(config)


def without_effect(config: Config) -> list[str]:
    """Settings that this job does not read; a line for each."""
    algorithm, found = config.algorithm, []
    if config.trainer.rollouts_from is not None and algorithm.filter_groups.enable:
        found.append("trainer.rollouts_from replays all recorded prompts: algorithm.filter_groups drops none of them")
    if config.data.gen_batch_size is not None and not algorithm.filter_groups.enable:
        found.append("data.gen_batch_size is read with algorithm.filter_groups.enable=true alone")
    if algorithm.gdpo_reward_keys and algorithm.adv_estimator != "gdpo":
        found.append(f"algorithm.gdpo_reward_keys: adv_estimator={algorithm.adv_estimator} does not read them")
    return found


def loss_mode(config: Config) -> str:
    """The policy loss that runs: bypass mode brings its own, as in verl."""
    return "bypass_mode" if config.algorithm.rollout_correction.bypass_mode else config.actor.policy_loss.loss_mode


def _check_gdpo(config: Config, inputs: Collection[str]) -> None:
    keys, weights = config.algorithm.gdpo_reward_keys, config.algorithm.gdpo_reward_weights
    if "reward_components" in inputs and not keys:
        raise ConfigError(
            f"algorithm.adv_estimator={config.algorithm.adv_estimator} needs algorithm.gdpo_reward_keys; name keys of "
            "the scorer's result, such as [score, acc]"
        )
    if weights is not None and len(weights) != len(keys):
        raise ConfigError(
            f"algorithm.gdpo_reward_weights has {len(weights)} entries for {len(keys)} gdpo_reward_keys; give one each"
        )


def _check_policy_loss(config: Config, inputs: Collection[str]) -> None:
    actor, correction = config.actor, config.algorithm.rollout_correction
    mode = actor.policy_loss.loss_mode
    if correction.bypass_mode:
        if mode not in ("vanilla", "bypass_mode"):
            raise ConfigError(
                f"actor.policy_loss.loss_mode={mode} with algorithm.rollout_correction.bypass_mode=true, which has a "
                "loss of its own (rollout_correction.loss_type); leave loss_mode out or set bypass_mode=false"
            )
        for key, wanted in (
            ("actor.calculate_sum_pi_squared", actor.calculate_sum_pi_squared),
            (f"algorithm.adv_estimator={config.algorithm.adv_estimator}", "sum_pi_squared" in inputs),
        ):
            if wanted:
                raise ConfigError(
                    f"{key} needs the forward pass before the update that "
                    "algorithm.rollout_correction.bypass_mode=true leaves out; use bypass_mode=false"
                )
    elif mode == "bypass_mode":
        raise ConfigError(
            "actor.policy_loss.loss_mode=bypass_mode needs old log-probs that are the rollout's; "
            "set algorithm.rollout_correction.bypass_mode=true"
        )


def _check_reward(config: Config) -> None:
    model, kwargs = config.reward.reward_model, config.reward.reward_kwargs
    if model.enable and model.init_from is None:
        raise ConfigError(
            "reward.reward_model.enable=true, and reward.reward_model.init_from is null; name the folder of a run of "
            "`hpcrl rm`, or one of its checkpoints"
        )
    buffer, limit = kwargs.overlong_buffer_cfg, kwargs.max_resp_len or config.data.max_response_length
    if buffer.enable and config.reward.reward_manager.name != "dapo":
        raise ConfigError(
            f"reward.reward_kwargs.overlong_buffer_cfg.enable=true with reward_manager.name="
            f"{config.reward.reward_manager.name}; only dapo shapes over-long responses; use dapo"
        )
    if buffer.enable and not 0 < buffer.len <= limit:
        raise ConfigError(
            f"reward.reward_kwargs.overlong_buffer_cfg.len={buffer.len}; expected 1 to the limit of {limit} tokens "
            "(max_resp_len or data.max_response_length)"
        )


def _check_distillation(config: Config) -> None:
    if not config.distillation.enabled:
        return
    loss = config.distillation.distillation_loss
    parameters(config, "distillation.distillation_loss", loss.loss_mode)
    if config.teacher.init_from is None and config.model.init_from is None:
        raise ConfigError(
            "distillation.enabled=true, and neither teacher.init_from nor model.init_from names weights; "
            "a teacher of random weights teaches nothing; set teacher.init_from"
        )
    if loss.use_policy_gradient and loss.loss_mode == "forward_kl_topk":
        raise ConfigError(
            "distillation.distillation_loss.use_policy_gradient=true with loss_mode=forward_kl_topk, which does not "
            "estimate from the sampled token; use k1, or use_policy_gradient=false"
        )
