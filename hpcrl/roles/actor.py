"""The policy: log-probs, advantages, updates."""

from __future__ import annotations

from collections.abc import Callable

import torch

from hpcrl.algorithms.advantages import AdvantageConfig, get_adv_estimator
from hpcrl.algorithms.aggregation import LossNorm, agg_loss
from hpcrl.algorithms.kl import apply_kl_in_reward, kl_penalty
from hpcrl.algorithms.metrics import Max, Mean, Metric, Sum, to_floats
from hpcrl.algorithms.policy_loss import PolicyLossConfig, get_policy_loss
from hpcrl.algorithms.statistics import response_statistics, rollout_log_prob_statistics
from hpcrl.batch.data_proto import Columns, DataProto
from hpcrl.batch.ragged import Ragged
from hpcrl.config.derive import Derived
from hpcrl.config.schema import Config
from hpcrl.controller.register import Dispatch, register
from hpcrl.grid.groups import RoleGroups
from hpcrl.model.shape import ModelShape
from hpcrl.roles.model_worker import ModelWorker, Updates


class ActorWorker(ModelWorker):
    def __init__(
        self, groups: RoleGroups, shape: ModelShape, config: Config, derived: Derived, total_steps: int
    ) -> None:
        super().__init__(
            groups,
            shape,
            head="lm",
            dtype=config.model.dtype,
            seed=config.run.seed,
            optim=config.actor.optim,
            total_updates=(total_steps - config.trainer.critic_warmup) * derived.actor_updates_per_step,
        )
        actor = config.actor
        self.config = config
        self.updates = Updates(actor.ppo_mini_batch_size, actor.ppo_epochs, actor.shuffle, config.run.seed)
        self.loss_scale_factor = derived.loss_scale_factor
        self.policy_loss = get_policy_loss(actor.policy_loss.loss_mode)
        self.policy_loss_config = PolicyLossConfig(actor.clip_ratio_low, actor.clip_ratio_high, actor.clip_ratio_c)
        self.estimator = get_adv_estimator(config.algorithm.adv_estimator)

    @register(
        Dispatch.DP_COMPUTE_PROTO,
        reads=("input_ids", "response_mask", "rollout_log_probs"),
        writes=("old_log_probs",),
    )
    def compute_log_prob(self, batch: DataProto) -> DataProto:
        """Log-probs under the policy before this step's update, their entropy, and how far the rollout engine's are."""
        outputs = self.engine.log_probs(
            batch,
            max_tokens=self.config.actor.ppo_max_token_len_per_gpu,
            temperature=self.config.rollout.temperature,
            entropy=True,
        )
        if not self.is_home:
            return DataProto()
        mask = batch.padded("response_mask").float()
        norm = self.global_norm(batch, self.loss_scale_factor)
        entropy = agg_loss(outputs["entropy"].padded(), mask, self.config.actor.loss_agg_mode, norm)
        old = outputs["log_probs"]
        metrics: dict[str, Metric] = {"actor/entropy": Sum(entropy)}
        metrics |= rollout_log_prob_statistics(batch.padded("rollout_log_probs"), old.padded(), mask)
        return DataProto({"old_log_probs": old}, {}, {"metrics": to_floats(metrics)})

    @register(
        Dispatch.DP_COMPUTE_PROTO,
        reads=(
            "response_mask",
            "token_level_scores",
            "old_log_probs",
            "ref_log_prob?",
            "values?",
            "prompt",
            "prompt_length",
        ),
        writes=("token_level_rewards", "advantages", "returns"),
        homes_only=True,
    )
    def compute_advantage(self, batch: DataProto) -> DataProto:
        """KL penalty, advantages and returns, on home ranks. meta_info["kl_coef"] is the weight of the penalty.

        For estimators with groups the caller assigns all samples of a prompt to one replica.
        """
        algorithm, data = self.config.algorithm, self.config.data
        column = batch.fetch("response_mask")
        mask = column.padded().float()
        scores = batch.padded("token_level_scores")
        rewards = scores
        metrics: dict[str, Metric] = {}
        if algorithm.use_kl_in_reward:
            rewards, metrics = apply_kl_in_reward(
                scores,
                batch.padded("old_log_probs"),
                batch.padded("ref_log_prob"),
                mask,
                beta=batch.meta_info["kl_coef"],
                kind=algorithm.kl_penalty,
            )
        values = batch.padded("values") if "values" in batch.tokens else None
        advantages, returns = self.estimator(
            rewards,
            mask,
            values=values,
            group=torch.from_numpy(batch.samples["prompt"].astype("int64")),
            cfg=AdvantageConfig(algorithm.gamma, algorithm.lam, algorithm.norm_adv_by_std_in_grpo),
            reduce=self.sum_over_replicas,
        )
        metrics = metrics | response_statistics(
            prompt_length=torch.from_numpy(batch.samples["prompt_length"]),
            response_length=column.lengths,
            max_prompt_length=data.max_prompt_length,
            max_response_length=data.max_response_length,
            token_level_scores=scores,
            token_level_rewards=rewards,
            advantages=advantages,
            returns=returns,
            response_mask=mask,
            values=values,
        )
        written = {"token_level_rewards": rewards, "advantages": advantages, "returns": returns}
        tokens: Columns = {name: Ragged.from_padded(padded.float(), column.lengths) for name, padded in written.items()}
        return DataProto(tokens, {}, {"metrics": to_floats(metrics)})

    @register(
        Dispatch.DP_COMPUTE_METRIC,
        reads=("input_ids", "response_mask", "old_log_probs", "advantages", "ref_log_prob?", "prompt"),
    )
    def update_actor(self, batch: DataProto) -> list[dict[str, Metric]]:
        """All optimizer steps of a training step; metrics of each mini-batch."""
        return [
            self.train(
                mini,
                self._objective,
                loss_scale_factor=self.loss_scale_factor,
                max_tokens=self.config.actor.ppo_max_token_len_per_gpu,
                temperature=self.config.rollout.temperature,
                entropy=self.config.actor.entropy_coeff != 0,
            )
            for mini in self.updates.mini_batches(batch)
        ]

    def _objective(self, norm: LossNorm) -> Callable[..., tuple[torch.Tensor, dict[str, Metric]]]:
        """pg_loss - entropy_coeff * entropy + kl_loss_coef * KL(policy, reference), each over the global mini-batch."""
        actor = self.config.actor

        def objective(outputs: dict[str, torch.Tensor], micro: DataProto) -> tuple[torch.Tensor, dict[str, Metric]]:
            mask = micro.padded("response_mask").float()
            token_loss, metrics = self.policy_loss(
                outputs["log_probs"],
                micro.padded("old_log_probs"),
                micro.padded("advantages"),
                mask,
                self.policy_loss_config,
            )
            loss = agg_loss(token_loss, mask, actor.loss_agg_mode, norm)
            deviation = (outputs["log_probs"].detach() - micro.padded("old_log_probs")).exp().sub(1).abs()
            metrics = {
                **metrics,
                "actor/pg_loss": Sum(loss.detach()),
                "actor/ratio_deviation_max": Max.of(deviation, mask),
            }
            if actor.entropy_coeff:
                entropy = agg_loss(outputs["entropy"], mask, actor.loss_agg_mode, norm)
                loss = loss - actor.entropy_coeff * entropy
                metrics["actor/entropy_loss"] = Sum(entropy.detach())
            if actor.use_kl_loss:
                penalty = kl_penalty(outputs["log_probs"], micro.padded("ref_log_prob"), actor.kl_loss_type)
                kl = agg_loss(penalty, mask, actor.loss_agg_mode, norm)
                loss = loss + actor.kl_loss_coef * kl
                metrics |= {"actor/kl_loss": Sum(kl.detach()), "actor/kl_coef": Mean(actor.kl_loss_coef, 1.0)}
            return loss, metrics | {"actor/loss": Sum(loss.detach())}

        return objective


class SftActorWorker(ModelWorker):
    """The policy of `hpcrl sft`: the same engine, a cross-entropy on the answer's tokens."""

    def __init__(self, groups: RoleGroups, shape: ModelShape, config: Config) -> None:
        super().__init__(
            groups,
            shape,
            head="lm",
            dtype=config.model.dtype,
            seed=config.run.seed,
            optim=config.sft.optim,
            total_updates=config.sft.total_training_steps,
        )
        self.config = config

    @register(Dispatch.DP_COMPUTE_METRIC, reads=("input_ids", "response_mask"))
    def update(self, batch: DataProto) -> dict[str, Metric]:
        """One optimizer step on prompts and answers."""

        def objective(norm: LossNorm) -> Callable[..., tuple[torch.Tensor, dict[str, Metric]]]:
            def loss(outputs: dict[str, torch.Tensor], micro: DataProto) -> tuple[torch.Tensor, dict[str, Metric]]:
                mask = micro.padded("response_mask").float()
                nll = agg_loss(-outputs["log_probs"], mask, "token-mean", norm)
                return nll, {"train/loss": Sum(nll.detach())}

            return loss

        return self.train(batch, objective, loss_scale_factor=1.0, max_tokens=self.config.sft.max_token_len_per_gpu)
