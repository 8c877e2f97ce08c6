"""What all sources of samples have in common."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np

from hpcrl.algorithms.metrics import Metric, finish, merge
from hpcrl.batch.data_proto import DataProto
from hpcrl.config.derive import Derived
from hpcrl.config.schema import Config
from hpcrl.controller.controller import Controller
from hpcrl.data.curriculum import StepReport
from hpcrl.data.sampler import Sampler
from hpcrl.observe.read.archive import read_samples
from hpcrl.observe.record.archive import finish_step, step_path
from hpcrl.observe.record.progress import PhaseTimers
from hpcrl.rewards.manager import numbers_of
from hpcrl.rollout.protocol import SamplingParams
from hpcrl.run.job_parts import EPOCH
from hpcrl.run.rollouts.scoring import DroppedPrompts, FirstSamples, differing, metric_values, num_prompts, numbered
from hpcrl.run.saver import raise_first
from hpcrl.runtime.exits import InputError
from hpcrl.workers.response_columns import ROLLOUTS_REUSED, ROLLOUTS_STALE

if TYPE_CHECKING:
    from hpcrl.engine.refit.refit import RefitReport


@dataclass
class WeightSync:
    """Copies weights to the rollout engine. Lives on rank 0. `version`: step of the engine's weights, None if it has
    none."""

    controller: Controller
    timers: PhaseTimers
    version: int | None = None
    metrics: dict[str, float] = field(default_factory=dict)  # of the last refit

    def update_to(self, version: int) -> None:
        """Copy the actor's weights, which are those of `version`, into the engine, unless it has them."""
        if version == self.version:
            return
        with self.timers("update_weights"):
            reports = self.controller["refit"].update_weights().get()
            self.timers.add_bytes("update_weights", sum(report.bytes_received for report in reports))
        self.metrics = refit_metrics(reports)
        self.version = version


def refit_metrics(reports: Sequence[RefitReport]) -> dict[str, float]:
    """Metrics of one refit, from the reports of all ranks: bytes are summed; times and memory are those of the worst
    rank."""
    seconds = max(report.seconds for report in reports)
    received, copied, aliased = (
        sum(getattr(report, name) for report in reports) for name in ("bytes_received", "bytes_copied", "bytes_aliased")
    )
    return {
        "perf/refit/seconds": seconds,
        "perf/refit/checksum_seconds": max(report.checksum_seconds for report in reports),
        "perf/refit/gib_received": received / 2**30,
        "perf/refit/gib_copied": copied / 2**30,
        "perf/refit/gib_aliased": aliased / 2**30,
        "perf/refit/gb_per_s": (received + copied) / seconds / 1e9,
        "perf/refit/peak_extra_mib": max(report.peak_extra_bytes for report in reports) / 2**20,
    }


def staleness_metrics(samples: Mapping[str, np.ndarray], version: int) -> dict[str, float]:
    """Metrics of the samples that an update of the weights of `version` trains on.

    Staleness is `version - weight_version_min`: from the weights that drew the first token to those that are trained. A
    span is `weight_version_max - weight_version_min`; a response with a span continued under new weights.
    """
    oldest, newest = samples["weight_version_min"], samples["weight_version_max"]
    spans = newest - oldest
    return {
        **_statistics("training/off_policy/trajectory_staleness", version - oldest),
        **_statistics("training/off_policy/trajectory_spans", spans),
        "fully_async/partial/total_partial_num": float((spans > 0).sum()),
        "fully_async/partial/partial_ratio": float((spans > 0).mean()),
        "fully_async/partial/max_partial_span": float(spans.max()),
    }


def _statistics(name: str, values: np.ndarray) -> dict[str, float]:
    found = {"mean": values.mean(), "max": values.max(), "min": values.min()}
    return {f"{name}/{statistic}": float(value) for statistic, value in found.items()}


def idle_metrics(waited: float, busy: float, step: float, num_replicas: int) -> dict[str, float]:
    """Idle shares of a step's seconds: the trainer's, which `waited` for samples, and that of the replicas, which
    generated for `busy` seconds together."""
    return {
        "fully_async/trainer/idle_ratio": waited / step,
        "fully_async/rollouter/idle_ratio": max(0.0, 1.0 - busy / (step * num_replicas)),
    }


@dataclass
class Counts:
    """Counts over the whole run, for metrics."""

    generated: int = 0
    stale: int = 0

    def add(self, samples: Mapping[str, np.ndarray], version: int, num_generated: int) -> dict[str, float]:
        """Count a step's samples; returns the totals."""
        self.generated += num_generated
        self.stale += int((samples["weight_version_min"] < version).sum())
        return {
            "fully_async/count/total_generated_samples": float(self.generated),
            "fully_async/count/stale_samples_processed": float(self.stale),
            "fully_async/count/current_param_version": float(version),
        }


log = logging.getLogger(__name__)

NUM_GEN_BATCHES = "train/num_gen_batches"  # metric
RECORDED = ("row", "epoch", "prompt", "sample_index", "position", "weight_version_min", "weight_version_max")

