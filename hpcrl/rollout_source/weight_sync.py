"""The weights in the rollout engine."""

from __future__ import annotations

from hpcrl.controller.controller import Controller
from hpcrl.telemetry.progress import PhaseTimers
from hpcrl.workers.refit import refit_metrics


class WeightSync:
    """Lives on rank 0. `version`: steps that the engine's weights have been trained for; None: it has none."""

    def __init__(self, controller: Controller, timers: PhaseTimers) -> None:
        self.controller = controller
        self.timers = timers
        self.version: int | None = None
        self.metrics: dict[str, float] = {}  # of the last refit

    def update_to(self, version: int) -> None:
        """Copy the actor's weights, which are those of `version`, into the engine, unless it has them."""
        if version == self.version:
            return
        with self.timers("update_weights"):
            reports = self.controller["refit"].update_weights().get()
            self.timers.add_bytes("update_weights", sum(report.bytes_received for report in reports))
        self.metrics = refit_metrics(reports)
        self.version = version
