"""What every loop does around its steps: where it starts, its files, its progress, its checkpoints."""

from __future__ import annotations

import hashlib
import itertools
import logging
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from hpcrl.checkpoint.store import CheckpointStore, load_path
from hpcrl.config.loader import dump_config, load_config
from hpcrl.config.schema import Config
from hpcrl.controller.controller import Controller
from hpcrl.runtime.exits import DONE, OTHER, REQUEUE, InputError, write_exit
from hpcrl.runtime.job import run_directory
from hpcrl.runtime.watchdog import STRAGGLERS_FILE
from hpcrl.runtime.world import World
from hpcrl.telemetry.progress import Progress
from hpcrl.telemetry.timers import PhaseTimers
from hpcrl.telemetry.writer import MetricsWriter
from hpcrl.trainer.durable_rollouts import bring_back
from hpcrl.trainer.hf_export import export, export_adapter
from hpcrl.trainer.profiled_steps import PROFILE_FOLDER, ProfiledSteps
from hpcrl.trainer.saving import Saver
from hpcrl.trainer.slice import Leave, Slice, check_progress

log = logging.getLogger(__name__)

WRITTEN = ("metrics.jsonl", "tensorboard", "rollouts", PROFILE_FOLDER, STRAGGLERS_FILE)  # by a run as it goes on


@dataclass(frozen=True)
class Start:
    """Where a run starts: the checkpoint it goes on from, or the one whose weights it begins with, or neither."""

    step: int  # steps done
    folder: Path | None
    state: dict[str, Any]
    init_from: Path | None
    frozen: dict[str, Path] = field(default_factory=dict)  # role -> checkpoint of a model that is only asked

    @property
    def unlogged(self) -> dict[str, float] | None:
        """Metrics of `step`, whose validation and whose line in metrics.jsonl are still to come; None: it has both."""
        found = self.state.get("unlogged")
        return None if found is None else with_nan(found)


def find_start(
    world: World,
    config: Config,
    needs_ref: bool = False,
    frozen: Mapping[str, str] | None = None,
    trained: str = "actor",
    job: str | None = None,
) -> Start:
    """Rank 0 looks; all ranks get what it found.

    A resumed run keeps the start weights and the frozen models that its checkpoint names, for what the config names may
    mean newer ones by now; only a reference still needs the start weights to be there.
    """

    def look() -> Start | None:
        if world.rank != 0:
            return None
        folder = run_directory(config) / "checkpoints"
        found = CheckpointStore(folder).newest_valid(log.warning)
        if found and config.trainer.resume_mode == "disable":
            raise InputError(
                f"{folder} holds {found[1].name}, and trainer.resume_mode=disable would start anew beside it; "
                "choose another run.name, or remove that folder"
            )
        roles = found[2].get("roles", [trained]) if found else [trained]
        if trained not in roles:
            raise InputError(
                f"{folder} holds checkpoints of {', '.join(roles)}, of another kind of job; choose another run.name"
            )
        before = found[2].get("job", job) if found else job
        if job is not None and before != job:
            raise InputError(f"{folder} holds checkpoints of `hpcrl {before}`; choose another run.name")
        named = found[2].get("init_from") if found else config.model.init_from or config.model.path
        init_from = Path(named) if named else None
        if init_from is not None and (needs_ref or not found):
            init_from = load_path(init_from, log.warning)
        kept = found[2].get("frozen", {}) if found else {}
        others = {role: load_path(Path(kept.get(role, path)), log.warning) for role, path in (frozen or {}).items()}
        if "reward" in others and not (others["reward"] / "reward").is_dir():
            raise InputError(
                f"reward.reward_model.init_from: {others['reward']} holds no reward model; name a run of `hpcrl rm`"
            )
        return Start(*found, init_from, others) if found else Start(0, None, {}, init_from, others)

    return world.broadcast_object(world.run_collectively(look))


