"""Self-play: two policies, each on a pool of its own, answer the same prompts; a player's reward is its lead.

mpiexec -n 4 python -m hpcrl run docs/examples/self_play.py configs/grpo_countdown_cpu.yaml run.name=self_play \
    placement.pools.ours=0-1 placement.pools.theirs=2-3 placement.actor.pool=ours placement.rollout.pool=ours \
    placement.opponent.pool=theirs placement.opponent_rollout.pool=theirs
"""

from dataclasses import replace

import numpy as np

from hpcrl.api import (
    ActorWorker,
    DataProto,
    Dispatch,
    Ragged,
    RefitWorker,
    RolloutWorker,
    Run,
    ScorerWorker,
    Train,
    register,
)


class Player(ActorWorker):
    @register(
        Dispatch.DP_COMPUTE_PROTO,
        reads=("own_scores", "response_mask", "rival_score"),
        writes=("token_level_scores",),
        leader_only=True,
    )
    def compute_lead(self, batch: DataProto) -> DataProto:
        """The response's score less the mean score of the rival's responses to the prompt, on the last token."""
        column = batch.fetch("own_scores")
        values = column.values.copy()
        values[column.offsets[1:][column.lengths > 0] - 1] -= batch.samples["rival_score"][column.lengths > 0]
        return DataProto({"token_level_scores": Ragged(values, column.offsets)})


class Opponent(Player):
    spec = replace(ActorWorker.spec, name="opponent", section="actor", metric_prefix="opponent/")


class OpponentRollout(RolloutWorker):
    spec = replace(RolloutWorker.spec, name="opponent_rollout", section="rollout", metric_prefix="opponent/")


class OpponentScorer(ScorerWorker):
    spec = replace(ScorerWorker.spec, name="opponent_scorer", on=("opponent_rollout",), metric_prefix="opponent/")


class OpponentRefit(RefitWorker):
    spec = replace(RefitWorker.spec, name="opponent_refit", on=("opponent", "opponent_rollout"))


class SelfPlay(Train):
    """Both players learn. Their calls return at once, so the two pools work at the same time."""

    name = "self_play"
    own_roles = (Player, Opponent, OpponentRollout, OpponentScorer, OpponentRefit)

    def loop(self, run: Run) -> None:
        actor, opponent, rollout, scorer = run.roles("actor", "opponent", "opponent_rollout", "opponent_scorer")
        refit = run.controller["opponent_refit"]
        refit.update_weights().get()
        for step in run.steps():
            ours = self.rollouts.next(step)
            if ours is None or run.stops_before("generate", "old_log_prob", "update_actor", "update_weights"):
                continue
            theirs = rollout.generate(prompts_of(ours), self.rollouts.context.sampling)
            theirs = scorer.score(theirs).get()
            pairs = [(actor, with_rival(ours, theirs)), (opponent, with_rival(theirs, ours))]
            pairs = [(player, player.compute_log_prob(b) | player.compute_lead(b)) for player, b in pairs]
            pairs = [(player, player.compute_advantage(b)) for player, b in pairs]
            batches = [player.update_actor(b) for player, b in pairs]
            self.rollouts.update_weights(step)
            refit.update_weights().get()
            run.archive(batches[0])


def prompts_of(batch: DataProto) -> DataProto:
    """The same prompts, as often, without responses."""
    prompts = batch.select(["row", "epoch", "prompt", "sample_index"])
    prompts.meta_info = {key: batch.meta_info[key] for key in ("split", "step", "num_prompts")}
    return prompts


def with_rival(batch: DataProto, rival: DataProto) -> DataProto:
    """`batch` with the mean score of the rival's responses to each sample's prompt."""
    score, prompt = rival.samples["score"], rival.samples["prompt"]
    means = {number: float(score[prompt == number].mean()) for number in np.unique(prompt).tolist()}
    found = batch.rename("token_level_scores", "own_scores")
    found.samples["rival_score"] = np.array([means[number] for number in batch.samples["prompt"].tolist()], np.float32)
    return found


JOB = SelfPlay
