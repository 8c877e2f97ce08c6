"""The value model."""

from __future__ import annotations

from collections.abc import Callable

import torch

from hpcrl.algorithms.aggregation import LossNorm, agg_loss
from hpcrl.algorithms.metrics import Metric, Sum
from hpcrl.algorithms.value_loss import value_loss
from hpcrl.batch.data_proto import DataProto, TensorBatch, training_mask
from hpcrl.config.derive import Derived
from hpcrl.config.roles import CRITIC
from hpcrl.config.schema import Config
from hpcrl.controller.register import Dispatch, register
from hpcrl.model.shape import ModelShape
from hpcrl.runtime.groups import RoleGroups
from hpcrl.workers.model_worker import SEQUENCE, ModelWorker, Updates


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
