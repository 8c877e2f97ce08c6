"""KTO: the policy of `hpcrl preference` on responses that are each good or bad."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from hpcrl.algorithms.aggregation import LossNorm
from hpcrl.algorithms.metrics import Mean, MeanDifference, Metric, Sum
from hpcrl.batch.data_proto import DataProto
from hpcrl.batch.ragged import TensorBatch
from hpcrl.controller.register import Dispatch, register
from hpcrl.workers.model_worker import SEQUENCE
from hpcrl.workers.preference import PreferenceActorWorker, of_validation, summed

LABELLED = (*SEQUENCE, "ref_logps", "label")


class KtoActorWorker(PreferenceActorWorker):
    """Row 2i of a batch is a response with a label, row 2i + 1 a response to another prompt after the same prompt, for
    the KL term."""

    @register(Dispatch.DP_COMPUTE_METRIC, reads=LABELLED, phase="update_actor", updates=True)
    def update(self, batch: DataProto) -> dict[str, Metric]:
        """One optimizer step on the labelled responses of all replicas."""
        kl = self._kl(batch[1::2])

        def objective(norm: LossNorm) -> Callable[..., tuple[Tensor, dict[str, Metric]]]:
            def loss(outputs: dict[str, Tensor], micro: TensorBatch) -> tuple[Tensor, dict[str, Metric]]:
                return self._labelled_loss(outputs["log_probs"], micro, kl, norm.global_batch_size)

            return loss

        metrics = self.train(batch[::2], objective, loss_scale_factor=1.0, max_tokens=self.max_tokens)
        return {**metrics, "kl": Mean(kl, 1.0)}

    @register(Dispatch.DP_COMPUTE_METRIC, reads=LABELLED)
    def evaluate(self, batch: DataProto) -> dict[str, Metric]:
        """Metrics of `update` under `val/`, without a step."""
        kl, own = self._kl(batch[1::2]), batch[::2]
        num_responses = self.global_norm(own, 1.0).global_batch_size
        outputs = self.engine.log_probs(own, max_tokens=self.max_tokens, temperature=self.temperature)
        if not self.is_leader:
            return {}
        _, metrics = self._labelled_loss(outputs["log_probs"].padded(), own, kl, num_responses)
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
        self, log_probs: Tensor, part: TensorBatch | DataProto, kl: float, num_responses: float
    ) -> tuple[Tensor, dict[str, Metric]]:
        """This part's share of the loss, a scalar, and its metrics. log_probs: (B, T)."""
        policy = summed(log_probs, part.padded("response_mask"))
        ref, good = (torch.from_numpy(part.samples[name]).to(policy.device) for name in ("ref_logps", "label"))
        ratios = policy - ref
        loss = self.loss.function(ratios, good, torch.tensor(kl, device=policy.device), self.params).sum()
        loss = loss / num_responses
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
