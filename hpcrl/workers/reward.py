"""The reward model, which scores whole responses."""

from __future__ import annotations

from pathlib import Path

from hpcrl.batch.data_proto import DataProto
from hpcrl.config.placement import architecture, offloaded
from hpcrl.config.schema import Config
from hpcrl.controller.register import Dispatch, register
from hpcrl.grid.groups import RoleGroups
from hpcrl.model.shape import ModelShape
from hpcrl.workers.model_worker import ModelWorker


class RewardModelWorker(ModelWorker):
    """A frozen reward model; its tokens are the policy's."""

    def __init__(
        self, groups: RoleGroups, shape: ModelShape, config: Config, derived: object = None, total_steps: int = 0
    ) -> None:
        dtype = architecture(config, "reward").dtype
        super().__init__(
            groups,
            shape,
            head="reward",
            dtype=dtype,
            te=config.model.transformer_engine,
            seed=config.run.seed,
            optim=None,
            offload=offloaded(config, "reward"),
        )
        self.max_tokens = config.reward.reward_model.max_token_len_per_gpu

    @register(Dispatch.ONE_TO_ALL)
    def load_frozen(self, folder: str) -> None:
        """The weights of a step folder of `hpcrl rm`, head included."""
        from hpcrl.checkpoint.sharded_load import load_sharded

        with self.engine.offload.on_device("parameters"):
            load_sharded(self.engine, Path(folder) / "reward", self.groups, optimizer=False)

    @register(Dispatch.DP_COMPUTE_PROTO, reads=("input_ids",))
    def compute_rm_score(self, batch: DataProto) -> DataProto:
        """Per sample `rm_score`, float32: the head's number at the last token of prompt and response."""
        scores = self.engine.scores(batch, max_tokens=self.max_tokens)
        return DataProto({}, {"rm_score": scores.numpy()}) if self.is_leader and scores is not None else DataProto()
