"""A process reward model (Lightman et al. 2023, arXiv:2305.20050) as a new role: it scores each step of a response.

mpiexec -n 4 python -m hpcrl run docs/examples/process_reward_model.py configs/reinforce_plus_plus_countdown_cpu.yaml \
    run.name=prm prm.init_from=runs/ppo_countdown placement.prm.tp=2
"""

import torch

from hpcrl.api import (
    DataProto,
    Dispatch,
    Field,
    Mean,
    ModelConfig,
    ModelWorker,
    Ragged,
    RoleSpec,
    Run,
    Section,
    Train,
    register,
)


class PrmConfig(Section):
    """Process reward model."""

    init_from: str | None = Field(None, description="run or checkpoint whose critic it is; null: random weights")
    model: ModelConfig | None = Field(None, description="architecture; null: the policy's")
    weight: float = Field(0.1, description="weight of a step's reward beside the score of the response")
    step_tokens: list[int] = Field([3], description="ids of tokens that end a step")
    max_token_len_per_gpu: int = Field(16384, gt=0, description="tokens per micro-batch of one model replica")
    param_offload: bool = Field(False, description="weights are in host memory while other roles compute")


class ProcessRewardWorker(ModelWorker):
    """A frozen model with a number per token. Layout, memory plan and offload follow from `spec`."""

    spec = RoleSpec("prm", section=PrmConfig, head="value", max_tokens="max_token_len_per_gpu")

    @register(
        Dispatch.DP_COMPUTE_PROTO,
        reads=("input_ids", "response_mask", "outcome_scores"),
        writes=("token_level_scores",),
    )
    def compute_process_reward(self, batch: DataProto) -> DataProto:
        """The outcome's score, and on each token that ends a step the model's probability that the step is right."""
        values = self.engine.values(batch, max_tokens=self.max_tokens)
        if not self.is_leader:
            return DataProto()
        lengths, prm = batch.fetch("response_mask").lengths, self.config.prm
        ids = [batch.fetch("input_ids").row(row)[-length:] for row, length in enumerate(lengths) if length]
        ends = torch.isin(Ragged.from_rows(ids).padded(), torch.tensor(prm.step_tokens)) * batch.padded("response_mask")
        rewards = prm.weight * values["values"].padded().sigmoid() * ends
        scores = Ragged.from_padded(batch.padded("outcome_scores") + rewards, lengths)
        mean = Mean(rewards.sum(), len(lengths))
        return DataProto({"token_level_scores": scores}, {}, {"metrics": {"prm/reward/mean": mean}})

    @register(Dispatch.ONE_TO_ALL)
    def load_frozen(self, folder: str) -> None:
        """Load the critic of a checkpoint."""
        self.load(folder, role="critic", weights_only=True)


class PrmTrain(Train):
    """Policy optimisation whose rewards are those of steps and of the outcome."""

    name = "prm_train"
    own_roles = (ProcessRewardWorker,)

    def loop(self, run: Run) -> None:
        actor, prm = run.roles("actor", "prm")
        for step in run.steps():
            batch = self.rollouts.next(step)
            if batch is None or run.stops_before("old_log_prob", "update_actor", "update_weights"):
                continue
            batch = batch.rename("token_level_scores", "outcome_scores")
            pending = prm.compute_process_reward(batch) | actor.compute_log_prob(batch)
            pending = actor.compute_advantage(pending)
            pending |= actor.update_actor(pending)
            self.rollouts.update_weights(step)
            run.archive(pending)


JOB = PrmTrain
