"""A step's samples: prompts, responses, scores; prompts that teach nothing are replaced (DAPO's dynamic sampling)."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np

from hpcrl.algorithms.metrics import Metric, finish, merge
from hpcrl.batch.data_proto import DataProto
from hpcrl.config.derive import Derived
from hpcrl.config.schema import Config
from hpcrl.controller.controller import Controller
from hpcrl.data.curriculum import StepReport, step_report
from hpcrl.data.sampler import Sampler
from hpcrl.rewards.extras import numbers_of
from hpcrl.rollout.protocol import SamplingParams
from hpcrl.runtime.exits import InputError
from hpcrl.telemetry.archive import finish_step, read_samples, step_path
from hpcrl.telemetry.timers import PhaseTimers
from hpcrl.trainer.engine_weights import EngineWeights
from hpcrl.trainer.first_samples import FirstSamples
from hpcrl.trainer.off_policy import Counts, staleness_metrics
from hpcrl.trainer.pending import Pending, Steps
from hpcrl.trainer.prompt_groups import differing, num_prompts, numbered
from hpcrl.trainer.scoring import scored, scoring

log = logging.getLogger(__name__)

PATIENCE = 10  # generations of one step after which a line says that it goes on; the next after 20, 40, ...
RECORDED = ("row", "epoch", "prompt", "sample_index", "position", "weight_version_min", "weight_version_max")

Collected = tuple[DataProto, dict[str, float]]  # a step's samples, and its metrics so far


@dataclass
class Gathering:
    """Groups that wait for a step, and what was seen while they were made."""

    groups: list[DataProto] = field(default_factory=list)  # one batch per generation, whole prompts
    metrics: list[dict[str, Metric]] = field(default_factory=list)
    reports: list[StepReport] = field(default_factory=list)
    num_batches: int = 0
    num_generated: int = 0  # samples
    num_greedy: int = 0  # besides, responses that give a baseline
    num_evicted: int = 0  # samples

    @property
    def num_prompts(self) -> int:
        return sum(num_prompts(part) for part in self.groups)

    @property
    def next_prompt(self) -> int:
        """A number above those of all prompts so far, dropped ones aside."""
        return max((int(part.samples["prompt"].max()) + 1 for part in self.groups if len(part)), default=0)


class BetweenSteps(NamedTuple):
    """What a step begins with: what a checkpoint of the step before holds."""

    state: dict[str, Any]
    surplus: DataProto | None


class Experience:
    """Lives on rank 0. Generation and training take turns: a step's samples are drawn with the weights that it trains.

    What is left over of one step's generation is kept for the next one, not thrown away.
    """

    # Whether a step that is left before its update can be made again from what it began with.
    can_repeat: ClassVar[bool] = True

    def __init__(
        self,
        controller: Controller,
        config: Config,
        derived: Derived,
        sampler: Sampler,
        timers: PhaseTimers,
        eos_token_ids: tuple[int, ...],
        weights: EngineWeights,
        total_steps: int,
    ) -> None:
        self.controller = controller
        self.config = config
        self.derived = derived
        self.timers = timers
        self.sampler = sampler
        self.weights = weights
        self.total_steps = total_steps
        self.surplus: DataProto | None = None
        self.counts = Counts()
        self.first_samples = FirstSamples(config)
        self._sampler_state()
        rollout = config.rollout
        self.sampling = SamplingParams(
            max_new_tokens=config.data.max_response_length,
            temperature=rollout.temperature,
            top_k=rollout.top_k,
            top_p=rollout.top_p,
            ignore_eos=rollout.ignore_eos,
            eos_token_ids=eos_token_ids,
            routed_experts=config.actor.router_replay.mode == "R3",
        )

    def collect(self, step: int) -> Collected:
        """The scored samples that a step trains on."""
        recorded = self.config.trainer.rollouts_from
        if recorded is not None:
            return self._recorded(step, recorded)
        return Pending(self.gather(step), self.timers).get()

    def updated(self, step: int) -> None:
        """The actor has the weights of `step`: says when generation gets them."""
        self.weights.bring(step)

    @contextmanager
    def paused(self, step: int) -> Iterator[None]:
        """Inside it the rollout engine has the weights of `step`, and nobody else uses it."""
        yield

    def between_steps(self) -> BetweenSteps:
        """To be taken between two steps, and saved then or in the middle of the next one."""
        return BetweenSteps({"sampler": self._sampler_state(), "counts": self.counts.state_dict()}, self.surplus)

    def save(self, folder: Path, step: int, kept: BetweenSteps) -> dict[str, Any]:
        """What a resumed run needs. Samples that wait for training, whose tokens no weights will make again, go into
        files in `folder`."""
        if kept.surplus is not None:
            self.write(kept.surplus, folder / "surplus", step)
        return {**kept.state, "surplus": kept.surplus is not None}

    def load(self, state: dict[str, Any], folder: Path, step: int) -> None:
        self.sampler.load_state_dict(state["sampler"])
        self.counts.load_state_dict(state.get("counts", {}))
        if state["surplus"]:
            self.surplus = self.read(folder / "surplus", step)
        self._tell_of_dropped(state, folder, step)

    def _tell_of_dropped(self, state: dict[str, Any], folder: Path, step: int) -> None:
        """The sampler is past prompts that only the mode of the checkpoint goes on with."""
        mode = self.config.async_training.mode
        if "ahead" in state and mode != "one_step_off":
            before, dropped = "one_step_off", num_prompts(recorded_samples(folder / "ahead", step + 1))
        elif state.get("under_way") and mode != "bounded_staleness":
            before, dropped = "bounded_staleness", len(state["under_way"])
        else:
            return
        log.warning(
            "async_training.mode=%s drops %d prompts that the checkpoint has drawn and not trained; to keep them, "
            "resume with async_training.mode=%s",
            *(mode, dropped, before),
        )

    def gather(self, step: int) -> Steps[Collected]:
        """Generates until the step has its samples.

        With filter_groups, prompts whose samples do not differ in its metric are dropped and others drawn, until
        data.train_batch_size prompts are there or max_num_gen_batches generations are done.
        """
        wanted, filtering = self.config.data.train_batch_size, self.config.algorithm.filter_groups
        found = Gathering([self.surplus] if self.surplus is not None else [])
        limit = filtering.max_num_gen_batches if filtering.enable else 1
        size = (self.config.data.gen_batch_size if filtering.enable else None) or wanted
        patience = PATIENCE
        while found.num_prompts < wanted and not (limit and found.num_batches == limit):
            if found.num_batches == patience:
                patience *= 2
                log.warning(
                    "step %d: %d of %d prompts after %d generations; samples of the others do not differ in %r "
                    "(algorithm.filter_groups.max_num_gen_batches bounds this)",
                    *(step, found.num_prompts, wanted, found.num_batches, filtering.metric),
                )
            part = yield from self._generate(step, size, found)
            if filtering.enable:
                self.first_samples.check_metric(part)
                kept = differing(part, filtering.metric)
                found.num_evicted += int((~kept).sum())
                part = part[kept]
            found.groups.append(part)
        if found.num_prompts == 0:
            raise InputError(
                f"step {step}: {found.num_batches} generations of prompts, and in none do the samples of a prompt "
                f"differ in {filtering.metric!r}; use easier or harder prompts, a larger rollout.n, or raise "
                "algorithm.filter_groups.max_num_gen_batches"
            )
        if found.num_prompts < wanted:
            log.warning(
                "step %d: %d of %d prompts after %d generations (algorithm.filter_groups.max_num_gen_batches)",
                *(step, found.num_prompts, wanted, found.num_batches),
            )
        batch = self._first(step, wanted, found)
        for report in found.reports:  # of prompts that were dropped, too
            self.sampler.update(report)
        return self.completed(batch), self.metrics_of(step, batch, found)

    def _generate(self, step: int, size: int, found: Gathering) -> Steps[DataProto]:
        """Prompts from the sampler, rollout.n scored responses to each."""
        n, version = self.config.rollout.n, self.weights.version
        rows, epochs = self.sampler.next_rows(size)
        prompts = DataProto(
            {},
            {
                "row": rows,
                "epoch": epochs,
                "prompt": np.arange(size, dtype=np.int32) + found.next_prompt,
                "weight_version_min": np.full(size, version, np.int64),
                "weight_version_max": np.full(size, version, np.int64),
            },
            {"split": "train", "step": step, "weight_version": version},
        )
        found.num_batches += 1
        found.num_generated += size * n
        batch = prompts.repeat(n)
        batch.samples["sample_index"] = np.tile(np.arange(n, dtype=np.int64), size)
        batch = yield from self._respond(batch, self.sampling, "gen", found)
        found.reports.append(step_report(step, batch.samples))
        if self.derived.needs_reward_baseline:
            found.num_greedy += size
            prompts.samples["sample_index"] = np.full(size, n, np.int64)
            sampling = replace(self.sampling, temperature=0.0, routed_experts=False)
            greedy = yield from self._respond(prompts, sampling, "gen_max", found)
            batch.samples["reward_baseline"] = np.repeat(greedy.samples["score"], n)
        batch.meta_info.clear()
        return batch

    def _respond(self, batch: DataProto, sampling: SamplingParams, phase: str, found: Gathering) -> Steps[DataProto]:
        self.timers.before(phase)
        batch = batch.union((yield phase, self.controller["rollout"].generate(batch, sampling)))
        self.timers.before("reward")
        batch = yield from scoring(self.controller, batch, with_model=self.derived.needs_reward_model)
        found.metrics += batch.metrics
        self.first_samples.check_scores(batch)
        return batch

    def _first(self, step: int, wanted: int, found: Gathering) -> DataProto:
        """The first `wanted` prompts; the others are the next step's."""
        batch = DataProto.concat(found.groups)
        _, place = np.unique(batch.samples["prompt"], return_inverse=True)
        late = place >= wanted
        self.surplus = batch[late] if late.any() else None
        return numbered(batch[~late], step)

    def metrics_of(self, step: int, batch: DataProto, found: Gathering) -> dict[str, float]:
        metrics = finish(merge(found.metrics))
        reused, stale = (int(metrics.get(f"perf/rollouts_{what}", 0)) for what in ("reused", "stale"))
        if reused or stale:
            log.info(
                "step %d: %d of %d responses are reused from an interrupted attempt; %d of its responses, of other "
                "weights, data or settings, are not",
                *(step, reused, found.num_generated + found.num_greedy, stale),
            )
        if self.config.algorithm.filter_groups.enable:
            metrics |= {
                "train/num_gen_batches": float(found.num_batches),
                "training/filter_groups/evicted_samples": float(found.num_evicted),
                "training/filter_groups/surplus_samples": float(len(self.surplus) if self.surplus is not None else 0),
            }
        if self.config.async_training.mode != "sync":
            metrics |= staleness_metrics(batch.samples, step - 1)
            metrics |= self.counts.add(batch.samples, step - 1, found.num_generated)
        return metrics

    def _recorded(self, step: int, folder: str) -> Collected:
        """The samples of an archive in place of a rollout."""
        batch = recorded_samples(folder, step)
        with self.timers("gen"):
            batch = batch.union(self.controller["rollout"].replay(batch, folder).get())
        with self.timers("reward"):
            batch = scored(self.controller, batch, with_model=self.derived.needs_reward_model)
        metrics = finish(merge(batch.metrics))
        batch.meta_info.pop("metrics")
        return self.completed(batch), metrics

    def completed(self, batch: DataProto) -> DataProto:
        """The batch with what the advantage estimator asks of rank 0."""
        keys = self.config.algorithm.gdpo_reward_keys
        if keys:
            parts = [numbers_of(batch.samples, key, "algorithm.gdpo_reward_keys") for key in keys]
            batch.samples["reward_components"] = np.stack(parts, axis=1).astype(np.float32)
        if self.derived.needs_reward_baseline and "reward_baseline" not in batch.samples:
            raise InputError(
                f"algorithm.adv_estimator={self.config.algorithm.adv_estimator} needs the score of a greedy response "
                "to each prompt, and the recording in trainer.rollouts_from has none; record a run of that estimator"
            )
        return batch

    def write(self, batch: DataProto, folder: Path, step: int) -> None:
        """Scored samples into a file of this folder, in the archive's format; `step` names it. Raises OSError."""
        seed = self.config.run.seed
        write_samples(self.controller, numbered(batch, step), folder, step, seed=seed, weight_version=step - 1)

    def read(self, folder: Path, step: int) -> DataProto:
        """What `write` wrote, in the same order."""
        batch = recorded_samples(folder, step)
        batch = batch.union(self.controller["rollout"].replay(batch, str(folder), scores=True).get())
        batch.pop(["position"])
        batch.meta_info.clear()
        return batch

    def _sampler_state(self) -> dict[str, Any]:
        state = self.sampler.state_dict()
        try:
            return dict(json.loads(json.dumps(state)))
        except (TypeError, ValueError) as error:
            raise InputError(
                f"data.sampler: {type(self.sampler).__name__}.state_dict() cannot be saved: {error}; expected what "
                "JSON holds: int(...) and list(...) of numpy's numbers and arrays"
            ) from None


def write_samples(
    controller: Controller, batch: DataProto, folder: Path, step: int, *, seed: int, weight_version: int
) -> None:
    """A step's samples into the archive `folder`, by the ranks that have them. Raises OSError."""
    for problem in controller["archive"].write(batch, str(folder)).get():
        if problem is not None:
            raise OSError(*problem)
    finish_step(folder, step, seed=seed, weight_version=weight_version, report=log.warning)


def recorded_samples(folder: str | Path, step: int) -> DataProto:
    """The sample columns of a step's archive; its token columns are for the ranks to read."""
    samples = read_samples(step_path(folder, step))
    names: Sequence[str] = [*RECORDED, *(name for name in ("reward_baseline",) if name in samples)]
    batch = DataProto({}, {name: samples[name] for name in names})
    batch.meta_info |= {"split": "train", "step": step, "num_prompts": num_prompts(batch)}
    return batch
