"""Where a run starts: from its newest checkpoint, from given weights, or from random ones."""

from __future__ import annotations

import itertools
import logging
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpcrl.config.loader import load_config
from hpcrl.config.paths import expanded
from hpcrl.config.schema import Config
from hpcrl.engine.checkpoint.store import CheckpointStore, load_path
from hpcrl.observe.record.writer import with_nan
from hpcrl.run.job_config import softmax_vocab_of
from hpcrl.run.time_budget import check_progress
from hpcrl.runtime.exits import InputError
from hpcrl.runtime.job import run_directory
from hpcrl.runtime.world import World

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Start:
    """The start of a run. `folder`: the checkpoint that is continued; `init_from`: initial weights; or neither."""

    step: int  # steps done
    folder: Path | None
    state: dict[str, Any]
    init_from: Path | None
    frozen: dict[str, Path] = field(default_factory=dict)  # role -> checkpoint of a model that is not trained

    def consumed_rows(self, rows_per_step: int) -> int:
        """Rows of the training data that the steps done have consumed.

        Args:
            rows_per_step: rows of each of these steps, if the checkpoint has no number of its own.
        """
        recorded = self.state.get("consumed_rows")
        if recorded is not None and "sampler" in self.state:
            return int(recorded)
        # Without a sampler it is of an earlier version, whose supervised jobs left out the newest step.
        before_newest = recorded or self.state.get("consumed_pairs")
        if before_newest and self.step > 1:
            rows_per_step = before_newest // (self.step - 1)
        return self.step * rows_per_step

    @property
    def unlogged(self) -> dict[str, float] | None:
        """Metrics of `step` if its validation and its line in metrics.jsonl are still missing, otherwise None."""
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
    """Look for the start on rank 0, and return it on all ranks. Collective.

    A resumed run keeps the start weights and frozen models that its checkpoint names, because the paths in the config
    may have newer contents now. Only a reference needs the start weights to exist still.
    """

    def look() -> Start | None:
        if world.rank != 0:
            return None
        folder = run_directory(config) / "checkpoints"
        newest = CheckpointStore(folder).newest_valid(log.warning)
        if newest and config.trainer.resume_mode == "disable":
            raise InputError(
                f"{folder} holds {newest[1].name}, and trainer.resume_mode=disable would start a new run beside it; "
                "choose another run.name, or remove that folder"
            )
        saved = newest[2] if newest else {}
        roles = saved.get("roles", [trained])
        if trained not in roles:
            raise InputError(
                f"{folder} holds checkpoints of {', '.join(roles)}, of another kind of job; choose another run.name"
            )
        before = saved.get("job", job)
        if job is not None and before != job:
            raise InputError(f"{folder} holds checkpoints of `hpcrl {before}`; choose another run.name")
        named = saved.get("init_from") if newest else config.model.init_from or config.model.path
        init_from = Path(named) if named else None
        if init_from is not None and (needs_ref or not newest):
            init_from = load_path(init_from, log.warning)
        models = saved.get("frozen", {})
        others = {role: load_path(Path(models.get(role, path)), log.warning) for role, path in (frozen or {}).items()}
        if "reward" in others and not (others["reward"] / "reward").is_dir():
            raise InputError(
                f"reward.reward_model.init_from: {others['reward']} holds no reward model; name a run of `hpcrl rm`"
            )
        return Start(*newest, init_from, others) if newest else Start(0, None, {}, init_from, others)

    return world.broadcast_object(world.run_collectively(look))


def check_time(world: World, config: Config, start: Start, total_steps: int) -> None:
    """Raise InputError on all ranks if this allocation cannot make progress."""
    found_step = -1 if start.folder is None else start.step

    def check() -> None:
        if world.rank == 0 and (start.step < total_steps or start.unlogged is not None):
            check_progress(run_directory(config), found_step, world.ends_at, config.trainer.walltime_margin)

    world.run_collectively(check)


def check_scratch(world: World, config: Config) -> None:
    """Raise InputError on all ranks if a folder of the nodes in trainer.checkpoint cannot be expanded on one of
    them."""
    options = config.trainer.checkpoint

    def check() -> None:
        for key, path in {"scratch_dir": options.scratch_dir, "snapshot_dir": options.snapshot_dir}.items():
            try:
                expanded(path or "")
            except ValueError as error:
                setting = f"trainer.checkpoint.{key}={path}"
                raise InputError(f"{setting} on {socket.gethostname()}: expected {error}") from None

    world.run_collectively(check)


def set_aside(folder: Path, names: Sequence[str], why: str = "no checkpoint to resume from") -> Path | None:
    """Move the files of an earlier attempt without a checkpoint, so that a new start does not overwrite them. Returns
    their new folder, or None."""
    written = [folder / name for name in names if (folder / name).exists()]
    if not written:
        return None
    number = next(n for n in itertools.count(1) if not (folder / f"attempt_{n}").exists())
    aside = folder / f"attempt_{number}"
    aside.mkdir()
    for path in written:
        path.rename(aside / path.name)
    log.warning("%s; the files of an earlier attempt are in %s", why, aside)
    return aside


def warn_of_changes(folder: Path, config: Config) -> None:
    """Log every config value that differs from the run's config.yaml."""
    try:
        then = [f"model.softmax_vocab={softmax_vocab_of(folder)}"]
        before = flatten(load_config(str(folder / "config.yaml"), then, type(config)).model_dump())
    except ValueError:
        return
    now = flatten(config.model_dump())
    for key in sorted(now):
        if before.get(key) != now[key]:
            log.warning("resuming with changed %s: %s, was %s", key, now[key], before.get(key))


def flatten(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"a": {"b": 1}} -> {"a.b": 1}"""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat
