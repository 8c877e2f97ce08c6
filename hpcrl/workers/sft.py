"""The supervised warm start: its data, and the policy that learns from it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import torch

from hpcrl.algorithms.aggregation import LossNorm, agg_loss
from hpcrl.algorithms.metrics import Metric, Sum
from hpcrl.batch.data_proto import DataProto
from hpcrl.batch.ragged import Ragged
from hpcrl.batch.tensors import TensorBatch
from hpcrl.config.roles import ACTOR
from hpcrl.config.schema import Config
from hpcrl.controller.register import Dispatch, Worker, register
from hpcrl.data.answers import SftDataset
from hpcrl.grid.groups import RoleGroups
from hpcrl.grid.layout import Layout
from hpcrl.model.shape import Lora, ModelShape
from hpcrl.workers.model_worker import ModelWorker

if TYPE_CHECKING:
    from hpcrl.workers.team import Team


class SftDataWorker(Worker):
    @classmethod
    def build(cls, team: Team, role: str) -> SftDataWorker | None:
        layout, rank = team.layouts[role], team.world.rank
        return cls(layout, rank, team.inputs.answers) if rank in layout else None

    def __init__(self, layout: Layout, rank: int, answers: SftDataset) -> None:
        super().__init__(layout, rank)
        self.answers = answers

    @register(Dispatch.DP_COMPUTE_PROTO, reads=("row",), writes=("input_ids", "response_mask"), phase="data")
    def load(self, batch: DataProto) -> DataProto:
        """Sequences of the rows, prompt then answer; the mask covers the answer."""
        pairs = [self.answers.pair(row) for row in batch.samples["row"].tolist()]
        sequences = [np.concatenate(pair) for pair in pairs]
        lengths = [len(answer) for _, answer in pairs]
        return DataProto(
            {
                "input_ids": Ragged.from_rows(sequences, np.int32),
                "response_mask": Ragged.from_lengths(np.ones(sum(lengths), np.int32), lengths),
            }
        )


class SftActorWorker(ModelWorker):
    """The policy of `hpcrl sft`: the same engine, a cross-entropy on the answer's tokens."""

    spec = ACTOR

    def __init__(
        self, groups: RoleGroups, shape: ModelShape, config: Config, derived: object = None, total_steps: int = 0
    ) -> None:
        num_updates, lora = config.sft.total_training_steps, Lora.from_config(config.model)
        super().__init__(groups, shape, config, optim=config.sft.optim, total_updates=num_updates, lora=lora)
        self.max_tokens = config.sft.max_token_len_per_gpu

    @register(Dispatch.DP_COMPUTE_METRIC, reads=("input_ids", "response_mask"), phase="update_actor", updates=True)
    def update(self, batch: DataProto) -> dict[str, Metric]:
        """One optimizer step on prompts and answers."""

        def objective(norm: LossNorm) -> Callable[..., tuple[torch.Tensor, dict[str, Metric]]]:
            def loss(outputs: dict[str, torch.Tensor], micro: TensorBatch) -> tuple[torch.Tensor, dict[str, Metric]]:
                mask = micro.padded("response_mask").float()
                nll = agg_loss(-outputs["log_probs"], mask, "token-mean", norm)
                return nll, {"train/loss": Sum(nll.detach())}

            return loss

        return self.train(batch, objective, loss_scale_factor=1.0, max_tokens=self.max_tokens)
