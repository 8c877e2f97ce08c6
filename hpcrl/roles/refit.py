"""The refit, which brings the actor's weights into the engine."""

from __future__ import annotations

from typing import Any

from hpcrl.controller.register import Dispatch, register
from hpcrl.controller.worker import Worker
from hpcrl.grid.layout import Layout
from hpcrl.reshard.executor import Refit, RefitReport
from hpcrl.roles.model_worker import ModelWorker
from hpcrl.roles.rollout import RolloutWorker


class RefitWorker(Worker):
    """Lives on the ranks of actor and rollout together; moves the actor's weights into the engine's buffers."""

    def __init__(
        self, layout: Layout, rank: int, refit: Refit, actor: ModelWorker | None, rollout: RolloutWorker | None
    ) -> None:
        super().__init__(layout, rank)
        self.refit = refit
        self.actor = actor
        self.rollout = rollout

    @register(Dispatch.ONE_TO_ALL)
    def update_weights(self) -> RefitReport:
        """Every rank's report, in rank order."""
        source: dict[str, Any] = self.actor.engine.named_shards() if self.actor else {}
        destination: dict[str, Any] = self.rollout.engine.weights() if self.rollout else {}
        return self.refit.run(source, destination)
