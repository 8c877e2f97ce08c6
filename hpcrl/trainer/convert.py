"""`hpcrl convert`: a Hugging Face directory into a run's first checkpoint, or a checkpoint's policy into the former."""

from __future__ import annotations

import logging
import os
import tempfile
from pathlib import Path

from hpcrl.checkpoint.store import is_hugging_face
from hpcrl.config.derive import DerivedModel
from hpcrl.config.loader import dump_config
from hpcrl.config.schema import CheckpointConfig, Config
from hpcrl.controller.controller import Controller, run_program
from hpcrl.roles.team import build_conversion_team, policy_shape
from hpcrl.runtime.exits import DONE, OTHER, InputError
from hpcrl.runtime.job import run_directory
from hpcrl.runtime.world import World
from hpcrl.telemetry.timers import PhaseTimers
from hpcrl.trainer.hf_export import export
from hpcrl.trainer.run import find_start, versions
from hpcrl.trainer.saving import Saver

log = logging.getLogger(__name__)


def run(world: World, config: Config, derived: DerivedModel, target: str) -> int:
    """`hpcrl convert` on every rank."""
    shape = world.run_collectively(lambda: policy_shape(config))
    start = find_start(world, config)
    assert start.init_from is not None
    source = start.init_from
    team = build_conversion_team(world, config, derived, shape)
    code = run_program(
        world,
        team.workers,
        team.kinds,
        team.layouts,
        lambda controller: convert(world, controller, config, source, Path(target)),
    )
    return DONE if code is None else code  # rank 0 knows


def convert(world: World, controller: Controller, config: Config, source: Path, target: Path) -> int:
    """The controller's program, on rank 0; gives the exit code."""
    controller["actor"].load(str(source), role="actor", weights_only=True).get()
    if is_hugging_face(source):
        options = config.trainer.model_copy(update={"checkpoint": CheckpointConfig(async_save=False)})
        saver = Saver(world.key_value_store, options, run_directory(config) / "checkpoints", PhaseTimers())
        stamp = {"roles": ["actor"], "job": "convert", "versions": versions()}
        saver.begin(controller, 0, ("actor",), {}, lambda folder: stamp)
        if not saver.wait():
            return OTHER
        (run_directory(config) / "config.yaml").write_text(dump_config(config), encoding="utf-8")
    else:
        try:
            draft = Path(tempfile.mkdtemp(prefix=f"{target.name}.", dir=target.absolute().parent)) / "draft"
            export(controller, config, draft)
            os.replace(draft, target)
            draft.parent.rmdir()
        except OSError as error:
            raise InputError(f"cannot write {target}: {error.strerror or error}") from error
    log.info("%s is now %s", source, target)
    return DONE
