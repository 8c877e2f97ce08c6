"""What every loop does around its steps: where it starts, its files, its progress, its checkpoints."""

from __future__ import annotations

import hashlib
import logging
import sys
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from hpcrl.checkpoint.store import CheckpointStore, load_path
from hpcrl.config.loader import dump_config
from hpcrl.config.schema import Config
from hpcrl.controller.controller import Controller
from hpcrl.launch.exits import InputError
from hpcrl.launch.job import run_directory
from hpcrl.launch.world import World
from hpcrl.telemetry.progress import Progress
from hpcrl.telemetry.timers import PhaseTimers
from hpcrl.telemetry.writer import MetricsWriter

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Start:
    """Where a run starts: the checkpoint it goes on from, or the one whose weights it begins with, or neither."""

    step: int  # steps done
    folder: Path | None
    state: dict[str, Any]
    init_from: Path | None


def find_start(world: World, config: Config) -> Start:
    """Rank 0 looks; all ranks get what it found."""

    def look() -> Start | None:
        if world.rank != 0:
            return None
        init_from = load_path(config.model.init_from, log.warning) if config.model.init_from else None
        folder = run_directory(config) / "checkpoints"
        found = CheckpointStore(folder, keep=None).newest_valid(log.warning)
        if found and config.trainer.resume_mode == "disable":
            raise InputError(
                f"{folder} holds {found[1].name}, and trainer.resume_mode=disable would start anew beside it; "
                "choose another run.name, or remove that folder"
            )
        return Start(*found, init_from) if found else Start(0, None, {}, init_from)

    return world.broadcast(world.together(look))


class Run:
    """A run's files and clocks, on rank 0."""

    def __init__(self, config: Config, label: str, first_step: int, total_steps: int) -> None:
        self.config = config
        self.folder = run_directory(config)
        (self.folder / "config.yaml").write_text(dump_config(config), encoding="utf-8")
        self.writer = MetricsWriter(self.folder, first_step=first_step)
        self.progress = Progress(total_steps, label, first_step)
        self.timers = PhaseTimers()
        self.checkpoints = CheckpointStore(self.folder / "checkpoints", keep=config.trainer.max_ckpt_to_keep)

    def save(self, controller: Controller, step: int, roles: tuple[str, ...], state: dict[str, Any]) -> None:
        """A checkpoint of these roles after `step`."""
        pending = self.checkpoints.begin(step)
        for role in roles:
            controller[role].save(str(pending)).get()
        stamp = {"config_hash": config_hash(self.config), "versions": versions(), "roles": list(roles)}
        self.checkpoints.commit(step, {**stamp, **state})
        log.info("saved %s", self.checkpoints.folder(step))

    def close(self, final: dict[str, float]) -> None:
        self.writer.hparams(flatten(self.config.model_dump()), final)
        self.writer.close()
        self.progress.close()


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
