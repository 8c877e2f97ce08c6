"""What a run writes to its disk: checkpoints, and the archive of rollouts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from hpcrl.config.derive import Derived
from hpcrl.config.schema import Config, TrainerConfig
from hpcrl.forecast.memory.state import FP32, ITEMSIZE, RoleModel
from hpcrl.model.params import shards

RESPONSE_COLUMNS = 8  # of the rollout archive, in fp32 or int32, beside the reference's and the critic's


def checkpoint_bytes(config: Config, models: Mapping[str, RoleModel]) -> dict[str, int]:
    """Bytes by role: weights and optimizer state of trained models; also of the Hugging Face directory and the
    adapter."""
    roles = {role: _saved(model) for role, model in models.items() if model.optim is not None}
    if config.trainer.save_hf and "actor" in roles:
        actor = models["actor"]
        roles["hugging face"] = _numel(replace(actor, lora=None)) * actor.itemsize
    if config.model.lora_rank > 0 and "actor" in roles:
        actor = models["actor"]
        roles["lora adapter"] = _numel(actor, trained=True) * actor.itemsize
    return roles


def kept_checkpoints(trainer: TrainerConfig, steps: int | None, *, saves_last: bool = False) -> int | None:
    """Largest number of checkpoints that exist at once in a run of so many steps, the one being written included; None
    if it is not known. saves_last: the job saves after its last step, whatever trainer.save_freq is."""
    options = trainer.checkpoint
    if trainer.save_freq == -1:
        return int(saves_last)
    written = None if steps is None else math.ceil(steps / trainer.save_freq)
    if trainer.max_ckpt_to_keep is None or (options.keep_every is not None and steps is None):
        return written
    kept = trainer.max_ckpt_to_keep + (options.keep_best or 0) + 1
    if options.keep_every is not None and steps is not None:
        kept += steps // options.keep_every
    return kept if written is None else min(kept, written)


def rollout_bytes(config: Config, derived: Derived) -> int:
    """Largest size of a step's archive, of its tokens."""
    columns = RESPONSE_COLUMNS + derived.needs_ref + derived.needs_critic + config.distillation.enabled
    each = FP32 * (derived.max_sequence_length + columns * config.data.max_response_length)
    return config.trainer.save_rollouts * derived.samples_per_step * each


def _numel(model: RoleModel, *, trained: bool = False) -> int:
    """Of all parameters, or of those that are trained."""
    found = shards(model.shape, head=model.head, lora=model.lora)
    return sum(math.prod(shard.global_shape) for shard in found if not trained or model.is_trained(shard))


def _saved(model: RoleModel) -> int:
    """Bytes of a saved model. Adam: the weights, a copy in fp32, two moments; SGD: those of them that it has."""
    assert model.optim is not None
    if model.optim.optimizer == "adam":
        state = FP32 + ITEMSIZE[model.optim.exp_avg_dtype] + ITEMSIZE[model.optim.exp_avg_sq_dtype]
    else:
        state = FP32 * ((model.itemsize < FP32) + (model.optim.momentum > 0))
    return _numel(model) * model.itemsize + _numel(model, trained=True) * state
