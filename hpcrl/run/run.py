"""The life-cycle of a job that takes steps: resume, time budget, checkpoints, validation, metrics, logs, the end."""

from __future__ import annotations

import hashlib
import logging
import os
import resource
import sys
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from hpcrl.batch.data_proto import DataProto
from hpcrl.config.loader import dump_config
from hpcrl.controller.controller import Controller
from hpcrl.forecast.memory.state import snapshot_bytes
from hpcrl.observe.read.runlog import RunError, read_run
from hpcrl.observe.record.archive import discard_from
from hpcrl.observe.record.progress import LongPhases, PhaseTimers, Progress, validation_lines
from hpcrl.observe.record.trackers import Status, Trackers
from hpcrl.observe.record.writer import METRICS_FILE, MetricsWriter, without_nan
from hpcrl.observe.report.tables import at_end, next_commands
from hpcrl.observe.trace.rank_trace import discard_other_ranks
from hpcrl.observe.trace.records import TRACE_FOLDER
from hpcrl.run.calls import Call, PendingBatch, Role
from hpcrl.run.job_parts import EPOCH, TOTAL_NUM_TOKENS
from hpcrl.run.model_card import card_facts
from hpcrl.run.performance import PROFILE_FOLDER, ProfiledSteps, Stragglers
from hpcrl.run.recovery import DurableRollouts, bring_back, origin_of
from hpcrl.run.rollouts.source import RolloutSource, write_samples
from hpcrl.run.saver import Saver, export, export_adapter, report_disk, trained_models
from hpcrl.run.snapshots import Snapshots
from hpcrl.run.start import Start, flatten, set_aside, warn_of_changes
from hpcrl.run.time_budget import TimeBudget
from hpcrl.runtime import accelerator, run_owner
from hpcrl.runtime.exits import DONE, OTHER, REQUEUE, write_exit
from hpcrl.runtime.job import run_directory
from hpcrl.runtime.launcher import start_of_ranks, version_of
from hpcrl.runtime.spans import spans
from hpcrl.runtime.watchdog import STRAGGLERS_FILE
from hpcrl.runtime.world import World
from hpcrl.sandbox.new_files import draft_of

if TYPE_CHECKING:
    from hpcrl.run.job import TrainingJob

log = logging.getLogger(__name__)

# by a run as it proceeds
WRITTEN = (METRICS_FILE, "tensorboard", "rollouts", TRACE_FOLDER, PROFILE_FOLDER, STRAGGLERS_FILE)
STEP = "training/global_step"
STATUSES: dict[int, Status] = {DONE: "finished", REQUEUE: "requeued"}  # in trackers


class StateAfterStep(NamedTuple):
    """The contents of a step's checkpoint besides models, taken before the next step begins."""

    job: dict[str, Any]
    rollouts: Any  # of the source
    metrics: dict[str, float]


