"""The teacher of on-policy distillation: a frozen model that reads what the policy wrote."""

from __future__ import annotations

from hpcrl.batch.data_proto import DataProto
from hpcrl.config.derive import Derived
from hpcrl.config.placement import offloaded
from hpcrl.config.schema import Config
from hpcrl.controller.register import Dispatch, register
from hpcrl.grid.groups import RoleGroups
from hpcrl.model.hf.directory import shape_of
from hpcrl.model.shape import ModelShape
from hpcrl.runtime.exits import InputError
from hpcrl.workers.model_worker import ModelWorker

# The teacher's own distribution, whatever the policy was sampled at: the policy, its temperature included, becomes it.
# verl does the same, and takes no notice of a temperature in its teacher's section.
TEMPERATURE = 1.0


def teacher_shape(config: Config, policy: ModelShape) -> ModelShape:
    """The teacher's architecture: its own, or the policy's. Both must have the same vocabulary."""
    loss, own = config.distillation.distillation_loss, config.teacher.model
    if loss.loss_mode == "forward_kl_topk" and loss.topk > policy.vocab_size:
        raise InputError(
            f"distillation.distillation_loss.topk={loss.topk} exceeds the vocabulary of {policy.vocab_size} tokens; "
            f"use {policy.vocab_size} or less"
        )
    if own is None:
        return policy
    if own.init_from is not None or own.tokenizer is not None:
        raise InputError(
            "teacher.model gives init_from or tokenizer; it takes an architecture or a path alone: the tokenizer is "
            "the policy's, and weights are named by teacher.init_from"
        )
    if own.vocab_size not in (None, policy.vocab_size):
        raise InputError(
            f"teacher.model.vocab_size={own.vocab_size}, and the policy's vocabulary has {policy.vocab_size} tokens; "
            "a teacher must have the same: leave it null"
        )
    shape = shape_of(own, policy.vocab_size)
    if shape.vocab_size != policy.vocab_size:
        raise InputError(
            f"teacher.model.path={own.path} has {shape.vocab_size} tokens, and the policy's vocabulary "
            f"{policy.vocab_size}; a teacher must have the same"
        )
    longest = config.data.max_prompt_length + config.data.max_response_length
    if longest > shape.max_position_embeddings:
        raise InputError(
            f"teacher.model.max_position_embeddings={shape.max_position_embeddings} is less than the longest sequence, "
            f"data.max_prompt_length + data.max_response_length = {longest}; raise it or shorten them"
        )
    return shape


class TeacherWorker(ModelWorker):
    def __init__(
        self, groups: RoleGroups, shape: ModelShape, config: Config, derived: Derived, total_steps: int = 0
    ) -> None:
        """`shape` is the teacher's, by `teacher_shape`."""
        model = config.teacher.model or config.model
        super().__init__(
            groups,
            shape,
            head="lm",
            dtype=model.dtype,
            te=config.model.transformer_engine,
            seed=config.run.seed,
            optim=None,
            head_chunk_tokens=config.trainer.head_chunk_tokens,
            offload=offloaded(config, "teacher"),
        )
        self.max_tokens = derived.teacher_max_tokens
        loss = config.distillation.distillation_loss
        self.topk, self.needs_topk = loss.topk, loss.loss_mode == "forward_kl_topk"

    @register(
        Dispatch.DP_COMPUTE_PROTO,
        reads=("input_ids", "response_mask"),
        writes=("teacher_log_prob", "teacher_topk_log_probs?", "teacher_topk_ids?"),
        phase="teacher",
    )
    def compute_teacher_log_prob(self, batch: DataProto) -> DataProto:
        """Log-probs of the sampled tokens; for forward_kl_topk also ids and log-probs of the `topk` likeliest tokens,
        the likeliest first, as columns of `topk` numbers per response token: `Ragged.padded_vectors(topk)` is
        (N, T, topk)."""
        if not self.needs_topk:
            return self.log_prob_column("teacher_log_prob", batch, max_tokens=self.max_tokens, temperature=TEMPERATURE)
        outputs = self.engine.topk_log_probs(batch, max_tokens=self.max_tokens, temperature=TEMPERATURE, k=self.topk)
        if not self.is_leader:
            return DataProto()
        return DataProto(
            {
                "teacher_log_prob": outputs["log_probs"],
                "teacher_topk_log_probs": outputs["topk_log_probs"],
                "teacher_topk_ids": outputs["topk_ids"],
            }
        )
