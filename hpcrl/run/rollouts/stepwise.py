"""Sources that draw all samples of a step together: synchronous, recorded, one step off."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from hpcrl.algorithms.metrics import finish, merge
from hpcrl.batch.data_proto import DataProto
from hpcrl.data.curriculum import step_report
from hpcrl.observe.record.writer import with_nan, without_nan
from hpcrl.rollout.protocol import SamplingParams
from hpcrl.run.rollouts.scoring import BackgroundTask, Steps, numbered, score, scoring
from hpcrl.run.rollouts.source import (
    Collected,
    Gathering,
    RolloutContext,
    RolloutSource,
    RolloutState,
    recorded_samples,
)
from hpcrl.runtime.exits import InputError

log = logging.getLogger(__name__)

FIRST_WARNING = 10  # generations of one step after which a line says that it continues; the next after 20, 40, ...


class Stepwise(RolloutSource):
    """Generates the samples of a step together. Surplus samples stay in the pool for the next step."""

    def gather(self, step: int) -> Steps[Collected | None]:
        """Generate until the step has its samples; None if the run stops before.

        With filter_groups, prompts whose samples do not differ in its metric are dropped and others are drawn, until
        data.train_batch_size prompts remain or max_num_gen_batches generations are done.
        """
        config, pool = self.context.config, self.pool
        num_needed, filtering = config.data.train_batch_size, config.algorithm.filter_groups
        gathering = Gathering([pool.surplus] if pool.surplus is not None else [])
        limit = filtering.max_num_gen_batches if filtering.enable else 1
        size = (config.data.gen_batch_size if filtering.enable else None) or num_needed
        next_warning = FIRST_WARNING
        while gathering.num_prompts < num_needed and not (limit and gathering.num_batches == limit):
            if gathering.num_batches == next_warning:
                next_warning *= 2
                log.warning(
                    "step %d: %d of %d prompts after %d generations; samples of the others do not differ in %r "
                    "(algorithm.filter_groups.max_num_gen_batches bounds this)",
                    *(step, gathering.num_prompts, num_needed, gathering.num_batches, filtering.metric),
                )
            part = yield from self._generate(step, size, gathering)
            if part is None:
                return None
            if filtering.enable:
                part = pool.filtered(part, gathering)
            gathering.groups.append(part)
        if gathering.num_prompts == 0:
            raise InputError(
                f"step {step}: {gathering.num_batches} generations of prompts, and in none do the samples of a prompt "
                f"differ in {filtering.metric!r}; use easier or harder prompts, a larger rollout.n, or raise "
                "algorithm.filter_groups.max_num_gen_batches"
            )
        if gathering.num_prompts < num_needed:
            log.warning(
                "step %d: %d of %d prompts after %d generations (algorithm.filter_groups.max_num_gen_batches)",
                *(step, gathering.num_prompts, num_needed, gathering.num_batches),
            )
        self._load_ahead(size)
        batch = self._first(step, num_needed, gathering)
        for report in gathering.reports:  # of dropped prompts, too
            self.context.sampler.update(report)
        return pool.complete(batch), pool.metrics_of(step, batch, gathering)

    def _load_ahead(self, size: int) -> None:
        """Have the pictures of the next step's prompts decoded in processes, meanwhile."""
        config = self.context.config
        if config.data.image_workers > 0 and len(rows := self.context.sampler.rows_ahead(size)):
            batch = DataProto({}, {"row": np.repeat(rows, config.rollout.n)}, {"split": "train"})
            self.context.controller["rollout"].load_ahead(batch)

    def _generate(self, step: int, size: int, gathering: Gathering) -> Steps[DataProto | None]:
        """Prompts from the sampler, with rollout.n scored responses to each."""
        n, version = self.context.config.rollout.n, self.context.weights.version
        rows, epochs = self.context.sampler.next_rows(size)
        prompts = DataProto(
            {},
            {
                "row": rows,
                "epoch": epochs,
                "prompt": np.arange(size, dtype=np.int32) + gathering.next_prompt,
                "weight_version_min": np.full(size, version, np.int64),
                "weight_version_max": np.full(size, version, np.int64),
            },
            {"split": "train", "step": step, "weight_version": version},
        )
        gathering.num_batches += 1
        gathering.num_generated += size * n
        batch = prompts.repeat(n)
        batch.samples["sample_index"] = np.tile(np.arange(n, dtype=np.int64), size)
        drawn = yield from self._respond(batch, self.context.sampling, "gen", gathering)
        if drawn is None:
            return None
        gathering.reports.append(step_report(step, drawn.samples))
        if self.context.derived.needs_reward_baseline:
            gathering.num_greedy += size
            prompts.samples["sample_index"] = np.full(size, n, np.int64)
            sampling = replace(self.context.sampling, temperature=0.0, routed_experts=False)
            greedy = yield from self._respond(prompts, sampling, "gen_max", gathering)
            if greedy is None:
                return None
            drawn.samples["reward_baseline"] = np.repeat(greedy.samples["score"], n)
        drawn.meta_info.clear()
        return drawn

    def _respond(
        self, batch: DataProto, sampling: SamplingParams, phase: str, gathering: Gathering
    ) -> Steps[DataProto | None]:
        """The batch with responses and their scores; None if the run stops before."""
        context = self.context
        if context.cannot_begin(phase):
            return None
        batch = batch.union((yield phase, context.controller["rollout"].generate(batch, sampling)))
        if context.cannot_begin("judge" if context.config.reward.judge.enable else "reward"):
            return None
        batch = yield from scoring(context.controller, batch, context.config.reward)
        gathering.metrics += batch.metrics
        self.pool.first_samples.check_scores(batch)
        return batch

    def _first(self, step: int, num_needed: int, gathering: Gathering) -> DataProto:
        """The first `wanted` prompts; the others are kept for the next step."""
        batch = DataProto.concat(gathering.groups)
        _, place = np.unique(batch.samples["prompt"], return_inverse=True)
        late = place >= num_needed
        self.pool.surplus = batch[late] if late.any() else None
        return numbered(batch[~late], step)


