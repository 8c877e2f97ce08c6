"""Training on preferences: pairs of a chosen and a rejected response, good or bad responses (KTO), online DPO."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from hpcrl.algorithms.aggregation import LossNorm
from hpcrl.algorithms.metrics import Mean, MeanDifference, Metric, Sum, to_floats
from hpcrl.algorithms.preference_losses import PREFERENCE_LOSSES, PairLogps
from hpcrl.algorithms.statistics import rollout_log_prob_statistics
from hpcrl.batch.data_proto import DataProto, TensorBatch, training_mask
from hpcrl.config.derive import Derived
from hpcrl.config.roles import ACTOR
from hpcrl.config.schema import Config
from hpcrl.controller.register import Dispatch, register
from hpcrl.model.shape import Lora, ModelShape
from hpcrl.runtime.groups import RoleGroups
from hpcrl.workers.frozen import RefWorker
from hpcrl.workers.model_worker import SEQUENCE, ModelWorker, Updates

PAIR = (*SEQUENCE, "loss_mask?", "ref_logps?")


class PairRefWorker(RefWorker):
    """The reference of responses that the policy has drawn."""

    @register(Dispatch.DP_COMPUTE_PROTO, reads=SEQUENCE, phase="ref")
    def compute_ref_log_prob(self, batch: DataProto) -> DataProto:
        """Per sample `ref_logps`, float32: the log-prob of the response."""
        return ref_logps(self, batch)


class PreferenceRefWorker(PairRefWorker):
    """The reference of given answers, which no temperature of sampling belongs to."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.temperature = 1.0


class PreferencePolicy(ModelWorker):
    """A policy that is trained on pairs: rows 2i and 2i + 1 of a batch are chosen and rejected."""

    spec = ACTOR

    def __init__(
        self,
        groups: RoleGroups,
        shape: ModelShape,
        config: Config,
        params: Any,
        *,
        temperature: float = 1.0,
        **options: Any,
    ) -> None:
        """Build the policy with the loss that `params` names.

        Args:
            params: loss_type and its parameters.
            temperature: temperature of log-probs.
            options: see `ModelWorker`.
        """
        super().__init__(groups, shape, config, lora=Lora.from_config(config.model), **options)
        self.params, self.temperature = params, temperature
        self.loss = PREFERENCE_LOSSES.get(params.loss_type)
        self.nll_weight = self.loss.nll_weight if params.nll_weight is None else params.nll_weight

    @register(Dispatch.DP_COMPUTE_PROTO, reads=SEQUENCE, phase="ref")
    def compute_ref_log_prob(self, batch: DataProto) -> DataProto:
        """As a reference's, without a second model: the policy without its adapters, if it has some. Another one is the
        reference before the first step only."""
        with self.engine.without_adapters():
            return ref_logps(self, batch)

    def train_pairs(self, batch: DataProto) -> dict[str, Metric]:
        """One optimizer step on the pairs of all replicas."""
        num_chosen = self._chosen_tokens(batch)
        options = {"max_tokens": self.max_tokens, "temperature": self.temperature}
        return self.train(
            batch, lambda norm: partial(self._loss, norm, num_chosen), loss_scale_factor=1.0, unit=2, **options
        )

    def _chosen_tokens(self, batch: DataProto) -> float:
        """Tokens of the chosen responses that the NLL is of, over all replicas."""
        return float(self.sum_over_replicas(training_mask(batch)[::2].sum().double()))

    def _loss(
        self, norm: LossNorm, num_chosen: float, outputs: dict[str, Tensor], part: TensorBatch | DataProto
    ) -> tuple[Tensor, dict[str, Metric]]:
        """This part's share of the loss, a scalar, and its metrics.

        Args:
            outputs: `log_probs`, (2 B, T).
        """
        log_probs, mask = outputs["log_probs"], part.padded("response_mask").float()
        lengths = mask.sum(-1).clamp(min=1).view(-1, 2).unbind(1)
        policy = summed(log_probs, mask).view(-1, 2).unbind(1)
        refs: tuple[Tensor | None, ...] = (None, None)
        if self.loss.reference:
            refs = torch.from_numpy(part.samples["ref_logps"]).to(log_probs.device).view(-1, 2).unbind(1)
        pairs = PairLogps(*policy, *refs, *lengths)
        loss = self.loss.function(pairs, self.params).sum() / (norm.global_batch_size / 2)
        nll = -(log_probs * training_mask(part))[::2].sum() / max(num_chosen, 1.0)
        if self.nll_weight:
            loss = loss + self.nll_weight * nll
        # per token, as in TRL's trainers without a reference
        logps = pairs.mean_log_ratios if self.loss.per_token and not self.loss.reference else policy
        ratios = pairs.log_ratios if self.loss.reference else logps
        every = torch.ones_like(policy[0])
        chosen, rejected = (self.params.beta * ratio.detach() for ratio in ratios)
        metrics: dict[str, Metric] = {
            "rewards/chosen": Mean.of(chosen, every),
            "rewards/rejected": Mean.of(rejected, every),
            "rewards/margins": Mean.of(chosen - rejected, every),
            "rewards/accuracies": Mean.of(chosen > rejected, every),
            "logps/chosen": Mean.of(logps[0].detach(), every),
            "logps/rejected": Mean.of(logps[1].detach(), every),
        }
        if "rollout_log_probs" in part.tokens:
            metrics |= rollout_log_prob_statistics(part.padded("rollout_log_probs"), log_probs.detach(), mask)
        return loss, {"train/loss": Sum(loss.detach()), "train/nll_loss": Sum(nll.detach()), **metrics}


class PreferenceActorWorker(PreferencePolicy):
    """The policy of `hpcrl preference`."""

    def __init__(
        self, groups: RoleGroups, shape: ModelShape, config: Config, derived: object, total_steps: int
    ) -> None:
        own = config.section("preference")
        super().__init__(groups, shape, config, own, optim=own.optim, total_updates=total_steps)
        self.max_tokens = own.max_token_len_per_gpu

    @register(Dispatch.DP_COMPUTE_METRIC, reads=PAIR, phase="update_actor", updates=True)
    def update(self, batch: DataProto) -> dict[str, Metric]:
        """One optimizer step on the pairs of all replicas."""
        return self.train_pairs(batch)

    @register(Dispatch.DP_COMPUTE_METRIC, reads=PAIR)
    def evaluate(self, batch: DataProto) -> dict[str, Metric]:
        """Metrics of `update` under `val/`, without a step."""
        num_chosen, norm = self._chosen_tokens(batch), self.global_norm(batch, 1.0)
        outputs = self.engine.log_probs(batch, max_tokens=self.max_tokens, temperature=self.temperature)
        if not self.is_leader:
            return {}
        _, metrics = self._loss(norm, num_chosen, {"log_probs": outputs["log_probs"].padded()}, batch)
        return of_validation(metrics)


def ref_logps(worker: RefWorker | PreferencePolicy, batch: DataProto) -> DataProto:
    """Column `ref_logps`, on the leader: log-probs of the responses under a worker's model at its temperature."""
    outputs = worker.engine.log_probs(batch, max_tokens=worker.max_tokens, temperature=worker.temperature)
    if not worker.is_leader:
        return DataProto()
    return DataProto({}, {"ref_logps": summed(outputs["log_probs"].padded(), batch.padded("response_mask")).numpy()})


def summed(log_probs: Tensor, mask: Tensor) -> Tensor:
    """Log-prob of each response, fp32 (B,), from those of its tokens, fp32 (B, T).

    The sum is taken in fp64, so that it does not depend on the padding: the log-ratio of equal policies is 0.
    """
    return (log_probs.double() * mask).sum(-1).float()


def of_validation(metrics: dict[str, Metric]) -> dict[str, Metric]:
    return to_floats({f"val/{name.removeprefix('train/')}": metric for name, metric in metrics.items()})


LABELLED = (*SEQUENCE, "ref_logps", "label")


