"""Models that nothing trains: the policy to sample from, the reference, the reward model, the teacher."""

from __future__ import annotations

import gc
from pathlib import Path

from hpcrl.batch.data_proto import DataProto
from hpcrl.config.derive import Derived
from hpcrl.config.roles import POLICY, REF, REWARD, TEACHER
from hpcrl.config.schema import Config
from hpcrl.controller.register import Dispatch, register
from hpcrl.model.shape import Lora, ModelShape
from hpcrl.runtime.groups import RoleGroups
from hpcrl.workers.model_worker import SEQUENCE, ModelWorker


class PolicyWorker(ModelWorker):
    """The actor's weights in the actor's layout, without gradients and optimizer."""

    spec = POLICY

    def __init__(self, groups: RoleGroups, shape: ModelShape, config: Config, *_: object) -> None:
        super().__init__(groups, shape, config, lora=Lora.from_config(config.model))

    @register(Dispatch.ONE_TO_ALL)
    def release(self) -> None:
        """Free the weights after the last refit; the rollout engine keeps those that it shares."""
        del self.engine
        gc.collect()  # modules hold each other


class RefWorker(ModelWorker):
    spec = REF

    def __init__(
        self, groups: RoleGroups, shape: ModelShape, config: Config, derived: Derived, total_steps: int = 0
    ) -> None:
        super().__init__(groups, shape, config, exact=config.rollout.exact)
        self.temperature = config.rollout.temperature

    @register(Dispatch.DP_COMPUTE_PROTO, reads=SEQUENCE, writes=("ref_log_prob",), phase="ref")
    def compute_ref_log_prob(self, batch: DataProto) -> DataProto:
        return self.log_prob_column("ref_log_prob", batch, max_tokens=self.max_tokens, temperature=self.temperature)


class RewardModelWorker(ModelWorker):
    """A frozen reward model; its tokens are the policy's."""

    spec = REWARD

    @register(Dispatch.ONE_TO_ALL)
    def load_frozen(self, folder: str) -> None:
        """Load the weights of a step folder of `hpcrl rm`, head included."""
        from hpcrl.engine.checkpoint.sharded_load import load_sharded

        with self.engine.offload.on_device("parameters"):
            load_sharded(self.engine, Path(folder) / "reward", optimizer=False)

    @register(Dispatch.DP_COMPUTE_PROTO, reads=("input_ids", "pictures?", "sequence_starts?"))
    def compute_rm_score(self, batch: DataProto) -> DataProto:
        """Per sample `rm_score`, float32: the head's output at the last token of prompt and response, of which it reads
        the last sequence."""
        scores = self.engine.scores(batch, max_tokens=self.max_tokens)
        return DataProto({}, {"rm_score": scores.numpy()}) if self.is_leader and scores is not None else DataProto()


# The teacher's own distribution, whatever the policy was sampled at: the policy, its temperature included, becomes it.
# verl does the same, and takes no notice of a temperature in its teacher's section.
TEMPERATURE = 1.0


class TeacherWorker(ModelWorker):
    spec = TEACHER

    def __init__(self, groups: RoleGroups, shape: ModelShape, config: Config, *_: object) -> None:
        """`shape` is the teacher's, by `team.teacher_shape`."""
        super().__init__(groups, shape, config)
        loss = config.distillation.distillation_loss
        self.topk, self.needs_topk = loss.topk, loss.loss_mode == "forward_kl_topk"

    @register(
        Dispatch.DP_COMPUTE_PROTO,
        reads=SEQUENCE,
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