class Synchronous(Stepwise):
    """A step's samples are drawn with the weights that it trains."""

    can_repeat = True

    def next(self, step: int) -> DataProto | None:
        collected = BackgroundTask(self.gather(step), self.context.timers).get()
        return None if collected is None else self.context.deliver(collected)

    def update_weights(self, step: int) -> None:
        self.context.wait()
        self.weights.update_to(step)


class Recorded(Synchronous):
    """The samples of an archive in place of a rollout (trainer.rollouts_from); they are scored again."""

    def next(self, step: int) -> DataProto:
        context, folder = self.context, self.context.config.trainer.rollouts_from
        assert folder is not None
        batch = recorded_samples(folder, step)
        with context.timers("gen"):
            batch = batch.union(context.controller["rollout"].replay(batch, folder).get())
        batch = score(context.controller, batch, context.config.reward, context.timers)
        metrics = finish(merge(batch.metrics))
        batch.meta_info.pop("metrics")
        return context.deliver((self.pool.complete(batch), metrics))


T = TypeVar("T")


class OneStepOff(Stepwise):
    """Step k trains on samples that the weights of step k - 2 have drawn; step 1 on those of the start weights.

    The samples do not depend on timing, so a resumed run has the numbers of an uninterrupted one: a checkpoint holds
    the samples of the next step.
    """

    def __init__(self, context: RolloutContext) -> None:
        super().__init__(context)
        # Of the step after the one that `next` returned; its value is None if the run ends before it: see `_spare`.
        self.ahead: BackgroundTask[Collected | None] | None = None

    def next(self, step: int) -> DataProto:
        found = (self.ahead or self._begin(step)).get()
        assert found is not None
        self.weights.update_to(step - 1)
        # After the last step, only for a checkpoint from which more steps may follow.
        continues = step < self.context.total_steps or self.context.config.trainer.save_freq > 0
        self.ahead = self._begin(step + 1) if continues else None
        return self.context.deliver(found)

    def update_weights(self, step: int) -> None:
        """Do nothing: the engine gets the weights of `step` once the samples of the next one are drawn, in `next`."""

    @contextmanager
    def paused(self, step: int) -> Iterator[None]:
        if self.ahead is not None:
            self.ahead.get()
        self.weights.update_to(step)
        yield

    def save(self, folder: Path, step: int, kept: RolloutState) -> dict[str, Any]:
        found = self.ahead.get() if self.ahead is not None else None
        kept = self.between_steps()  # the sampler has advanced
        if found is None:
            return self.pool.save(folder, step, kept)
        batch, metrics = found
        self.pool.write(batch, folder / "ahead", step + 1)
        return self.pool.save(folder, step, kept) | {"ahead": without_nan(metrics)}

    def load(self, state: dict[str, Any], folder: Path, step: int) -> None:
        self.pool.load(state, folder, step)
        if "ahead" in state:  # not in a checkpoint of another mode
            batch = self.pool.complete(numbered(self.pool.read(folder / "ahead", step + 1), step + 1))
            self.ahead = BackgroundTask(_done((batch, with_nan(state["ahead"]))), self.context.timers)

    def _begin(self, step: int) -> BackgroundTask[Collected | None]:
        steps = self.gather(step) if step <= self.context.total_steps else self._spare(step)
        return BackgroundTask(steps, self.context.timers).in_background(self.context.controller)

    def _spare(self, step: int) -> Steps[Collected | None]:
        """As `gather`, for the step after the last one: the run does not fail if there are no samples for it."""
        try:
            return (yield from self.gather(step))
        except InputError as error:
            log.warning("no samples for a step after the last one: %s", error)
            return None


def _done(value: T) -> Steps[T]:
    yield from ()
    return value