class Run:
    """A run's files and clocks, on rank 0."""

    def __init__(
        self,
        world: World,
        controller: Controller,
        config: Config,
        job: str,
        label: str,
        start: Start,
        total_steps: int,
    ) -> None:
        """`job`: the subcommand."""
        self.controller, self.config, self.job = controller, config, job
        self.folder = run_directory(config)
        first_step = start.step + 1
        if start.unlogged is None and first_step > total_steps:
            log.info(
                "nothing to do: %d of %d steps are done; ask for more steps, or choose another run.name",
                first_step - 1,
                total_steps,
            )
        else:
            if start.folder is None:
                generations = config.trainer.validation_data_dir
                if aside := set_aside(self.folder, [*WRITTEN, *([generations] if generations else [])]):
                    bring_back(aside / "rollouts", self.folder / "rollouts")
            else:
                warn_of_changes(self.folder, config)
            (self.folder / "config.yaml").write_text(dump_config(config), encoding="utf-8")
        first_line = 0 if start.folder is None else first_step if start.unlogged is None else start.step
        self.writer = MetricsWriter(self.folder, first_step=first_line)
        self.progress = Progress(total_steps, label, first_step)
        self.timers = PhaseTimers(announce=controller.phase)
        self.slice = Slice(
            self.folder,
            self.timers,
            requested=world.stop.found if world.stop is not None else lambda: None,
            ends_at=world.ends_at,
            margin=config.trainer.walltime_margin,
        )
        waits = config.async_training.mode == "sync"
        self.profiled = ProfiledSteps(controller, self.folder, config.trainer.profile_steps, waits=waits)
        saved_step = None if start.folder is None else start.step
        self.saver = Saver(world.key_value_store, config.trainer, self.folder / "checkpoints", self.timers, saved_step)
        # One that is under way has to end before the one with which the slice is left.
        self.slice.num_saves = lambda: 1 if self.saver.step_under_way is None else 2

    def to_its_end(
        self, train: Callable[[], dict[str, float]], save: Callable[[], None], step: Callable[[], int]
    ) -> int:
        """All steps that this slice can do; gives the job's exit code: done, or to be continued by another slice.

        train: does them, and gives the last validation's metrics. save: begins the checkpoint that the next slice goes
        on from, which is that of `step()`.
        """
        try:
            return self._close(train())
        except Leave as why:
            return self._leave(why, save, step())
        except Exception:
            self.saver.wait()  # the job is lost, the checkpoint under way need not be
            raise

    def save(
        self,
        step: int,
        roles: tuple[str, ...],
        state: dict[str, Any],
        metrics: Mapping[str, float],
        files: Callable[[Path], dict[str, Any]] | None = None,
    ) -> None:
        """Begin a checkpoint of these roles after `step`. `files(folder)` writes more into it, and gives more state.

        metrics: of the step, for trainer.checkpoint.best_metric.
        """
        stamp = {"job": self.job, "config_hash": config_hash(self.config), "versions": versions(), "roles": list(roles)}

        def write(folder: Path) -> dict[str, Any]:
            if self.config.trainer.save_hf and "actor" in roles:
                export(self.controller, self.config, folder / "huggingface")
            if self.config.model.lora_rank > 0 and "actor" in roles:
                export_adapter(self.controller, self.config, folder / "lora_adapter")
            return {**stamp, **state, **(files(folder) if files is not None else {})}

        self.saver.begin(self.controller, step, roles, metrics, write)

    def progress_of_save(self) -> dict[str, float]:
        """Bring a save that is under way forward, without waiting; gives metrics of those that have ended."""
        if self.saver.step_under_way is not None:
            with self.timers("save_checkpoint"):
                self.saver.poll()
        found = self.saver.metrics()
        if "perf/save_seconds" in found:
            self.slice.remember_times()  # a slice that is killed leaves them, too
        return found

    def _leave(self, why: Leave, save: Callable[[], None], step: int) -> int:
        log.warning("leaving: %s", why)
        with self.timers("save_checkpoint"):
            self.saver.wait()
            if self.saver.saved_step != step:
                save()
        code = self._end(REQUEUE)
        if code == REQUEUE:
            log.info("left after step %d; the next slice goes on from there", step)
        return code

    def _close(self, final: dict[str, float]) -> int:
        self.writer.hparams(flatten(self.config.model_dump()), final)
        return self._end(DONE)

    def _end(self, code: int) -> int:
        """Gives another code where the last checkpoint, which the run was for, could not be written."""
        with self.timers("save_checkpoint"):
            is_saved = self.saver.wait()
        self.profiled.close()
        self.slice.remember_times()
        self.writer.close()
        self.progress.close()
        if is_saved:
            return code
        line = "the last checkpoint could not be written, so what came after the one before is lost; see the log"
        log.error("%s", line)
        write_exit(self.folder, OTHER, rank=0, phase="save_checkpoint", error=line)
        return OTHER


def start_slice(world: World, config: Config, start: Start, total_steps: int) -> None:
    """On all ranks: InputError where this allocation cannot bring the run further."""
    found_step = -1 if start.folder is None else start.step

    def check() -> None:
        if world.rank == 0 and (start.step < total_steps or start.unlogged is not None):
            check_progress(run_directory(config), found_step, world.ends_at, config.trainer.walltime_margin)

    world.run_collectively(check)


def set_aside(folder: Path, names: Sequence[str], why: str = "no checkpoint to resume from") -> Path | None:
    """Keep what an earlier attempt without a checkpoint wrote: a run that starts anew must not lose it. Where it is."""
    written = [folder / name for name in names if (folder / name).exists()]
    if not written:
        return None
    number = next(n for n in itertools.count(1) if not (folder / f"attempt_{n}").exists())
    aside = folder / f"attempt_{number}"
    aside.mkdir()
    for path in written:
        path.rename(aside / path.name)
    log.warning("%s; what an earlier attempt wrote is in %s", why, aside)
    return aside


def warn_of_changes(folder: Path, config: Config) -> None:
    """A resumed run takes new values, but not in silence."""
    try:
        before = flatten(load_config(str(folder / "config.yaml")).model_dump())
    except ValueError:
        return
    now = flatten(config.model_dump())
    for key in sorted(now):
        if before.get(key) != now[key]:
            log.warning("resuming with another %s: %s, was %s", key, now[key], before.get(key))


def without_nan(metrics: Mapping[str, float]) -> dict[str, float | None]:
    """JSON has neither NaN nor infinity."""
    return {name: value if math.isfinite(value) else None for name, value in metrics.items()}


def with_nan(metrics: Mapping[str, float | None]) -> dict[str, float]:
    return {name: math.nan if value is None else value for name, value in metrics.items()}


def config_hash(config: Config) -> str:
    return hashlib.blake2b(dump_config(config).encode(), digest_size=8).hexdigest()


def versions() -> dict[str, str]:
    found = {"python": sys.version.split()[0]}
    for package in ("hpcrl", "torch", "megatron-core", "mpi4py", "numpy"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "unknown"
    return found


def flatten(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"a": {"b": 1}} -> {"a.b": 1}"""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat
