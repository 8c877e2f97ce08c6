"""The reference policy: a frozen model."""

from __future__ import annotations

from hpcrl.batch.data_proto import DataProto
from hpcrl.config.derive import Derived
from hpcrl.config.placement import offloaded
from hpcrl.config.schema import Config
from hpcrl.controller.register import Dispatch, register
from hpcrl.grid.groups import RoleGroups
from hpcrl.model.shape import ModelShape
from hpcrl.workers.model_worker import ModelWorker


class RefWorker(ModelWorker):
    def __init__(
        self, groups: RoleGroups, shape: ModelShape, config: Config, derived: Derived, total_steps: int = 0
    ) -> None:
        super().__init__(
            groups,
            shape,
            head="lm",
            dtype=config.model.dtype,
            te=config.model.transformer_engine,
            seed=config.run.seed,
            optim=None,
            exact=config.rollout.exact,
            head_chunk_tokens=config.trainer.head_chunk_tokens,
            offload=offloaded(config, "ref"),
        )
        self.max_tokens = derived.ref_max_tokens
        self.temperature = config.rollout.temperature

    @register(Dispatch.DP_COMPUTE_PROTO, reads=("input_ids", "response_mask"), writes=("ref_log_prob",), phase="ref")
    def compute_ref_log_prob(self, batch: DataProto) -> DataProto:
        return self.log_prob_column("ref_log_prob", batch, max_tokens=self.max_tokens, temperature=self.temperature)