Collected = tuple[DataProto, dict[str, float]]  # a step's samples, and its metrics so far


class RolloutState(NamedTuple):
    """The state at the beginning of a step, which the checkpoint of the step before holds."""

    state: dict[str, Any]
    surplus: DataProto | None


def _ignore(*_: Any) -> Any:
    pass


@dataclass
class RolloutContext:
    """Arguments that all sources share."""

    controller: Controller
    config: Config
    derived: Derived
    sampler: Sampler
    timers: PhaseTimers
    eos_token_ids: tuple[int, ...]
    weights: WeightSync
    total_steps: int
    cannot_begin: Callable[[str], bool] = _ignore  # whether the run stops before a phase
    wait: Callable[[], None] = _ignore  # until the calls of the step have ended
    log: Callable[[dict[str, float]], None] = _ignore  # adds to the metrics of the step

    @property
    def sampling(self) -> SamplingParams:
        routed_experts = self.config.actor.router_replay.mode == "R3"
        return sampling_params(self.config, self.eos_token_ids, routed_experts=routed_experts)

    def deliver(self, collected: Collected) -> DataProto:
        """Log the metrics of a step's samples so far, and return the samples."""
        batch, metrics = collected
        self.log(metrics | {EPOCH: float(batch.samples["epoch"][0])})
        return batch


def sampling_params(config: Config, eos_token_ids: tuple[int, ...], routed_experts: bool = False) -> SamplingParams:
    """The sampling parameters of section `rollout`."""
    rollout = config.rollout
    return SamplingParams(
        max_new_tokens=config.data.max_response_length,
        temperature=rollout.temperature,
        top_k=rollout.top_k,
        top_p=rollout.top_p,
        ignore_eos=rollout.ignore_eos,
        eos_token_ids=eos_token_ids,
        routed_experts=routed_experts,
    )


@dataclass
class Gathering:
    """Prompts that are collected for a step, with counts and metrics of their generation."""

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
        """A number above those of all kept prompts."""
        return max((int(part.samples["prompt"].max()) + 1 for part in self.groups if len(part)), default=0)


class SamplePool:
    """Scored samples that no step has trained on yet, and the counts that a checkpoint holds."""

    def __init__(self, context: RolloutContext) -> None:
        self.context = context
        self.surplus: DataProto | None = None
        self.counts = Counts()
        self.first_samples = FirstSamples(context.config)
        self.dropped = DroppedPrompts(context.config)
        self._incomplete: set[str] = set()  # values of the scorer that some results lack, as a warning has said
        self._sampler_state()

    def filtered(self, batch: DataProto, gathering: Gathering) -> DataProto:
        """The prompts whose samples differ in the metric of filter_groups; counts the other samples in `found`."""
        self.first_samples.check_metric(batch)
        metric = self.context.config.algorithm.filter_groups.metric
        self._warn_of_gaps(batch, metric_values(batch.samples, metric, required=False), metric, "does not count")
        is_kept = differing(batch, metric)
        self.dropped.check(batch, is_kept)
        gathering.num_evicted += int((~is_kept).sum())
        return batch[is_kept]

    def complete(self, batch: DataProto) -> DataProto:
        """Add what the advantage estimator needs from rank 0."""
        config, derived = self.context.config, self.context.derived
        keys = config.algorithm.gdpo_reward_keys
        if keys:
            parts = [numbers_of(batch.samples, key, "algorithm.gdpo_reward_keys") for key in keys]
            for key, part in zip(keys, parts, strict=True):
                self._warn_of_gaps(batch, part, key, "is 0")
            batch.samples["reward_components"] = np.nan_to_num(np.stack(parts, axis=1)).astype(np.float32)
        if derived.needs_reward_baseline and "reward_baseline" not in batch.samples:
            raise InputError(
                f"algorithm.adv_estimator={config.algorithm.adv_estimator} needs the score of a greedy response "
                "to each prompt, and the recording in trainer.rollouts_from has none; record a run of that estimator"
            )
        return batch

    def _warn_of_gaps(self, batch: DataProto, values: np.ndarray, key: str, there: str) -> None:
        """Log once for each key if samples whose scoring has not failed have no number, which are NaN in `values`."""
        without = int((np.isnan(values) & ~np.isnan(batch.samples["acc"])).sum())
        if without and key not in self._incomplete:
            self._incomplete.add(key)
            log.warning(
                "reward: %d of %d results have no number %r, which %s there: return it in all results",
                *(without, len(batch), key, there),
            )

    def metrics_of(self, step: int, batch: DataProto, gathering: Gathering) -> dict[str, float]:
        config = self.context.config
        metrics = finish(merge(gathering.metrics))
        reused, stale = (int(metrics.get(name, 0)) for name in (ROLLOUTS_REUSED, ROLLOUTS_STALE))
        if reused or stale:
            log.info(
                "step %d: %d of %d responses are reused from an interrupted attempt; %d of its responses, of other "
                "weights, data or settings, are not",
                *(step, reused, gathering.num_generated + gathering.num_greedy, stale),
            )
        if config.algorithm.filter_groups.enable:
            metrics |= {
                NUM_GEN_BATCHES: float(gathering.num_batches),
                "training/filter_groups/evicted_samples": float(gathering.num_evicted),
                "training/filter_groups/surplus_samples": float(len(self.surplus) if self.surplus is not None else 0),
            }
        if config.async_training.mode != "sync":
            metrics |= staleness_metrics(batch.samples, step - 1)
            metrics |= self.counts.add(batch.samples, step - 1, gathering.num_generated)
        return metrics

    def state(self) -> RolloutState:
        return RolloutState({"sampler": self._sampler_state(), "counts": asdict(self.counts)}, self.surplus)

    def save(self, folder: Path, step: int, kept: RolloutState) -> dict[str, Any]:
        """Write samples that wait for training to files, because no weights will draw them again. Returns the state,
        for JSON."""
        if kept.surplus is not None:
            self.write(kept.surplus, folder / "surplus", step)
        return {**kept.state, "surplus": kept.surplus is not None}

    def load(self, state: dict[str, Any], folder: Path, step: int) -> None:
        self.context.sampler.load_state_dict(state["sampler"])
        self.counts = Counts(**state.get("counts", {}))
        if state["surplus"]:
            self.surplus = self.read(folder / "surplus", step)
        self._warn_of_dropped(state, folder, step)

    def _warn_of_dropped(self, state: dict[str, Any], folder: Path, step: int) -> None:
        """Warn of prompts that only the checkpoint's mode would continue with: the sampler is past them."""
        if self.context.config.trainer.rollouts_from is not None:
            return  # the recording has the samples of every step
        mode = self.context.config.async_training.mode
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

    def write(self, batch: DataProto, folder: Path, step: int) -> None:
        """Write scored samples into a file of this folder, in the archive's format; `step` names it. Raises OSError."""
        controller, seed = self.context.controller, self.context.config.run.seed
        write_samples(controller, numbered(batch, step), folder, step, seed=seed, weight_version=step - 1)

    def read(self, folder: Path, step: int) -> DataProto:
        """Read what `write` wrote, in the same order."""
        batch = recorded_samples(folder, step)
        batch = batch.union(self.context.controller["rollout"].replay(batch, str(folder), scores=True).get())
        batch.pop(["position"])
        batch.meta_info.clear()
        return batch

    def _sampler_state(self) -> dict[str, Any]:
        state = self.context.sampler.state_dict()
        try:
            return dict(json.loads(json.dumps(state)))
        except (TypeError, ValueError) as error:
            raise InputError(
                f"data.sampler: {type(self.context.sampler).__name__}.state_dict() cannot be saved: {error}; expected "
                "what JSON holds: int(...) and list(...) of numpy's numbers and arrays"
            ) from None


