"""The rollout source that `async_training.mode` asks for."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from hpcrl.config.derive import Derived
from hpcrl.data.sampler import Sampler
from hpcrl.rollout_source.one_step_off import OneStepOff
from hpcrl.rollout_source.source import RolloutContext, RolloutSource
from hpcrl.rollout_source.streaming import Streaming
from hpcrl.rollout_source.synchronous import Recorded, Synchronous
from hpcrl.rollout_source.weight_sync import WeightSync

if TYPE_CHECKING:
    from hpcrl.run.run import Run

log = logging.getLogger(__name__)

SOURCES: dict[str, type[Any]] = {"sync": Synchronous, "one_step_off": OneStepOff, "bounded_staleness": Streaming}


def make_rollout_source(run: Run, derived: Derived, sampler: Sampler, tokenizer: Any) -> RolloutSource:
    """Make the source of a run's samples; `tokenizer` says which token ends a response."""
    config, mode = run.config, run.config.async_training.mode
    context = RolloutContext(
        run.controller,
        config,
        derived,
        sampler,
        run.timers,
        (int(tokenizer.eos_token_id),),
        WeightSync(run.controller, run.timers),
        run.total_steps,
        before_phase=run.before_phase,
        wait=run.wait,
        log=run.log,
    )
    if mode != "sync":
        log.info("async_training.mode=%s with %s", mode, config.algorithm.rollout_correction)
    source: RolloutSource = (Recorded if config.trainer.rollouts_from is not None else SOURCES[mode])(context)
    return source
