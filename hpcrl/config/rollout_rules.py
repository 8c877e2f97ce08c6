"""What of `rollout:` and `async_training:` does not go together, with each other or with the placement."""

from __future__ import annotations

from collections.abc import Mapping

from hpcrl.config.errors import ConfigError
from hpcrl.config.placement import PlacedRole, format_ranks
from hpcrl.config.schema import Config

TENSORRT_LLM_TOP_K = 1024  # its sampler takes larger ones for this, and only warns


def check_rollout(config: Config, roles: Mapping[str, PlacedRole]) -> None:
    """ConfigError with one line for the first combination that cannot work; `roles` are those that the job places."""
    _check_sampling(config)
    if config.rollout.engine == "tensorrt_llm":
        check_tensorrt_llm(config, roles["rollout"].tp)
    if config.rollout.exact:
        _check_exact(config, roles)
    _check_router_replay(config)
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
            f"rollout.val_kwargs: n={counts} has equal numbers, and validations are told apart by mean@n; "
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


def check_tensorrt_llm(config: Config, tp: int) -> None:
    """ConfigError where TensorRT-LLM with tensor parallelism `tp` cannot do what `rollout:` says."""
    trtllm = config.rollout.trtllm
    if trtllm.model_dir is None and config.model.path is None:
        raise ConfigError(
            "rollout.engine=tensorrt_llm reads config.json of a Hugging Face directory, and rollout.trtllm.model_dir "
            "is null; name one there"
        )
    if trtllm.design == "single_process" and tp > 1:
        raise ConfigError(
            f"rollout.trtllm.design=single_process makes replicas of one rank, and placement.rollout.tp={tp}; "
            "use tp: 1, or design: tp_group"
        )
    dtype = config.rollout.dtype or config.model.dtype
    if dtype != "bfloat16":
        raise ConfigError(
            f"rollout.engine=tensorrt_llm is run in bfloat16, and the engine's dtype would be {dtype}; "
            "set rollout.dtype=bfloat16, or use rollout.engine=native"
        )
    if config.rollout.exact:
        raise ConfigError("rollout.exact is for engine=native, and rollout.engine=tensorrt_llm; change one")
    if config.rollout.max_num_batched_tokens < config.rollout.max_num_seqs:
        raise ConfigError(
            f"rollout.max_num_batched_tokens={config.rollout.max_num_batched_tokens} is less than "
            f"rollout.max_num_seqs={config.rollout.max_num_seqs}, and TensorRT-LLM decodes all of them in one call; "
            "raise it, or lower max_num_seqs"
        )
    ways = {"rollout": config.rollout.top_k}
    ways |= {f"rollout.val_kwargs (n={way.n})": way.top_k for way in config.rollout.val_kwargs}
    for section, top_k in ways.items():
        if top_k > TENSORRT_LLM_TOP_K:
            raise ConfigError(
                f"{section}: top_k={top_k} is more than TensorRT-LLM's sampler keeps; "
                f"use {TENSORRT_LLM_TOP_K} or less, or -1"
            )


def _check_exact(config: Config, roles: Mapping[str, PlacedRole]) -> None:
    for key, dtype in (("model.dtype", config.model.dtype), ("rollout.dtype", config.rollout.dtype)):
        if dtype not in (None, "float32"):
            raise ConfigError(f"rollout.exact computes in float32, and {key}={dtype}; use float32 or exact=false")
    actor = roles.get("actor")
    if actor is not None and actor.tp != roles["rollout"].tp:
        raise ConfigError(
            f"rollout.exact needs one order of sums, and placement.actor.tp={actor.tp} differs from "
            f"placement.rollout.tp={roles['rollout'].tp}; make them equal"
        )


def _check_router_replay(config: Config) -> None:
    mode = config.actor.router_replay.mode
    if mode == "R3" and config.rollout.engine != "native":
        raise ConfigError(
            f"actor.router_replay.mode=R3: rollout.engine={config.rollout.engine} does not tell the experts of tokens; "
            "use R2, or rollout.engine=native"
        )
    if mode == "R2" and config.algorithm.rollout_correction.bypass_mode:
        raise ConfigError(
            "actor.router_replay.mode=R2 records in the forward pass before the update, which "
            "algorithm.rollout_correction.bypass_mode=true leaves out; use R3, or bypass_mode=false"
        )


def _check_multi_turn(config: Config) -> None:
    multi_turn = config.rollout.multi_turn
    if multi_turn.function_tool_path is None and multi_turn.interaction_path is None:
        raise ConfigError(
            "rollout.multi_turn.enable has nobody to answer the model; name a file of tools "
            "(rollout.multi_turn.function_tool_path) or of a user (rollout.multi_turn.interaction_path)"
        )
    if config.rollout.ignore_eos:
        raise ConfigError("rollout.ignore_eos=true never ends a turn, and rollout.multi_turn.enable waits for ends")
    if config.async_training.mode == "bounded_staleness":
        raise ConfigError(
            "rollout.multi_turn.enable does not go with async_training.mode=bounded_staleness, whose refits interrupt "
            "responses; use one_step_off"
        )


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
                f"{mode}: rank 0 leads and waits for nobody, but placement.{name} runs on it (pool {role.pool}); "
                "start its pool at rank 1"
            )
        shared = sorted(set(role.ranks).intersection(rollout))
        if name != "rollout" and shared:
            raise ConfigError(
                f"{mode}: generation has ranks of its own, but placement.{name} shares {format_ranks(shared)} with "
                "placement.rollout; give them disjoint pools"
            )
