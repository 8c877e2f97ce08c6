"""Scores of generated responses: by rules, by a reward model, or by both."""

from __future__ import annotations

from hpcrl.batch.data_proto import DataProto
from hpcrl.controller.controller import Controller


def scored(controller: Controller, batch: DataProto, *, with_model: bool) -> DataProto:
    """The batch with `token_level_scores`, `score`, `acc` and `extras`; with a model, `rm_score` is part of the score.

    Rules have been at work since the first response was finished; the model runs beside them.
    """
    if with_model:
        batch = batch.union(controller["reward"].compute_rm_score(batch).get())
    return batch.union(controller["scorer"].score(batch).get())
