"""docs/examples/grpo_by_hand.py of November 2026, with members of a job under the names that they had then."""

from typing import Any

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
    label = "mine"
    phases_from_update = (*Train.phases_from_update, "update_actor", "update_weights")
    phases_per_token = (*Train.phases_per_token, "update_weights")

    @property
    def validation_freq(self) -> int:
        return super().validation_freq

    def validate(self, run: Run, step: int) -> tuple[dict[str, float], str]:
        assert self.validator is not None
        metrics, shown = Train.validate(self, run, step)
        return metrics | {"mine/validated": float(step)}, shown

    def step_metrics(self, run: Run, seconds: Any, lengths: list[int], num_response_tokens: int) -> dict[str, float]:
        return {**super().step_metrics(run, seconds, lengths, num_response_tokens), "mine/samples": float(len(lengths))}

    def state(self, step: int) -> dict[str, Any]:
        return {**super().state(step), "mine": step}

    def load_state(self, state: dict[str, Any]) -> None:
        super().load_state(state)
        assert state["mine"] == self.start.step

    def loop(self, run: Run) -> None:
        (actor,) = run.roles("actor")
        for step in run.steps():
            batch = self.rollouts.next(step)  # prompts -> responses -> scores
            batch = actor.compute_log_prob(batch) | actor.compute_group_advantage(batch)
            batch |= actor.update_actor(batch)
            self.rollouts.update_weights(step)
            run.archive(batch)


JOB = GrpoByHand
