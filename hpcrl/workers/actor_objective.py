"""What the actor minimises: policy loss, entropy bonus, KL to the reference, distillation."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from hpcrl.algorithms.aggregation import LossNorm, agg_loss, aggregate
from hpcrl.algorithms.distillation import Distillation, Distilled, distillation_loss
from hpcrl.algorithms.kl import kl_penalty
from hpcrl.algorithms.metrics import Max, Mean, Metric, Sum
from hpcrl.algorithms.policy_losses import POLICY_LOSSES
from hpcrl.batch.data_proto import Columns, DataProto, TensorBatch, padded_if_there, training_mask
from hpcrl.batch.ragged import Ragged
from hpcrl.config.derive import Derived
from hpcrl.config.plugins import parameters
from hpcrl.config.schema import Config

Outputs = dict[str, torch.Tensor]
Loss = Callable[[Outputs, TensorBatch], tuple[torch.Tensor, dict[str, Metric]]]
STREAM = 0x6C6F  # keeps these numbers apart from others keyed by the same seed


class ActorObjective:
    """Policy loss - entropy_coeff * entropy + kl_loss_coef * KL(policy, reference) + coef * distillation loss.

    Each is aggregated over the global mini-batch. Without distillation_loss.use_task_rewards only the last one is used.
    """

    def __init__(self, config: Config, derived: Derived) -> None:
        """Raises ValueError for settings that the losses reject."""
        self.actor = config.actor
        self.seed = config.run.seed
        self.correction = config.algorithm.rollout_correction
        self.policy_loss = POLICY_LOSSES.get(derived.loss_mode)
        self.policy_params = parameters(config, "actor.policy_loss", derived.loss_mode)
        self.policy_loss.check(self.policy_params)
        self.distillation: Distillation | None = None
        if config.distillation.enabled:
            mode = config.distillation.distillation_loss.loss_mode
            self.distillation = parameters(config, "distillation.distillation_loss", mode)

    @property
    def uses_entropy(self) -> bool:
        return self.actor.entropy_coeff != 0 or self.actor.calculate_entropy

    def normalised(self, norm: LossNorm, *, key: tuple[int, int]) -> Loss:
        """The loss of a micro-batch as a share of the mini-batch's; `key` (step, mini-batch) keys its random
        numbers."""

        def loss(outputs: Outputs, micro: TensorBatch) -> tuple[torch.Tensor, dict[str, Metric]]:
            total = outputs["log_probs"].new_zeros(())
            metrics: dict[str, Metric] = {}
            if self.distillation is None or self.distillation.use_task_rewards:
                total, metrics = self._on_rewards(outputs, micro, norm, self._generator(key, micro))
            if self.distillation is not None:
                distance, teacher_metrics = self._to_teacher(outputs, micro, norm)
                total = total + self.distillation.coef * distance
                metrics |= teacher_metrics
            return total, metrics | {"actor/loss": Sum(total.detach())}

        return loss

    def _on_rewards(
        self, outputs: Outputs, micro: TensorBatch, norm: LossNorm, generator: torch.Generator
    ) -> tuple[torch.Tensor, dict[str, Metric]]:
        actor, mask, log_probs = self.actor, training_mask(micro), outputs["log_probs"]
        old_log_probs = _old_log_probs(outputs, micro)
        advantages, weights = micro.padded("advantages"), padded_if_there(micro, "rollout_is_weights")
        token_losses = self.policy_loss(
            log_probs, old_log_probs, advantages, mask, self.policy_params, weights, generator
        )
        total = aggregate(token_losses, mask, actor.loss_agg_mode, norm)
        deviation = (log_probs.detach() - old_log_probs).exp().sub(1).abs()
        metrics = {
            **token_losses.metrics,
            "actor/pg_loss": Sum(total.detach()),
            "actor/ratio_deviation_max": Max.of(deviation, mask),
        }
        if self.uses_entropy:
            entropy = agg_loss(outputs["entropy"], mask, actor.loss_agg_mode, norm)
            total = total - actor.entropy_coeff * entropy
            metrics["actor/entropy_loss"] = Sum(entropy.detach())
        if actor.use_kl_loss:
            penalty = kl_penalty(log_probs, micro.padded("ref_log_prob"), actor.kl_loss_type)
            kl = agg_loss(penalty, mask, actor.loss_agg_mode, norm)
            total = total + actor.kl_loss_coef * kl
            metrics |= {"actor/kl_loss": Sum(kl.detach()), "actor/kl_coef": Mean(actor.kl_loss_coef, 1.0)}
        return total, metrics

    def derivatives(self, log_probs: torch.Tensor, mini: DataProto, key: tuple[int, int]) -> torch.Tensor:
        """d loss / d log-prob of the policy loss of each token before its mean over tokens, (B, T) fp32: 0 where the
        loss is clipped.

        Losses that draw or rank tokens of a micro-batch (cov, bypass_mode) see all of the replica's mini-batch here.

        Args:
            log_probs: (B, T), those at the update.
        """
        variable = log_probs.clone().requires_grad_()
        if not len(variable):
            return log_probs
        mask, advantages = training_mask(mini), mini.padded("advantages")
        old_log_probs = _old_log_probs({"log_probs": log_probs}, mini)
        weights = padded_if_there(mini, "rollout_is_weights")
        generator = self._generator(key, mini)
        losses = self.policy_loss(variable, old_log_probs, advantages, mask, self.policy_params, weights, generator)
        (derivatives,) = torch.autograd.grad(losses.values.sum(), variable)
        return derivatives * mask + 0.0  # not -0.0

    def _to_teacher(
        self, outputs: Outputs, micro: TensorBatch, norm: LossNorm
    ) -> tuple[torch.Tensor, dict[str, Metric]]:
        assert self.distillation is not None
        mask = training_mask(micro)
        topk: dict[str, torch.Tensor] = {}
        if "teacher_topk_ids" in micro.tokens:
            width = self.distillation.topk
            topk = {
                "student_topk": outputs["topk_log_probs"],
                "teacher_topk": micro.tokens["teacher_topk_log_probs"].padded_vectors(width),
                "student_topk_ids": outputs["own_topk_ids"],
                "teacher_topk_ids": micro.tokens["teacher_topk_ids"].padded_vectors(width),
            }
        losses, metrics = distillation_loss(
            self.distillation,
            Distilled(outputs["log_probs"], mask, micro.padded("teacher_log_prob"), **topk),
            old_log_prob=_old_log_probs(outputs, micro),
            rollout_is_weights=padded_if_there(micro, "rollout_is_weights"),
        )
        total = agg_loss(losses, mask, self.actor.loss_agg_mode, norm)
        return total, {**metrics, "distillation/loss": Sum(total.detach())}

    def _generator(self, key: tuple[int, int], micro: DataProto | TensorBatch) -> torch.Generator:
        """Random numbers of a micro-batch, the same on all ranks of a replica and in any layout."""
        first = (int(micro.samples["prompt"][0]), int(micro.samples["sample_index"][0]))
        words = np.random.SeedSequence(self.seed % 2**64, spawn_key=(STREAM, *key, *first)).generate_state(2)
        return torch.Generator().manual_seed(int(words[0]) << 32 | int(words[1]))


class UpdateRecord:
    """What the updates of a step computed of each response token: see `hpcrl.observe.record.archive.UPDATE_COLUMNS`."""

    def __init__(self, objective: ActorObjective) -> None:
        self._objective = objective
        self._rows: dict[int, tuple[np.ndarray, np.ndarray]] = {}  # row -> log-probs, derivatives

    def add_mini_batch(self, rows: np.ndarray, mini: DataProto, log_probs: Ragged, *, key: tuple[int, int]) -> None:
        """Add a mini-batch, of which this replica has `rows` of the step's batch; a later pass replaces an earlier
        one."""
        lengths = log_probs.lengths
        derivatives = Ragged.from_padded(self._objective.derivatives(log_probs.padded(), mini, key), lengths)
        for place, row in enumerate(rows.tolist()):
            self._rows[row] = log_probs.row(place), derivatives.row(place)

    def columns(self, batch: DataProto) -> Columns:
        """The columns of the step's batch, fp32; NaN where no update trained a sample."""
        nothing = [np.full(length, np.nan, np.float32) for length in batch.fetch("response_mask").lengths]
        found = [self._rows.get(row, (none, none)) for row, none in enumerate(nothing)]
        names = ("update_log_probs", "loss_gradients")
        return {name: Ragged.from_rows([row[i] for row in found], np.float32) for i, name in enumerate(names)}


def _old_log_probs(outputs: Outputs, micro: DataProto | TensorBatch) -> torch.Tensor:
    """The column `old_log_probs`; without it the update is the first one from these weights, whose own log-probs are
    the old ones."""
    found = padded_if_there(micro, "old_log_probs")
    return outputs["log_probs"].detach() if found is None else found
