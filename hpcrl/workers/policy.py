"""The policy where nothing trains it: what a checkpoint is read into on its way to the rollout engine."""

from __future__ import annotations

import gc

from hpcrl.config.roles import POLICY
from hpcrl.config.schema import Config
from hpcrl.controller.register import Dispatch, register
from hpcrl.grid.groups import RoleGroups
from hpcrl.model.shape import Lora, ModelShape
from hpcrl.workers.model_worker import ModelWorker


class PolicyWorker(ModelWorker):
    """The actor's weights in the actor's layout, without gradients and optimizer."""

    spec = POLICY

    def __init__(
        self, groups: RoleGroups, shape: ModelShape, config: Config, derived: object = None, total_steps: int = 0
    ) -> None:
        super().__init__(groups, shape, config, lora=Lora.from_config(config.model))

    @register(Dispatch.ONE_TO_ALL)
    def release(self) -> None:
        """Gives the weights up after the last refit; those that the rollout engine has adopted live on there."""
        del self.engine
        gc.collect()  # modules hold each other
