"""Scores of generated responses: by rules, by a reward model, or by both."""

from __future__ import annotations

from hpcrl.batch.data_proto import DataProto
from hpcrl.controller.controller import Controller
from hpcrl.telemetry.timers import PhaseTimers
from hpcrl.trainer.pending import Pending, Steps


def scored(controller: Controller, batch: DataProto, *, with_model: bool) -> DataProto:
    """As `scoring`, waiting for it."""
    return Pending(scoring(controller, batch, with_model=with_model), PhaseTimers()).get()


def scoring(controller: Controller, batch: DataProto, *, with_model: bool) -> Steps[DataProto]:
    """The batch with `token_level_scores`, `score`, `acc` and `extras`; with a model, `rm_score` is part of the score.

    Rules have been at work since the first response was finished; the model runs beside them.
    """
    if with_model:
        batch = batch.union((yield "reward", controller["reward"].compute_rm_score(batch)))
    return batch.union((yield "reward", controller["scorer"].score(batch)))