class KtoActorWorker(PreferenceActorWorker):
    """Row 2i of a batch is a response with a label, row 2i + 1 a response to another prompt after the same prompt, for
    the KL term."""

    @register(Dispatch.DP_COMPUTE_METRIC, reads=LABELLED, phase="update_actor", updates=True)
    def update(self, batch: DataProto) -> dict[str, Metric]:
        """One optimizer step on the labelled responses of all replicas."""
        kl = self._kl(batch[1::2])
        options = {"loss_scale_factor": 1.0, "max_tokens": self.max_tokens}
        metrics = self.train(batch[::2], lambda norm: partial(self._labelled_loss, kl, norm), **options)
        return {**metrics, "kl": Mean(kl, 1.0)}

    @register(Dispatch.DP_COMPUTE_METRIC, reads=LABELLED)
    def evaluate(self, batch: DataProto) -> dict[str, Metric]:
        """Metrics of `update` under `val/`, without a step."""
        kl, own = self._kl(batch[1::2]), batch[::2]
        norm = self.global_norm(own, 1.0)
        outputs = self.engine.log_probs(own, max_tokens=self.max_tokens, temperature=self.temperature)
        if not self.is_leader:
            return {}
        _, metrics = self._labelled_loss(kl, norm, {"log_probs": outputs["log_probs"].padded()}, own)
        return of_validation({**metrics, "kl": Mean(kl, 1.0)})

    def _kl(self, batch: DataProto) -> float:
        """The KL term: the mean log-ratio over all replicas, at least 0. Other ranks than those of the last stage
        return 0."""
        found = self.engine.log_probs(batch, max_tokens=self.max_tokens, temperature=self.temperature)
        total = torch.zeros(2, dtype=torch.float64)
        if found and len(batch):
            logps = summed(found["log_probs"].padded(), batch.padded("response_mask"))
            ratios = logps.double() - torch.from_numpy(batch.samples["ref_logps"])
            total = torch.stack([ratios.sum(), torch.tensor(float(len(batch)), dtype=torch.float64)])
        log_ratio, count = self.sum_over_replicas(total).tolist()
        return max(log_ratio / max(count, 1.0), 0.0)

    def _labelled_loss(
        self, kl: float, norm: LossNorm, outputs: dict[str, Tensor], part: TensorBatch | DataProto
    ) -> tuple[Tensor, dict[str, Metric]]:
        """This part's share of the loss, a scalar, and its metrics.

        Args:
            outputs: `log_probs`, (B, T).
        """
        policy = summed(outputs["log_probs"], part.padded("response_mask"))
        ref, good = (torch.from_numpy(part.samples[name]).to(policy.device) for name in ("ref_logps", "label"))
        ratios = policy - ref
        loss = self.loss.function(ratios, good, torch.tensor(kl, device=policy.device), self.params).sum()
        loss = loss / norm.global_batch_size
        rewards, logps = self.params.beta * ratios.detach(), policy.detach()
        chosen, rejected = Mean.of(rewards, good), Mean.of(rewards, ~good)
        return loss, {
            "train/loss": Sum(loss.detach()),
            "rewards/chosen": chosen,
            "rewards/rejected": rejected,
            "rewards/margins": MeanDifference(chosen, rejected),
            "logps/chosen": Mean.of(logps, good),
            "logps/rejected": Mean.of(logps, ~good),
        }


class OnlineDpoActorWorker(PreferencePolicy):
    """The policy of `hpcrl online_dpo`; its log-probs are those of sampling, at rollout.temperature."""

    def __init__(
        self, groups: RoleGroups, shape: ModelShape, config: Config, derived: Derived, total_steps: int
    ) -> None:
        options = {"total_updates": total_steps * derived.actor_updates_per_step, "exact": config.rollout.exact}
        own, temperature = config.section("online_dpo"), config.rollout.temperature
        super().__init__(groups, shape, config, own, temperature=temperature, **options)
        actor = config.actor
        self.updates = Updates(actor.ppo_mini_batch_size, actor.ppo_epochs, actor.shuffle, config.run.seed)

    @register(Dispatch.DP_COMPUTE_METRIC, reads=(*PAIR, "rollout_log_probs", "routed_experts?", "prompt"), updates=True)
    def update_actor(self, batch: DataProto) -> list[dict[str, Metric]]:
        """All optimizer steps of a training step; the metrics of each mini-batch."""
        found: list[dict[str, Metric]] = []
        with self.engine.offload.on_device("parameters", "gradients", "optimizer"):
            for mini in self.updates.mini_batches(batch):
                if found:
                    mini.pop(["rollout_log_probs"])  # they are those of the weights before the first update
                found.append(self.train_pairs(mini))
        return found
