"""The policy and the value model: log-probs, values, advantages, updates."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch

from hpcrl.algorithms.advantages import ESTIMATORS
from hpcrl.algorithms.aggregation import LossNorm, agg_loss
from hpcrl.algorithms.kl import apply_kl_in_reward
from hpcrl.algorithms.metrics import Metric, Sum, to_floats
from hpcrl.algorithms.rollout_correction import Corrected, correct_rollout
from hpcrl.algorithms.statistics import response_statistics, rollout_log_prob_statistics, variance_proxy_statistics
from hpcrl.algorithms.value_loss import value_loss
from hpcrl.batch.data_proto import Columns, DataProto, TensorBatch, padded_if_there, training_mask
from hpcrl.batch.ragged import Ragged
from hpcrl.config.derive import Derived
from hpcrl.config.plugins import parameters
from hpcrl.config.roles import ACTOR, CRITIC, REF
from hpcrl.config.schema import Config
from hpcrl.controller.register import Dispatch, register
from hpcrl.model.shape import Lora, ModelShape
from hpcrl.observe.record.archive import UPDATE_COLUMNS
from hpcrl.runtime.groups import RoleGroups
from hpcrl.workers.actor_objective import ActorObjective, UpdateRecord
from hpcrl.workers.model_worker import SEQUENCE, ModelWorker, Updates


class ActorWorker(ModelWorker):
    spec = ACTOR

    def __init__(
        self, groups: RoleGroups, shape: ModelShape, config: Config, derived: Derived, total_steps: int
    ) -> None:
        num_updates = (total_steps - config.trainer.critic_warmup) * derived.actor_updates_per_step
        lora, exact = Lora.from_config(config.model), config.rollout.exact
        super().__init__(groups, shape, config, total_updates=num_updates, lora=lora, exact=exact)
        actor, algorithm = config.actor, config.algorithm
        self.updates = Updates(actor.ppo_mini_batch_size, actor.ppo_epochs, actor.shuffle, config.run.seed)
        self.loss_scale_factor = derived.loss_scale_factor
        self.objective = ActorObjective(config, derived)
        self.estimator = ESTIMATORS.get(algorithm.adv_estimator)
        self.estimator_params = parameters(config, "algorithm", algorithm.adv_estimator)
        self.sum_pi_squared = derived.needs_sum_pi_squared
        self.records_routing = actor.router_replay.mode == "R2"
        self.keeps_entropies = config.trainer.save_rollouts

    @register(
        Dispatch.DP_COMPUTE_PROTO,
        reads=(*SEQUENCE, "rollout_log_probs", "routed_experts?"),
        writes=("old_log_probs", "entropies?", "sum_pi_squared?", "routed_experts?"),
        phase="old_log_prob",
    )
    def compute_log_prob(self, batch: DataProto) -> DataProto:
        """Log-probs under the policy before this step's update, their entropy, and their difference from the rollout
        engine's.

        In bypass mode they are the rollout engine's, and nothing is computed.
        """
        if self.objective.correction.bypass_mode:
            return DataProto({"old_log_probs": batch.fetch("rollout_log_probs")})
        outputs = self.engine.log_probs(
            batch,
            max_tokens=self.config.actor.ppo_max_token_len_per_gpu,
            temperature=self.config.rollout.temperature,
            entropy=True,
            sum_pi_squared=self.sum_pi_squared,
            record_routing=self.records_routing,
        )
        return self._old_log_probs(batch, outputs) if self.is_leader else DataProto()

    def _old_log_probs(self, batch: DataProto, outputs: dict[str, Ragged]) -> DataProto:
        """Columns of the policy before the update, and their metrics."""
        mask = batch.padded("response_mask").float()
        norm = self.global_norm(batch, self.loss_scale_factor)
        entropy = agg_loss(outputs["entropy"].padded(), mask, self.config.actor.loss_agg_mode, norm)
        columns: Columns = {"old_log_probs": outputs["log_probs"]}
        if self.keeps_entropies:
            columns["entropies"] = outputs["entropy"]
        if self.records_routing:
            columns["routed_experts"] = outputs["routed_experts"]
        if self.sum_pi_squared:
            columns["sum_pi_squared"] = outputs["sum_pi_squared"]
        metrics: dict[str, Metric] = {"actor/entropy": Sum(entropy)}
        metrics |= rollout_log_prob_statistics(batch.padded("rollout_log_probs"), outputs["log_probs"].padded(), mask)
        return DataProto(columns, {}, {"metrics": to_floats(metrics)})

    @register(Dispatch.DP_COMPUTE_PROTO, reads=SEQUENCE, writes=("ref_log_prob",), phase="ref")
    def compute_ref_log_prob(self, batch: DataProto) -> DataProto:
        """Log-probs of the reference of a policy with adapters: its base model, without a second model."""
        temperature, max_tokens = self.config.rollout.temperature, REF.token_budget(self.config)
        with self.engine.without_adapters():
            return self.log_prob_column("ref_log_prob", batch, max_tokens=max_tokens, temperature=temperature)

    def _with_correction(self, batch: DataProto) -> tuple[DataProto, dict[str, Metric]]:
        """The batch with importance weights of training against rollout and a response mask without rejected tokens,
        and metrics."""
        lengths = batch.fetch("response_mask").lengths
        corrected = self._corrected(batch, batch.fetch("old_log_probs"))
        tokens: Columns = {}
        if corrected.weights is not None:
            tokens["rollout_is_weights"] = Ragged.from_padded(corrected.weights.float(), lengths)
        if self.objective.correction.rollout_rs is not None:
            tokens["loss_mask"] = Ragged.from_padded(corrected.response_mask.to(torch.int32), lengths)
        return batch.union(DataProto(tokens)), dict(corrected.metrics)

    def _corrected(self, batch: DataProto, old_log_probs: Ragged) -> Corrected:
        rollout, mask = batch.padded("rollout_log_probs"), batch.padded("response_mask").float()
        settings = self.objective.correction
        return correct_rollout(old_log_probs.padded(), rollout, mask, settings, self.sum_over_replicas)

    @register(
        Dispatch.DP_COMPUTE_PROTO,
        reads=(
            *("response_mask", "token_level_scores", "rollout_log_probs"),
            *("old_log_probs?", "ref_log_prob?", "values?", "sum_pi_squared?"),
            *("turn_states?", "prompt", "prompt_length", "reward_components?", "reward_baseline?"),
        ),
        writes=("token_level_rewards", "advantages", "returns", "rollout_is_weights?", "loss_mask?"),
        group_by="prompt",
        leader_only=True,
        phase="adv",
    )
    def compute_advantage(self, batch: DataProto, *, kl_coef: float = 0.0) -> DataProto:
        """Rollout correction, KL penalty of weight `kl_coef`, advantages and returns, on the leaders.

        The samples of a prompt are on one replica. The penalty is on every token that the model wrote; estimators do
        not see the tokens that the correction rejected (verl's order). Without old log-probs there is no correction:
        then they come from the step's only update, which has weights of 1.
        """
        algorithm, data = self.config.algorithm, self.config.data
        correction: dict[str, Metric] = {}
        if "old_log_probs" in batch.tokens and not self.objective.correction.bypass_mode:
            batch, correction = self._with_correction(batch)
        column = batch.fetch("response_mask")
        mask, counted = column.padded().float(), training_mask(batch)
        scores = batch.padded("token_level_scores")
        rewards = scores
        metrics: dict[str, Metric] = {}
        if algorithm.use_kl_in_reward:
            old, ref = batch.padded("old_log_probs"), batch.padded("ref_log_prob")
            rewards, metrics = apply_kl_in_reward(scores, old, ref, mask, beta=kl_coef, kind=algorithm.kl_penalty)
        has_failed = ~mask.bool().any(1).numpy()  # its environment
        tensors, reduce = self._estimator_tensors(batch, has_failed), self.sum_over_replicas
        advantages, returns = self.estimator(rewards, counted, params=self.estimator_params, reduce=reduce, **tensors)
        if "index" in tensors:
            advantages = advantages.masked_fill(torch.from_numpy(_has_no_peer(batch, has_failed))[:, None], 0.0)
        statistics = response_statistics(
            prompt_length=torch.from_numpy(batch.samples["prompt_length"]),
            response_length=torch.from_numpy(column.lengths),
            max_prompt_length=data.max_prompt_length,
            max_response_length=data.max_response_length,
            token_level_scores=scores,
            token_level_rewards=rewards,
            advantages=advantages,
            returns=returns,
            response_mask=counted,
            values=padded_if_there(batch, "values"),
        )
        metrics = correction | metrics | statistics
        written = {"token_level_rewards": rewards, "advantages": advantages, "returns": returns}
        tokens: Columns = {name: Ragged.from_padded(padded.float(), column.lengths) for name, padded in written.items()}
        tokens |= {name: batch.tokens[name] for name in ("rollout_is_weights", "loss_mask") if name in batch.tokens}
        return DataProto(tokens, {}, {"metrics": to_floats(metrics)})

    def _estimator_tensors(self, batch: DataProto, has_failed: np.ndarray) -> dict[str, Any]:
        """Tensors that the estimator takes, by verl's names.

        Args:
            has_failed: bool (N,), see `_groups`.
        """
        samples, keys = batch.samples, self.config.algorithm.gdpo_reward_keys
        sources: dict[str, Callable[[], Any]] = {
            "index": lambda: torch.from_numpy(_groups(batch, has_failed)),
            "reward_baselines": lambda: torch.from_numpy(samples["reward_baseline"].astype(np.float32)),
            "reward_components": lambda: dict(
                zip(keys, torch.from_numpy(samples["reward_components"]).unbind(1), strict=True)
            ),
        }
        tensors = {}
        for name in (*self.estimator.inputs, *self.estimator.optional):
            if name in sources:
                tensors[name] = sources[name]()
            elif name in batch.tokens or name in self.estimator.inputs:
                tensors[name] = batch.padded(name)
        return tensors

    @register(
        Dispatch.DP_COMPUTE_PROTO,
        reads=(
            *(*SEQUENCE, "loss_mask?", "rollout_log_probs", "old_log_probs?", "advantages"),
            *("ref_log_prob?", "rollout_is_weights?", "teacher_log_prob?", "teacher_topk_log_probs?"),
            *("teacher_topk_ids?", "routed_experts?", "prompt", "sample_index"),
        ),
        writes=("old_log_probs?", "entropies?", *(f"{name}?" for name in UPDATE_COLUMNS)),
        updates=True,
    )
    def update_actor(self, batch: DataProto) -> DataProto:
        """All optimizer steps of a training step; "metrics" is a list, those of each mini-batch.

        A batch without old log-probs must form one mini-batch. Its forward pass then also returns the columns and the
        metrics of `compute_log_prob`.
        """
        step = batch.meta_info["step"]
        outputs: dict[str, Ragged] | None = None if "old_log_probs" in batch.tokens else {}
        # the samples of PF-PPO are not those of the step
        records = step in self.config.trainer.record_update_steps and not self.config.algorithm.use_pf_ppo
        record = UpdateRecord(self.objective) if records else None
        updates = []
        with self.engine.update():
            for number, rows in enumerate(self.updates.rows(batch)):
                mini, columns = batch[rows], {} if outputs is None and record is not None else outputs
                updates.append(
                    self.train(
                        mini,
                        partial(self.objective.normalised, key=(step, number)),
                        loss_scale_factor=self.loss_scale_factor,
                        max_tokens=self.config.actor.ppo_max_token_len_per_gpu,
                        temperature=self.config.rollout.temperature,
                        entropy=self.objective.uses_entropy or outputs is not None,
                        topk_ids="teacher_topk_ids" if "teacher_topk_ids" in mini.tokens else None,
                        columns=columns,
                    )
                )
                if record is not None and columns and self.is_leader:
                    record.add_mini_batch(rows, mini, columns["log_probs"], key=(step, number))
        recorded: Columns = {} if record is None else self._recorded(batch, record)
        if outputs is None or not self.is_leader:
            return DataProto(recorded, {}, {"metrics": updates})
        (metrics,) = updates
        log_probs = self._old_log_probs(batch, outputs)
        against_rollout = to_floats(self._corrected(batch, outputs["log_probs"]).metrics)
        tokens = log_probs.tokens | recorded
        return DataProto(tokens, {}, {"metrics": [log_probs.meta_info["metrics"] | against_rollout | metrics]})

    def _recorded(self, batch: DataProto, record: UpdateRecord) -> Columns:
        """UPDATE_COLUMNS, on the leader. Collective over the role: it runs the model after the step."""
        max_tokens = self.config.actor.ppo_max_token_len_per_gpu
        after = self.log_prob_column(
            "new_log_probs", batch, max_tokens=max_tokens, temperature=self.config.rollout.temperature
        )
        return after.tokens | record.columns(batch) if self.is_leader else {}

    @register(
        Dispatch.DP_COMPUTE_METRIC,
        reads=("response_mask", "loss_mask?", "old_log_probs", "sum_pi_squared", "advantages", "rollout_is_weights?"),
        leader_only=True,
    )
    def variance_proxy(self, batch: DataProto, grad_norm: float | None) -> dict[str, Metric]:
        """Metrics of the noise of the step's gradient; `grad_norm` is that of its update, None without one."""
        names = ("old_log_probs", "sum_pi_squared", "advantages")
        columns = {name: batch.padded(name) for name in names}
        mask, weights = training_mask(batch), padded_if_there(batch, "rollout_is_weights")
        metrics = variance_proxy_statistics(
            **columns, response_mask=mask, rollout_is_weights=weights, grad_norm=grad_norm
        )
        return to_floats(metrics)


def _groups(batch: DataProto, has_failed: np.ndarray) -> np.ndarray:
    """The prompt of each sample, int64 (N,). A sample whose environment failed is a group of its own."""
    prompts = batch.samples["prompt"].astype(np.int64)
    return np.where(has_failed, -1 - np.arange(len(prompts)), prompts)


def _has_no_peer(batch: DataProto, has_failed: np.ndarray) -> np.ndarray:
    """Whether the environments of all other samples of the prompt failed, bool (N,): there is nothing to compare."""
    _, group, size = np.unique(batch.samples["prompt"], return_inverse=True, return_counts=True)
    return (np.bincount(group, ~has_failed)[group] == 1) & (size[group] > 1)


class CriticWorker(ModelWorker):
    spec = CRITIC

    def __init__(
        self, groups: RoleGroups, shape: ModelShape, config: Config, derived: Derived, total_steps: int
    ) -> None:
        super().__init__(groups, shape, config, total_updates=total_steps * derived.critic_updates_per_step)
        self.loss_agg_mode = derived.critic_loss_agg_mode
        self.loss_scale_factor = derived.critic_loss_scale_factor
        self.updates = Updates(
            derived.critic_mini_batch_size, derived.critic_ppo_epochs, config.actor.shuffle, config.run.seed
        )

    @register(Dispatch.DP_COMPUTE_PROTO, reads=SEQUENCE, writes=("values",), phase="values")
    def compute_values(self, batch: DataProto) -> DataProto:
        outputs = self.engine.values(batch, max_tokens=self.max_tokens)
        return DataProto({"values": outputs["values"]}) if self.is_leader else DataProto()

    @register(
        Dispatch.DP_COMPUTE_METRIC,
        reads=(*SEQUENCE, "loss_mask?", "values", "returns", "prompt"),
        updates=True,
    )
    def update_critic(self, batch: DataProto) -> list[dict[str, Metric]]:
        """All optimizer steps of a training step; metrics of each mini-batch."""
        with self.engine.update():
            return [
                self.train(mini, self._objective, loss_scale_factor=self.loss_scale_factor, max_tokens=self.max_tokens)
                for mini in self.updates.mini_batches(batch)
            ]

    def _objective(self, norm: LossNorm) -> Callable[..., tuple[torch.Tensor, dict[str, Metric]]]:
        def objective(outputs: dict[str, torch.Tensor], micro: TensorBatch) -> tuple[torch.Tensor, dict[str, Metric]]:
            mask, clip = training_mask(micro), self.config.critic.cliprange_value
            token_loss, metrics = value_loss(
                outputs["values"], micro.padded("values"), micro.padded("returns"), mask, clip
            )
            loss = agg_loss(token_loss, mask, self.loss_agg_mode, norm)
            return loss, {**metrics, "critic/vf_loss": Sum(loss.detach()), "critic/loss": Sum(loss.detach())}

        return objective
