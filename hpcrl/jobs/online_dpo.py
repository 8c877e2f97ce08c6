"""policy, from preferences between its own responses: online DPO"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from pydantic import Field

from hpcrl.algorithms.metrics import finish
from hpcrl.algorithms.preference_losses import PairParameters
from hpcrl.batch.data_proto import DataProto
from hpcrl.config import derive
from hpcrl.config.derive import Derived
from hpcrl.config.roles import RoleSpec
from hpcrl.config.schema import Config, Section
from hpcrl.config.yaml_core import ConfigError
from hpcrl.jobs.train import UPDATES, Train, TrainReport
from hpcrl.run.job_parts import Report
from hpcrl.run.pairs import check_loss
from hpcrl.run.rollouts.choice import assign_to_replicas

if TYPE_CHECKING:
    from hpcrl.run.run import Run


class OnlineDpoConfig(Section, PairParameters):
    """`hpcrl online_dpo`: a loss on pairs of responses that the policy has just drawn; the scorer prefers one."""

    loss_type: str = Field("sigmoid", description="name of a registered preference loss on pairs; sigmoid is DPO")


class OnlineDpoReport(TrainReport):
    shown = {"score": "critic/score/mean", "length": "response_length/mean", "accuracy": "rewards/accuracies"}
    label = Report.label
    is_predicted = False


class OnlineDpo(Train):
    """Online DPO (Guo et al. 2024, arXiv:2402.04792): the better of two responses is chosen, the other one rejected."""

    name = "online_dpo"
    section = OnlineDpoConfig
    report_class = OnlineDpoReport
    memory_advice = (
        "a smaller actor.ppo_max_token_len_per_gpu, model.recompute.granularity=full, a larger placement.actor.tp, a "
        "smaller rollout.gpu_memory_utilization"
    )

    def loop(self, run: Run) -> None:
        ref, actor = run.roles("ref", "actor")
        for step in run.steps():  # between two steps: wait for all calls, log, validate, save, stop if asked to
            batch = self.rollouts.next(step)  # wait for samples: prompts -> responses -> scores; None: the run stops
            if batch is None or run.stops_before("ref"):
                continue
            run.log(assign_to_replicas(batch, self.config, self.derived) | self.statistics(batch))
            pairs = batch[pair_rows(batch)]  # chosen and rejected, next to each other
            pairs = ref.compute_ref_log_prob(pairs).get()  # unchanged, where the loss needs no reference
            if run.stops_before(*UPDATES):
                continue
            actor.update_actor(pairs)
            self.rollouts.update_weights(step)  # from the actor to the rollout engine
            run.archive(batch)

    def statistics(self, batch: DataProto) -> dict[str, float]:
        """Metrics of scores and lengths."""
        import torch

        from hpcrl.algorithms.statistics import sample_statistics

        samples, data = batch.samples, self.config.data
        metrics = sample_statistics(
            prompt_length=torch.from_numpy(samples["prompt_length"]),
            response_length=torch.from_numpy(samples["response_length"]),
            max_prompt_length=data.max_prompt_length,
            max_response_length=data.max_response_length,
            score=torch.from_numpy(samples["score"]),
        )
        chosen, rejected = samples["score"][pair_rows(batch)].reshape(-1, 2).T
        return finish(metrics) | {
            "objective/scores_margin": float((chosen - rejected).mean()),
            "objective/ties": float((chosen == rejected).mean()),
        }

    @classmethod
    def check(cls, config: Config, num_ranks: int) -> Derived:
        own, actor, algorithm = config.section("online_dpo"), config.actor, config.algorithm
        loss = check_loss(cls.name, own)
        if not loss.paired:
            raise ConfigError(
                f"online_dpo.loss_type={own.loss_type} is for labelled answers, and online DPO makes pairs; use "
                "sigmoid, ipo or another loss on pairs"
            )
        if config.rollout.n == 1:
            raise ConfigError("rollout.n=1 makes no pairs of the responses to a prompt; use rollout.n=2")
        if config.distillation.enabled:
            raise ConfigError("distillation.enabled=true is for `hpcrl train`; use false")
        if actor.router_replay.mode == "R2":
            raise ConfigError(
                "actor.router_replay.mode=R2 records routing in the pass over old log-probs, which online DPO does not "
                "make; use R3 or disabled"
            )
        # As of a job without a critic that compares with a reference in the loss.
        like_train = {
            "algorithm": algorithm.model_copy(
                update={"adv_estimator": "grpo", "use_kl_in_reward": False, "use_pf_ppo": False}
            ),
            "actor": actor.model_copy(update={"use_kl_loss": loss.reference}),
        }
        derived = derive.check(config.model_copy(update=like_train), num_ranks, own_roles=cls.own_specs())
        if config.rollout.multi_turn.has_environment:
            raise ConfigError(
                "rollout.multi_turn.environment does not go with online DPO, whose pairs need a score of each sample; "
                "use `hpcrl train`"
            )
        longest = derived.max_sequence_length
        if actor.ppo_max_token_len_per_gpu < 2 * longest:
            raise ConfigError(
                f"actor.ppo_max_token_len_per_gpu={actor.ppo_max_token_len_per_gpu} holds no pair of the longest "
                f"sequences, 2 * (data.max_prompt_length + data.max_response_length) = {2 * longest}; use "
                f"{2 * longest} or more"
            )
        rows = [row for row in derived.rows if row[0] not in ("policy loss", "old log-probs")]
        return replace(derived, rows=[*rows, ("preference loss", own.loss_type, "")])

    @classmethod
    def check_with_torch(cls, config: Config, num_ranks: int) -> Derived:
        return cls.check(config, num_ranks)

    @classmethod
    def without_effect(cls, config: Config) -> list[str]:
        given = config.algorithm.model_fields_set - {"filter_groups", "rollout_correction"}
        lines = [f"algorithm.{name} is for `hpcrl train`: online DPO has no advantages" for name in sorted(given)]
        if config.job.machine is not None:
            lines.append("job.machine is for `hpcrl train`: steps of online DPO are not predicted")
        return lines

    def roles(self) -> list[RoleSpec]:
        workers = {"actor": "preference:OnlineDpoActorWorker", "ref": "preference:PairRefWorker"}
        return [
            replace(spec, worker=f"hpcrl.workers.{workers[spec.name]}") if spec.name in workers else spec
            for spec in super().roles()
        ]


def pair_rows(batch: DataProto) -> np.ndarray:
    """Rows of the best and of the worst response to each prompt in turn, int64 (2 * number of prompts,).

    Of equal scores the first response is chosen and the last one rejected, as in TRL.
    """
    samples = batch.samples
    order = np.lexsort((samples["sample_index"], -samples["score"], samples["prompt"]))
    starts = np.flatnonzero(np.diff(samples["prompt"][order], prepend=-1))
    ends = np.append(starts[1:], len(order)) - 1
    return order[np.stack([starts, ends], axis=1).reshape(-1)]


JOB = OnlineDpo
