"""What a job leaves on disk, in bytes. No torch."""

from __future__ import annotations

import math
from dataclasses import replace

from hpcrl.model.params import shards
from hpcrl.plan.memory import Job
from hpcrl.plan.state import FP32, ITEMSIZE, RoleModel

RESPONSE_COLUMNS = 7  # of the rollout archive, in fp32 or int32, beside the reference's and the critic's


def checkpoint_bytes(job: Job) -> dict[str, int]:
    """By role: weights and optimizer state of what is trained; and the Hugging Face directory, where there is one."""
    roles = {role: _saved(model) for role, model in job.models.items() if model.optim is not None}
    if job.config.trainer.save_hf:
        actor = job.models["actor"]
        whole = replace(actor, lora=None)
        roles["hugging face"] = _numel(whole) * actor.itemsize
    if job.config.model.lora_rank > 0:
        actor = job.models["actor"]
        roles["lora adapter"] = _numel(actor, trained=True) * actor.itemsize
    return roles


def kept_checkpoints(job: Job) -> int | None:
    """How many there are at once at most, with the one that is being written; None where that is not known."""
    trainer, options = job.config.trainer, job.config.trainer.checkpoint
    if trainer.save_freq == -1:
        return 0
    steps = trainer.total_training_steps
    written = None if steps is None else math.ceil(steps / trainer.save_freq)
    if trainer.max_ckpt_to_keep is None or (options.keep_every is not None and steps is None):
        return written
    kept = trainer.max_ckpt_to_keep + (options.keep_best or 0) + 1
    if options.keep_every is not None and steps is not None:
        kept += steps // options.keep_every
    return kept if written is None else min(kept, written)


def rollout_bytes(job: Job) -> int:
    """Of the tokens of a step's archive at most."""
    config, derived = job.config, job.derived
    columns = RESPONSE_COLUMNS + derived.needs_ref + derived.needs_critic + derived.needs_teacher
    response = config.data.max_response_length
    each = FP32 * (derived.max_sequence_length + columns * response)
    return config.trainer.save_rollouts * derived.samples_per_step * each


def staged_bytes(job: Job) -> int:
    """Host memory of a rank into which a save copies its part; shared over the replicas."""
    per_rank = 0
    for role, model in job.models.items():
        if model.optim is not None:
            stages = range(model.layout.pp)
            state = max((job.state(role, stage) for stage in stages), key=lambda state: state.total)
            per_rank += state.parameters // model.layout.dp + state.optimizer
            if model.itemsize == FP32:
                per_rank += state.gradients // model.layout.dp  # the optimizer's own copy is written, too
    return per_rank


def _numel(model: RoleModel, *, trained: bool = False) -> int:
    """Of all parameters, or of those that are trained."""
    found = shards(model.shape, head=model.head, lora=model.lora)
    return sum(math.prod(shard.global_shape) for shard in found if not trained or model.is_trained(shard))


def _saved(model: RoleModel) -> int:
    """Adam: the weights in fp32 and two moments beside the weights; SGD: what it has of these."""
    assert model.optim is not None
    if model.optim.optimizer == "adam":
        state = FP32 + ITEMSIZE[model.optim.exp_avg_dtype] + ITEMSIZE[model.optim.exp_avg_sq_dtype]
    else:
        state = FP32 * ((model.itemsize < FP32) + (model.optim.momentum > 0))
    return _numel(model) * model.itemsize + _numel(model, trained=True) * state
