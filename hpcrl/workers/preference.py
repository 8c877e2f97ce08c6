"""Training on preferences: the policy of `hpcrl preference` and its reference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from hpcrl.algorithms.aggregation import LossNorm
from hpcrl.algorithms.metrics import Mean, Metric, Sum, to_floats
from hpcrl.algorithms.preference_losses import PREFERENCE_LOSSES, PairLogps
from hpcrl.batch.data_proto import DataProto
from hpcrl.batch.tensors import TensorBatch
from hpcrl.config.roles import ACTOR
from hpcrl.config.schema import Config
from hpcrl.controller.register import Dispatch, register
from hpcrl.grid.groups import RoleGroups
from hpcrl.model.shape import Lora, ModelShape
from hpcrl.workers.frozen import RefWorker
from hpcrl.workers.model_worker import ModelWorker

PAIR = ("input_ids", "response_mask", "ref_log_prob?")


class PreferenceRefWorker(RefWorker):
    """The reference of given answers, which no temperature of sampling belongs to."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.temperature = 1.0


class PreferenceActorWorker(ModelWorker):
    """The policy, where rows 2i and 2i + 1 of a batch are a pair: chosen, rejected."""

    spec = ACTOR

    def __init__(
        self, groups: RoleGroups, shape: ModelShape, config: Config, derived: Any = None, total_steps: int = 0
    ) -> None:
        self.params = config.section("preference")
        lora = Lora.from_config(config.model)
        super().__init__(groups, shape, config, derived, total_steps, optim=self.params.optim, lora=lora)
        self.max_tokens = self.params.max_token_len_per_gpu
        self.loss = PREFERENCE_LOSSES.get(self.params.loss_type)
        weight = self.params.nll_weight
        self.nll_weight = self.loss.nll_weight if weight is None else weight

    @register(Dispatch.DP_COMPUTE_PROTO, reads=("input_ids", "response_mask"), writes=("ref_log_prob",), phase="ref")
    def compute_ref_log_prob(self, batch: DataProto) -> DataProto:
        """Log-probs of the reference of a policy with adapters: its base model, without a second model."""
        with self.engine.without_adapters():
            return self.log_prob_column("ref_log_prob", batch, max_tokens=self.max_tokens, temperature=1.0)

    @register(Dispatch.DP_COMPUTE_METRIC, reads=PAIR, phase="update_actor", updates=True)
    def update(self, batch: DataProto) -> dict[str, Metric]:
        """One optimizer step on the pairs of all replicas."""
        num_chosen = self._chosen_tokens(batch)

        def objective(norm: LossNorm) -> Callable[..., tuple[torch.Tensor, dict[str, Metric]]]:
            def loss(outputs: dict[str, torch.Tensor], micro: TensorBatch) -> tuple[torch.Tensor, dict[str, Metric]]:
                mask = micro.padded("response_mask").float()
                ref = micro.padded("ref_log_prob") if self.loss.reference else None
                return self._loss(outputs["log_probs"], ref, mask, norm.global_batch_size / 2, num_chosen)

            return loss

        return self.train(batch, objective, loss_scale_factor=1.0, max_tokens=self.max_tokens, unit=2)

    @register(Dispatch.DP_COMPUTE_METRIC, reads=PAIR)
    def evaluate(self, batch: DataProto) -> dict[str, Metric]:
        """Metrics of `update` under `val/`, without a step."""
        num_chosen, num_pairs = self._chosen_tokens(batch), self.global_norm(batch, 1.0).global_batch_size / 2
        outputs = self.engine.log_probs(batch, max_tokens=self.max_tokens, temperature=1.0)
        if not self.is_leader:
            return {}
        whole = batch.union(DataProto({"log_probs": outputs["log_probs"]}))
        log_probs, mask = whole.padded("log_probs"), whole.padded("response_mask")
        ref = whole.padded("ref_log_prob") if self.loss.reference else None
        _, metrics = self._loss(log_probs, ref, mask.float(), num_pairs, num_chosen)
        return to_floats({f"val/{name.removeprefix('train/')}": metric for name, metric in metrics.items()})

    def _chosen_tokens(self, batch: DataProto) -> float:
        """Tokens of the chosen responses, over all replicas."""
        lengths = batch.fetch("response_mask").lengths[::2].sum()
        return float(self.sum_over_replicas(torch.tensor([float(lengths)], dtype=torch.float64)))

    def _loss(
        self,
        log_probs: torch.Tensor,
        ref: torch.Tensor | None,
        mask: torch.Tensor,
        num_pairs: float,
        num_chosen: float,
    ) -> tuple[torch.Tensor, dict[str, Metric]]:
        """This part's share of the loss, a scalar, and its metrics. log_probs, ref, mask: (2 B, T)."""
        lengths = mask.sum(-1).clamp(min=1).view(-1, 2).unbind(1)
        policy = (log_probs * mask).sum(-1).view(-1, 2).unbind(1)
        refs = (None, None) if ref is None else (ref * mask).sum(-1).view(-1, 2).unbind(1)
        pairs = PairLogps(*policy, *refs, *lengths)
        loss = self.loss.function(pairs, self.params).sum() / num_pairs
        nll = -policy[0].sum() / max(num_chosen, 1.0)
        if self.nll_weight:
            loss = loss + self.nll_weight * nll
        logps = pairs.mean_log_ratios if self._averages else policy
        ratios = logps if ref is None else pairs.log_ratios
        every = torch.ones_like(policy[0])
        chosen, rejected = (self.params.beta * ratio.detach() for ratio in ratios)
        metrics = {
            "rewards/chosen": Mean.of(chosen, every),
            "rewards/rejected": Mean.of(rejected, every),
            "rewards/margins": Mean.of(chosen - rejected, every),
            "rewards/accuracies": Mean.of(chosen > rejected, every),
            "logps/chosen": Mean.of(logps[0].detach(), every),
            "logps/rejected": Mean.of(logps[1].detach(), every),
        }
        return loss, {"train/loss": Sum(loss.detach()), "train/nll_loss": Sum(nll.detach()), **metrics}

    @property
    def _averages(self) -> bool:
        """Whether rewards and logps are per token, as in TRL's trainers without a reference."""
        return self.loss.per_token and not self.loss.reference
