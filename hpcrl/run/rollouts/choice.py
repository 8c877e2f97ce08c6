"""The samples of a step: the source that `async_training.mode` asks for, and their assignment to replicas."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import numpy as np

from hpcrl.batch.data_proto import DataProto
from hpcrl.batch.packing import balanced_assignment, mini_batch_of
from hpcrl.config.derive import Derived
from hpcrl.config.schema import Config
from hpcrl.controller.controller import replica_column
from hpcrl.data.sampler import Sampler
from hpcrl.data.tokenizer import end_token_ids
from hpcrl.run.job_config import ASYNCHRONOUS
from hpcrl.run.rollouts.source import RolloutContext, RolloutSource, WeightSync
from hpcrl.run.rollouts.stepwise import OneStepOff, Recorded, Synchronous
from hpcrl.run.rollouts.streaming import Streaming

if TYPE_CHECKING:
    from hpcrl.run.run import Run


log = logging.getLogger(__name__)

SOURCES = {"sync": Synchronous, "one_step_off": OneStepOff, "bounded_staleness": Streaming}


def make_rollout_source(run: Run, derived: Derived, sampler: Sampler, tokenizer: Any) -> RolloutSource:
    """Make the source of a run's samples; `tokenizer` has the token that ends a response."""
    config, mode = run.config, run.config.async_training.mode
    context = RolloutContext(
        run.controller,
        config,
        derived,
        sampler,
        run.timers,
        end_token_ids(tokenizer),
        WeightSync(run.controller, run.timers),
        run.total_steps,
        cannot_begin=run.cannot_begin,
        wait=run.wait,
        log=run.log,
    )
    if mode != "sync":
        log.info("async_training.mode=%s with %s", mode, config.algorithm.rollout_correction)
    correction = config.algorithm.rollout_correction
    chosen = correction.preset, correction.rollout_is, correction.rollout_rs, correction.bypass_mode or None
    if "fp8" in (config.rollout.quantization, config.rollout.kv_cache_dtype) and all(it is None for it in chosen):
        log.warning(
            "rollout in fp8: samples are of a policy that differs from the trained one by rounding, see "
            "training/rollout_log_probs_diff_mean; `hpcrl train` corrects it by algorithm.rollout_correction.preset=%s",
            ASYNCHRONOUS,
        )
    return (Recorded if config.trainer.rollouts_from is not None else SOURCES[mode])(context)


def assign_to_replicas(batch: DataProto, config: Config, derived: Derived) -> dict[str, float]:
    """Add a column for each data-parallel degree, once per step. Returns `global_seqlen/*`, in tokens.

    The samples of a prompt stay together; tokens, and the work of a trained vision tower, are balanced inside each
    mini-batch of the first pass.
    """
    samples, num_prompts = batch.samples, batch.meta_info["num_prompts"]
    tokens = (samples["prompt_length"] + samples["response_length"]).astype(np.int64)
    work = tokens + samples.get("tower_tokens", 0)
    actor, seed, step = config.actor, config.run.seed, batch.meta_info["step"]
    of_prompt = mini_batch_of(
        num_prompts, actor.ppo_mini_batch_size, seed=seed, step=step, ppo_epoch=0, shuffle=actor.shuffle
    )
    mini_batch = of_prompt[samples["prompt"]]
    for dp in sorted({role.dp for role in derived.roles.values()}):
        if config.trainer.balance_batch:
            assignment = balanced_assignment(work, dp, groups=samples["prompt"], mini_batches=mini_batch)
        else:
            assignment = (samples["prompt"] * dp // num_prompts).astype(np.int32)
        samples[replica_column(dp)] = assignment
    dp = derived.roles["actor"].dp
    per_replica = np.bincount(samples[replica_column(dp)], tokens, minlength=dp)
    unbalanced = np.bincount(samples["prompt"] * dp // num_prompts, tokens, minlength=dp)
    return {
        "global_seqlen/min": float(unbalanced.min()),
        "global_seqlen/max": float(unbalanced.max()),
        "global_seqlen/minmax_diff": float(np.ptp(unbalanced)),
        "global_seqlen/mean": float(per_replica.mean()),
        "global_seqlen/balanced_min": float(per_replica.min()),
        "global_seqlen/balanced_max": float(per_replica.max()),
    }
