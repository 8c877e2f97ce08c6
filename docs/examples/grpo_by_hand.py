"""GRPO (Shao et al. 2024, arXiv:2402.03300, section 4.1) by hand: its loop and its advantages.

mpiexec -n 4 python -m hpcrl run docs/examples/grpo_by_hand.py configs/grpo_countdown_cpu.yaml run.name=by_hand
"""

import torch

from hpcrl.api import ActorWorker, DataProto, Dispatch, Mean, Ragged, Run, Train, register


class GroupActor(ActorWorker):
    """The policy, which also computes advantages: those of a group need no critic."""

    @register(
        Dispatch.DP_COMPUTE_PROTO,
        reads=("response_mask", "token_level_scores", "prompt"),
        writes=("advantages",),
        group_by="prompt",  # the samples of a prompt are on one replica
        leader_only=True,
    )
    def compute_group_advantage(self, batch: DataProto) -> DataProto:
        """(score - mean of the group) / (deviation of the group), on every token of the response."""
        mask, scores = batch.padded("response_mask"), batch.padded("token_level_scores").sum(1)
        advantages = torch.zeros_like(scores)
        for prompt in set(batch.samples["prompt"].tolist()):
            group = torch.from_numpy(batch.samples["prompt"] == prompt)
            advantages[group] = (scores[group] - scores[group].mean()) / (scores[group].std() + 1e-6)
        column = Ragged.from_padded(advantages[:, None] * mask, batch.fetch("response_mask").lengths)
        metrics = {"critic/score/mean": Mean(scores.sum(), len(scores))}
        return DataProto({"advantages": column}, {}, {"metrics": metrics})


class GrpoByHand(Train):
    """Everything around the loop is that of `hpcrl train`: resume, time budget, checkpoints, validation, logs."""

    name = "grpo_by_hand"
    own_roles = (GroupActor,)

    def loop(self, run: Run) -> None:
        (actor,) = run.roles("actor")
        for step in run.steps():
            batch = self.rollouts.next(step)  # prompts -> responses -> scores; None: the run stops
            if batch is None or run.stops_before("old_log_prob", "update_actor", "update_weights"):
                continue
            pending = actor.compute_log_prob(batch) | actor.compute_group_advantage(batch)
            pending |= actor.update_actor(pending)
            self.rollouts.update_weights(step)
            run.archive(pending)


JOB = GrpoByHand