class Run:
    """Lives on rank 0. A job's loop takes its steps from `steps()`, and calls the roles that `roles(...)` returns."""

    def __init__(self, world: World, controller: Controller, job: TrainingJob, start: Start, total_steps: int) -> None:
        self.controller, self.job, self.config, self.start = controller, job, job.config, start
        self.total_steps = total_steps
        self.last_step = total_steps if job.last_step is None else job.last_step
        self.folder = run_directory(self.config)
        self.step = start.step  # steps done: the weights have been trained for so many
        self.metrics: dict[str, float] = {}  # of this step
        self.is_complete = bool(start.state.get("reached"))
        self.unlogged = start.unlogged  # the step's line, until it is written
        self.rollouts: RolloutSource | None = None
        self._open_folder()
        first_line = 0 if start.folder is None else start.step + (start.unlogged is None)
        self.writer = MetricsWriter(self.folder, first_step=first_line)
        self.progress = Progress(total_steps, job.report.label, start.step + 1)
        self.timers = PhaseTimers(announce=self._phase)
        self.long_phases = LongPhases(self.timers.longest, lambda: int(self.metrics.get(STEP, self.step)))
        trainer, is_sync = self.config.trainer, self.config.async_training.mode == "sync"
        self.trackers = Trackers(
            trainer.logger,
            self.folder,
            self.folder / METRICS_FILE,
            project=trainer.project_name,
            name=trainer.experiment_name or self.config.run.name,
            parameters=flatten(self.config.model_dump()),
        )
        self.stragglers = Stragglers(controller, self.folder, waits=is_sync)
        self.profiled = ProfiledSteps(controller, self.folder, trainer.profile_steps, waits=is_sync)
        saved_step = None if start.folder is None else start.step
        self.events = world.events
        self._stop_requests = world.stop
        self.saver = Saver(
            world.key_value_store, trainer, self.folder / "checkpoints", self.timers, saved_step, self._on_saved
        )
        needed = {}
        if world.node_memory is not None:
            needed = snapshot_bytes(trained_models(job, controller), world.node_memory.nodes)
        self.snapshots = Snapshots(world.key_value_store, world.node_memory, self.folder, needed)
        self.budget = TimeBudget(
            self.folder,
            self.timers,
            requested=world.stop.found if world.stop is not None else lambda: None,
            ends_at=world.ends_at,
            margin=trainer.walltime_margin,
            # A save that is under way has to end before the one with which the run stops.
            num_saves=lambda: 1 if self.saver.step_under_way is None else 2,
            total_steps=total_steps,
        )
        self.durable = DurableRollouts(
            self.folder / "rollouts",
            resumed_at=start.step,
            num_ahead=1 if self.config.async_training.mode == "one_step_off" else 0,
            enabled=trainer.reuse_rollouts,
        )
        self.device_name = accelerator.name_of(world.device)
        self.stop_reason: str | None = None  # once the run has to save and stop, to be continued by the next start
        self._can_stop = False  # whether the step can be made again from what it began with
        self._loop_asks = self._was_asked = True  # whether the loop calls `stops_before` in a step, and has in this one
        self.calls: list[Call] = []  # of this step, which may still run
        self._steps = self._take_steps()
        self.prompt_lengths = self.response_lengths = np.zeros(0, np.int64)  # tokens of each sample of this step
        self._state: StateAfterStep

    def roles(self, *names: str) -> list[Role]:
        """The named roles, for calls. A role that this job does not have leaves batches unchanged."""
        return [Role(self, self.controller.groups.get(self.job.models.stands_for(name))) for name in names]

    def steps(self) -> Iterator[int]:
        """The remaining steps, counted from 1. Between two steps: metrics, validation, checkpoint, time budget."""
        self._steps = self._take_steps()
        return self._steps

    def log(self, metrics: dict[str, float]) -> None:
        """Add to the metrics of this step."""
        self.metrics |= metrics

    def wait(self) -> None:
        """Wait for all calls of this step."""
        while self.calls:
            self.calls.pop(0).get()

    def account(self, batch: DataProto) -> None:
        """Count the samples of this step, for sizes and speeds."""
        samples = batch.samples
        self.prompt_lengths, self.response_lengths = samples["prompt_length"], samples["response_length"]
        self.metrics[TOTAL_NUM_TOKENS] = float(self.prompt_lengths.sum() + self.response_lengths.sum())

    def archive(self, batch: DataProto | PendingBatch) -> None:
        """Write the step's samples with all columns to rollouts/, if trainer.save_rollouts is set."""
        batch = batch.get() if isinstance(batch, PendingBatch) else batch
        self.wait()
        self.account(batch)
        if not self.config.trainer.save_rollouts:
            return
        step, version = int(batch.meta_info["step"]), int(batch.samples["weight_version_max"].max())
        folder, seed = self.folder / "rollouts", self.config.run.seed
        with self.timers("dump_rollout_generations"):
            run_owner.check()
            try:
                write_samples(self.controller, batch, folder, step, seed=seed, weight_version=version)
            except OSError as error:
                log.warning("the rollouts of step %d are not archived: %s", step, error)

    def complete(self, reason: str) -> None:
        """End the run after this step, before total_steps."""
        self.is_complete = True
        log.info("stopped at step %d: %s", self.step, reason)

    def stops_before(self, *phases: str) -> bool:
        """Whether the run stops within this step, because a signal was received or these phases and a save do not fit
        into its time: then the loop takes its next step, `continue`, and there is none. False from the first update of
        a model on.

        A loop that does not ask is stopped between two steps only.
        """
        self._was_asked = True
        return self.cannot_begin(*phases)

    def cannot_begin(self, *phases: str) -> bool:
        """As `stops_before`, for phases of a part of the step: the loop itself may ask or not."""
        return self._can_stop and self.has_to_stop(*phases)

    def has_to_stop(self, *phases: str) -> bool:
        """Whether the run has to stop before these phases, or has stopped before."""
        if self.stop_reason is None:
            self.stop_reason = self.budget.reason_to_stop(*phases)
        return self.stop_reason is not None

    def begin_update(self) -> None:
        """Note that the step cannot be repeated any more: it is completed, whatever the loop was answered before."""
        self._can_stop, self.stop_reason = False, None

    def until_done(self, loop: Callable[[Run], None]) -> int:
        """Restore, run the loop, and end. Returns the exit code: done, or to be continued by another slice."""
        if not self._is_over:
            report_disk(self.job, self.controller, self.folder, self.step, self.last_step)
        self.long_phases.start()
        self._restore()
        if self._stop_requests is not None:
            self._stop_requests.save_on_interrupt()
        self.events.emit("started", self.step, total_steps=self.total_steps)
        try:
            loop(self)
        except Exception as error:
            if self.stop_reason is None:
                self.saver.wait()  # the job ends, but the checkpoint in progress is completed
                raise
            log.warning("the loop does not take its next step where the run stops: %s", error, exc_info=True)
        code = self._end(DONE) if self.stop_reason is None else self._stop(self.stop_reason)
        run_owner.check()
        if code == DONE:
            self.durable.run_ended()
        self.controller.close_workers()
        return code

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        with self.controller.phase(name), self.long_phases(name):
            yield

    def _take_steps(self) -> Generator[int]:
        final: dict[str, float] = {}
        if self.unlogged is not None:
            final = self._close_step(self.step)
        if not self._is_over:
            log.info("step %d of %d begins", self.step + 1, self.total_steps)  # tools/bench start searches for it
        while not self._is_over:
            step, source = self.step + 1, self.rollouts
            can_stop = self._loop_asks and source is not None and source.can_repeat
            if self.has_to_stop("gen" if can_stop else "step"):
                return
            self.metrics = {STEP: float(step)}
            self.calls = []
            self.profiled.begin(step)
            with self.timers("step"):
                self._can_stop, self._was_asked = can_stop, False
                yield step
                if self.stop_reason is not None:
                    return
                self.wait()
                run_owner.check()
            self.profiled.end()
            self._can_stop, self._loop_asks = False, self._was_asked
            self.metrics |= self._poll_save()
            self.step = step
            self._state, self.unlogged = self._take_state(), self._line(step)
            final = self._close_step(step) or final
            if self.stop_reason is not None:
                return
            # After the log: a kill in between repeats the step, where the other order would lose its line.
            is_last = self.is_complete or (step == self.total_steps and self.job.saves_last)
            if is_last or self._is_due(step, self.config.trainer.save_freq):
                with self.timers("save_checkpoint"):
                    self._save()
            frequency = self.config.trainer.snapshot_freq
            if frequency and step % frequency == 0 and step < self.last_step and not self.is_complete:
                with self.timers("snapshot"):
                    self._take_snapshot()
            run_owner.check()
            perhaps = (self.saver.step_under_way, self.snapshots.step)
            self.durable.step_ended(step, saved=self.saver.saved_step or 0, perhaps=perhaps)
        run_owner.check()
        if self.stop_reason is None:
            self.writer.hparams(flatten(self.config.model_dump()), final)

    @property
    def _is_over(self) -> bool:
        return self.step >= self.last_step or self.is_complete or self.stop_reason is not None

    def _is_due(self, step: int, frequency: int) -> bool:
        return frequency > 0 and (step % frequency == 0 or step == self.total_steps)

    def _close_step(self, step: int) -> dict[str, float]:
        """Validate if it is due, and write the step's line, unless the run has to stop before. Returns the metrics of
        validation."""
        validation: dict[str, float] = {}
        assert self.unlogged is not None
        freq = self.job.validation.freq
        if freq > 0 and (step == 0 or self._is_due(step, freq)):
            if self.has_to_stop("testing"):
                return {}
            with self.timers("testing"):
                validation, shown = self.job.validation.run(self, step)
            run_owner.check()
            if shown:
                self.writer.text("validation/samples", step, shown)
            for line in validation_lines(validation):
                log.info("step %d: validation: %s", step, line)
        run_owner.check()
        self.writer.log(step, self.unlogged | validation | self.timers.collect())
        self.trackers.poll()
        self.controller.collect_traffic()  # of validation: a step's traffic is that of training
        self.unlogged = None
        self.metrics |= validation
        self.events.at_step(step)
        if step > 0:
            self.progress.update(step, self.job.report.progress(self.metrics))
        return validation

    def _line(self, step: int) -> dict[str, float]:
        """Metrics, times and sizes of the step."""
        self.metrics |= self.controller.collect_traffic() | self.stragglers.observe(step)
        self.controller.end_trace_step(step)
        if self.config.async_training.mode == "sync":
            self.controller.align_clocks()
        line, lengths = self.timers.collect(), (self.prompt_lengths + self.response_lengths).tolist()
        of_samples, of_responses = sum(lengths), int(self.response_lengths.sum())
        for name in [name for name in line if name.startswith("timing_s/")] if of_samples else []:
            phase = name.removeprefix("timing_s/")
            if phase in self.job.report.phases_per_token:
                tokens = of_responses if phase == "gen" else of_samples
                line[f"timing_per_token_ms/{phase}"] = 1e3 * line[name] / max(tokens, 1)
        seconds = line["timing_s/step"]
        line["perf/time_per_step"] = seconds
        num_tokens = self.metrics.get(TOTAL_NUM_TOKENS, 0.0)
        line["perf/throughput"] = num_tokens / seconds / self.job.derived.world_size
        line["perf/cpu_memory_used_gb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        line |= self.job.report.step_metrics(self, line, lengths, of_responses)
        refit = self.rollouts.weights.metrics if self.rollouts is not None else {}
        return self.metrics | refit | line

    def _open_folder(self) -> None:
        start, config = self.start, self.config
        run_owner.check()
        if start.unlogged is None and (start.step >= self.total_steps or self.is_complete):
            log.info(
                "nothing to do: %d of %d steps are done; ask for more steps, or choose another run.name",
                *(start.step, self.total_steps),
            )
            return
        if start.folder is None:
            generations = config.trainer.validation_data_dir
            if aside := set_aside(self.folder, [*WRITTEN, *([generations] if generations else [])]):
                bring_back(aside / "rollouts", self.folder / "rollouts")
        else:
            warn_of_changes(self.folder, config)
            discard_other_ranks(self.folder, start.step + 1, self.controller.world_size)
        with draft_of(self.folder / "config.yaml") as draft:
            draft.write_text(f"# hpcrl {self.job.name}\n{dump_config(config)}", encoding="utf-8")

    def _restore(self) -> None:
        """Load weights, optimizers and counters of the start, and copy the weights to the rollout engine."""
        workers, start, job = self.controller, self.start, self.job
        for role in job.models.loaded:
            if start.folder is not None and role in job.models.saved:
                workers[role].load(str(start.folder)).get()
            elif start.init_from is not None:
                workers[role].load(str(start.init_from), role="actor", weights_only=True).get()
        for role, folder in start.frozen.items():
            workers[role].load_frozen(str(folder)).get()
        job.set_up(self)
        for part in (job.report, job.validation, job.models, job.saved_state):
            part.set_up(self)
        if start.folder is None:
            if job.validation.first and job.validation.freq > 0:
                self.unlogged = {}
        else:
            job.saved_state.load(start.state)
            if self.rollouts is not None:
                self.rollouts.load(start.state, start.folder, start.step)
            log.info("resuming after step %d from %s", start.step, start.folder)
        if start.folder is None and start.init_from is not None:
            log.info("starting with the weights of %s", start.init_from)
        run_owner.check()
        if self.rollouts is not None:
            discard_from(self.folder / "rollouts", start.step + 1)
            recalled = self.durable.resume()
            if self.config.trainer.reuse_rollouts:
                workers["rollout"].keep_responses(origin_of(start.init_from), recalled).get()
            self.rollouts.weights.update_to(start.step)
        self._state = self._take_state()
        self.timers.collect()  # of the start, which belongs to no step

    def _take_state(self) -> StateAfterStep:
        loop = {
            "epoch": self.metrics.get(EPOCH, self.start.state.get("epoch", 0.0)),
            "init_from": str(self.start.init_from) if self.start.init_from else None,
            "frozen": {role: str(folder) for role, folder in self.start.frozen.items()},
        }
        source = self.rollouts.between_steps() if self.rollouts is not None else None
        job = self.job.saved_state
        return StateAfterStep(loop | job.position(self.step) | job.save(self.step), source, self.metrics)

    def _save(self) -> None:
        """Begin a checkpoint of the last trained step, whether it is logged or not."""
        config, stamp, step = self.config, self._stamp, self.step

        def write(folder: Path) -> dict[str, Any]:
            """Write more files into the checkpoint; returns what its trainer.json holds."""
            if "actor" in self.job.models.saved and (config.trainer.save_hf or config.model.lora_rank > 0):
                facts = card_facts(self.folder, stamp, step)
                if config.trainer.save_hf:
                    export(self.controller, config, folder / "huggingface", facts, self.job.inputs.tokenizer)
                if config.model.lora_rank > 0:
                    export_adapter(self.controller, config, folder / "lora_adapter", facts)
            return self._state_in(folder)

        self.saver.begin(self.controller, step, self.job.models.saved, self._state.metrics, write)

    def _take_snapshot(self) -> None:
        """Begin a snapshot of the last trained step in memory of the nodes."""
        metric = self.saver.metric(self.step, self._state.metrics)
        self.snapshots.begin(self.controller, self.step, self.job.models.saved, metric, self._state_in)

    @cached_property
    def _stamp(self) -> dict[str, Any]:
        """What a checkpoint says of the job."""
        digest = hashlib.blake2b(dump_config(self.config).encode(), digest_size=8).hexdigest()
        stamp = {"job": self.job.name, "config_hash": digest, "versions": versions()}
        return stamp | {"roles": list(self.job.models.saved), "command": self.job.command, "rows": self.job.num_rows}

    def _state_in(self, folder: Path) -> dict[str, Any]:
        """The contents of trainer.json after the last trained step. Writes samples that wait for training."""
        state = self._state
        line = {} if self.unlogged is None else {"unlogged": without_nan(self.unlogged)}
        kept = self.rollouts.save(folder, self.step, state.rollouts) if self.rollouts is not None else {}
        return {**self._stamp, **state.job, "reached": self.is_complete, **line, **kept}

    def _on_saved(self, step: int, folder: Path) -> None:
        self.events.emit("saved", step, checkpoint=str(folder))

    def _poll_save(self) -> dict[str, float]:
        """Advance a save that is under way, without waiting. Returns metrics of saves that have ended."""
        if self.saver.step_under_way is not None:
            with self.timers("save_checkpoint"):
                self.saver.poll()
        found = self.saver.metrics() | self.snapshots.metrics()
        if "perf/save_seconds" in found:
            self.budget.write_times()  # so that a killed slice leaves them as well
        return found

    def _stop(self, reason: str) -> int:
        self._steps.close()
        self.profiled.discard()
        log.warning("stopping: %s", reason)
        self.events.at_end(reason=reason[:1000])
        spans.add_instant(f"stopping: {reason}")
        with self.timers("save_checkpoint"):
            self.saver.wait()
            if self.saver.saved_step != self.step:
                self._save()
        code = self._end(REQUEUE)
        if code == REQUEUE:
            log.info("stopped after step %d; the next start continues from there", self.step)
        return code

    def _end(self, code: int) -> int:
        """Close all files. Returns OTHER in place of `code` if the last checkpoint could not be written."""
        self.events.at_end(step=self.step)
        with self.timers("save_checkpoint"):
            is_saved = self.saver.wait()
            self.snapshots.wait()
        run_owner.check()
        self.long_phases.close()
        self.profiled.close()
        self.budget.write_times()
        self.writer.close()
        self.progress.close()
        self.trackers.finish(STATUSES[code] if is_saved else "failed")
        if is_saved and code == DONE and self.step > self.start.step:
            self._log_summary()
        if is_saved:
            return code
        line = "the last checkpoint could not be written, so the steps since the one before are lost; see the log"
        log.error("%s", line)
        write_exit(self.folder, OTHER, rank=0, phase="save_checkpoint", error=line)
        return OTHER

    def _log_summary(self) -> None:
        """Log what the run reached, and the commands that use it."""
        config, job = self.config, self.job
        has_policy = self.saver.saved_step is not None and job.trained_role == "actor"
        commands = next_commands(
            self.folder,
            start_of_ranks(os.environ, self.controller.world_size),
            evaluates=has_policy and bool(config.data.val_files) and job.file is None,
            exports=has_policy,
        )
        try:
            log.info("%s", at_end(read_run(self.folder), self.folder, commands))
        except RunError as error:
            log.warning("the run's metrics cannot be read: %s", error)


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that write a checkpoint."""
    packages = ("hpcrl", "torch", "megatron-core", "mpi4py", "numpy")
    return {"python": sys.version.split()[0]} | {package: version_of(package) or "unknown" for package in packages}