class RolloutSource:
    """Returns the scored samples of each step, and decides when the engine gets new weights. Lives on rank 0."""

    # Whether a step that is stopped before its update can be made again from what it began with.
    can_repeat: ClassVar[bool] = False

    def __init__(self, context: RolloutContext) -> None:
        self.context, self.weights = context, context.weights
        self.pool = SamplePool(context)

    def next(self, step: int) -> DataProto | None:
        """Wait for the samples that `step` trains on, and return them; None if the run stops before it has them."""
        raise NotImplementedError

    def update_weights(self, step: int) -> None:
        """Note that the actor has the weights of `step` now."""
        raise NotImplementedError

    def paused(self, step: int) -> AbstractContextManager[None]:
        """Context in which the rollout engine has the weights of `step` and is free for other use."""
        return nullcontext()

    def between_steps(self) -> RolloutState:
        """The state between two steps, for a checkpoint that is written then or during the next step."""
        return self.pool.state()

    def save(self, folder: Path, step: int, kept: RolloutState) -> dict[str, Any]:
        """Write what a resumed run needs: samples to files in `folder`; the rest is returned, for JSON."""
        return self.pool.save(folder, step, kept)

    def load(self, state: dict[str, Any], folder: Path, step: int) -> None:
        self.pool.load(state, folder, step)


def write_samples(
    controller: Controller, batch: DataProto, folder: Path, step: int, *, seed: int, weight_version: int
) -> None:
    """Write a step's samples into the archive `folder`, on the ranks that have them. Raises OSError."""
    raise_first(controller["archive"].write(batch, str(folder)).get())
    finish_step(folder, step, seed=seed, weight_version=weight_version, report=log.warning)


def recorded_samples(folder: str | Path, step: int) -> DataProto:
    """The sample columns of a step's archive; the ranks read its token columns."""
    samples = read_samples(step_path(folder, step))
    names: Sequence[str] = [*RECORDED, *(name for name in ("reward_baseline",) if name in samples)]
    batch = DataProto({}, {name: samples[name] for name in names})
    batch.meta_info |= {"split": "train", "step": step, "num_prompts": num_prompts(batch)}
    return batch
