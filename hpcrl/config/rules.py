"""Which keys go together: ConfigError with one line for a combination that cannot work."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from hpcrl.algorithms.optimizers.optimizer import OPTIMIZERS
from hpcrl.config.engines import EngineSpec
from hpcrl.config.roles import PlacedRole
from hpcrl.config.schema import Config, TrainerConfig
from hpcrl.config.yaml_core import ConfigError
from hpcrl.rewards.judge import Judging
from hpcrl.runtime.exits import InputError
from hpcrl.runtime.launcher import format_spans


def check_algorithm(config: Config, inputs: Collection[str]) -> None:
    """Check the algorithm keys; `inputs` are the tensors that the advantage estimator takes."""
    algorithm = config.algorithm
    if "index" in inputs and config.rollout.n == 1:
        raise ConfigError(
            f"algorithm.adv_estimator={algorithm.adv_estimator} compares the samples of a prompt, "
            "and rollout.n=1 leaves nothing to compare; use rollout.n of 2 or more"
        )
    if "turn_states" in inputs and not config.rollout.multi_turn.has_environment:
        raise ConfigError(
            f"algorithm.adv_estimator={algorithm.adv_estimator} compares turns of an environment, and there is none; "
            "name one (rollout.multi_turn.environment.path, with enable=true), or use grpo"
        )
    if config.rollout.multi_turn.has_environment and (algorithm.use_pf_ppo or "reward_baselines" in inputs):
        what = "use_pf_ppo=true" if algorithm.use_pf_ppo else f"adv_estimator={algorithm.adv_estimator}"
        raise ConfigError(
            f"algorithm.{what} does not go with rollout.multi_turn.environment, whose failed samples have no score"
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
        for key, needs_forward in (
            ("actor.calculate_sum_pi_squared", actor.calculate_sum_pi_squared),
            (f"algorithm.adv_estimator={config.algorithm.adv_estimator}", "sum_pi_squared" in inputs),
        ):
            if needs_forward:
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


def check_judge(config: Config, *, compared: int, greedy: bool = False) -> None:
    """ConfigError with one line where the judge of a job cannot work.

    Args:
        compared: responses to a prompt that are scored together.
        greedy: whether a lone response per prompt is scored too.
    """
    judge = config.reward.judge
    if not judge.enable:
        return
    if judge.template is not None and judge.template_path is not None:
        raise ConfigError("reward.judge.template and reward.judge.template_path are both given; leave one out")
    if judge.model is not None and judge.model.init_from is not None:
        raise ConfigError(
            f"reward.judge.model.init_from={judge.model.init_from}: the judge's weights are named by "
            "reward.judge.init_from; set that"
        )
    if judge.max_num_batched_tokens < judge.max_prompt_length:
        raise ConfigError(
            f"reward.judge.max_num_batched_tokens={judge.max_num_batched_tokens} is less than "
            f"reward.judge.max_prompt_length={judge.max_prompt_length}; use that or more"
        )
    if judge.template_path is not None:
        return  # the file is checked where it is read
    try:
        judging = Judging(judge.kind, judge.template, judge.pattern, judge.scale)
    except ValueError as error:
        raise ConfigError(f"reward.judge: {error}") from None
    if judging.compares_samples and (compared < 2 or greedy):
        lone = (
            f"algorithm.adv_estimator={config.algorithm.adv_estimator} has a greedy response scored without others"
            if greedy
            else f"{compared} is drawn"
        )
        raise ConfigError(
            f"reward.judge.kind=pairwise compares the responses to a prompt, and {lone}; use another kind, or compare "
            "with the reference answer: a template with {ground_truth} in place of {other}"
        )


def _check_distillation(config: Config) -> None:
    if not config.distillation.enabled:
        return
    loss = config.distillation.distillation_loss
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
                f"trainer.checkpoint.{key}={number} changes nothing while all checkpoints stay "
                "(trainer.max_ckpt_to_keep=null); set that to how many of the newest stay beside them"
            )


def check_lora(config: Config) -> None:
    """ConfigError with one line where models that are trained whole, or not at all, are to have adapters."""
    others = {"teacher.model": config.teacher.model, "reward.reward_model.model": config.reward.reward_model.model}
    others["reward.judge.model"] = config.reward.judge.model
    for key, model in others.items():
        if model is not None and model.lora_rank > 0:
            raise ConfigError(f"{key}.lora_rank={model.lora_rank}: only the policy has adapters; use 0")
    if config.model.lora_rank > 0 and config.rollout.exact:
        raise ConfigError(
            f"model.lora_rank={config.model.lora_rank} with rollout.exact=true: the engine computes with merged "
            "weights, whose log-probs have other last bits than those of training; set rollout.exact=false"
        )
    name = config.actor.optim.optimizer
    entry = OPTIMIZERS.entries().get(name)  # one of a plugin that needs torch may be missing
    if config.model.lora_rank > 0 and entry is not None and entry.function.without_adapters:
        raise ConfigError(
            f"actor.optim.optimizer={name} with model.lora_rank={config.model.lora_rank}: "
            f"{entry.function.without_adapters}"
        )


def check_rollout(config: Config, roles: Mapping[str, PlacedRole]) -> None:
    """ConfigError with one line for the first combination that cannot work; `roles` are those that the job places."""
    _check_sampling(config)
    engine = config.engine
    _check_fp8(config)
    if config.rollout.exact:
        if "exact" not in engine.supports:
            raise ConfigError(f"rollout.exact is for engine=native, and rollout.engine={engine.name}; change one")
        _check_exact(config, roles)
    try:
        engine.check(config, roles["rollout"].tp)
    except InputError as error:
        raise ConfigError(*error.lines) from error
    _check_router_replay(config, engine)
    if config.rollout.multi_turn.enable:
        _check_multi_turn(config)
    if config.async_training.mode != "sync":
        _check_asynchronous(config, roles)


def _check_sampling(config: Config) -> None:
    rollout = config.rollout
    if rollout.max_num_batched_tokens < config.data.max_prompt_length:
        raise ConfigError(
            f"rollout.max_num_batched_tokens={rollout.max_num_batched_tokens} is less than "
            f"data.max_prompt_length={config.data.max_prompt_length}; use that or more"
        )
    counts = [sampling.n for sampling in rollout.val_kwargs]
    if len(set(counts)) < len(counts):
        raise ConfigError(
            f"rollout.val_kwargs: n={counts} has equal numbers, and validations are distinguished by mean@n; "
            "give each its own n"
        )
    for sampling in rollout.val_kwargs:
        if sampling.n > 1 and (sampling.temperature == 0 or sampling.do_sample is False):
            raise ConfigError(
                f"rollout.val_kwargs: n={sampling.n} without sampling draws the same sample {sampling.n} times; "
                "use n=1 or a temperature above 0"
            )
    if not rollout.val_kwargs and (config.data.val_files or config.trainer.test_freq > 0):
        raise ConfigError("rollout.val_kwargs is an empty list; name one way of sampling, such as {temperature: 0}")


def _check_exact(config: Config, roles: Mapping[str, PlacedRole]) -> None:
    if config.rollout.dtype not in (None, config.model.dtype):
        raise ConfigError(
            f"rollout.exact needs one dtype, and model.dtype={config.model.dtype} differs from "
            f"rollout.dtype={config.rollout.dtype}; make them equal"
        )
    actor = roles.get("actor")
    if actor is not None and actor.tp != roles["rollout"].tp:
        raise ConfigError(
            f"rollout.exact needs one order of sums, and placement.actor.tp={actor.tp} differs from "
            f"placement.rollout.tp={roles['rollout'].tp}; make them equal"
        )


def _check_fp8(config: Config) -> None:
    rollout, engine = config.rollout, config.engine
    for key in ("quantization", "kv_cache_dtype"):
        if getattr(rollout, key) != "fp8":
            continue
        if "fp8" not in engine.supports:
            raise ConfigError(f"rollout.{key}=fp8 is for engine=native, and rollout.engine={engine.name}; change one")
        if rollout.exact:
            raise ConfigError(f"rollout.{key}=fp8 with rollout.exact=true: 8 bits are not exact; change one")


def _check_router_replay(config: Config, engine: EngineSpec) -> None:
    mode = config.actor.router_replay.mode
    if mode == "R3" and "routed_experts" not in engine.supports:
        raise ConfigError(
            f"actor.router_replay.mode=R3: rollout.engine={engine.name} does not report the experts of "
            "tokens; use R2, or rollout.engine=native"
        )
    if mode == "R2" and config.algorithm.rollout_correction.bypass_mode:
        raise ConfigError(
            "actor.router_replay.mode=R2 records in the forward pass before the update, which "
            "algorithm.rollout_correction.bypass_mode=true leaves out; use R3, or bypass_mode=false"
        )


def _check_multi_turn(config: Config) -> None:
    multi_turn = config.rollout.multi_turn
    named = [
        f"rollout.multi_turn.{key}"
        for key in ("function_tool_path", "interaction_path")
        if getattr(multi_turn, key) is not None
    ]
    if multi_turn.environment.path is None and not named:
        raise ConfigError(
            "rollout.multi_turn.enable=true without tools, a user or an environment; name a file of tools "
            "(rollout.multi_turn.function_tool_path), of a user (rollout.multi_turn.interaction_path) or of an "
            "environment (rollout.multi_turn.environment.path)"
        )
    if multi_turn.environment.path is not None and named:
        raise ConfigError(
            f"rollout.multi_turn.environment.path and {named[0]}: an environment has tools of its own; leave one out"
        )
    if config.rollout.ignore_eos:
        raise ConfigError("rollout.ignore_eos=true never ends a turn, and rollout.multi_turn.enable waits for ends")


def _check_asynchronous(config: Config, roles: Mapping[str, PlacedRole]) -> None:
    mode, rollout = f"async_training.mode={config.async_training.mode}", roles["rollout"].ranks
    if config.trainer.rollouts_from is not None:
        raise ConfigError(f"{mode} draws samples, and trainer.rollouts_from replays recorded ones; use mode=sync")
    limit = config.algorithm.filter_groups.max_num_gen_batches
    if config.async_training.mode == "bounded_staleness" and config.algorithm.filter_groups.enable and limit:
        raise ConfigError(
            f"{mode} has no batches of generation to count, and algorithm.filter_groups.max_num_gen_batches={limit}; "
            "use 0"
        )
    for name, role in roles.items():
        if 0 in role.ranks:
            raise ConfigError(
                f"{mode}: rank 0 runs the loop and must not block in a role, but placement.{name} runs on it "
                f"(pool {role.pool}); start its pool at rank 1"
            )
        shared = sorted(set(role.ranks).intersection(rollout))
        if name != "rollout" and shared:
            raise ConfigError(
                f"{mode}: generation has ranks of its own, but placement.{name} shares {format_spans(shared)} with "
                "placement.rollout; give them disjoint pools"
            )
