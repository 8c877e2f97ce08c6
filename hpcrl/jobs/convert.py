"""a Hugging Face directory into a run, or a run's policy into such a directory"""

from __future__ import annotations

import argparse
import logging
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from hpcrl.checkpoint.store import is_hugging_face
from hpcrl.config.derive import RoleLayouts
from hpcrl.config.loader import dump_config
from hpcrl.config.placement import place
from hpcrl.config.roles import ACTOR, EXPORT, POLICY
from hpcrl.config.schema import CheckpointConfig, Config
from hpcrl.run.job import Job
from hpcrl.run.job_config import config_of, folder_of
from hpcrl.runtime.exits import DONE, OTHER, InputError
from hpcrl.runtime.job import run_directory
from hpcrl.runtime.world import World
from hpcrl.telemetry.progress import PhaseTimers

if TYPE_CHECKING:
    from hpcrl.controller.controller import Controller

log = logging.getLogger(__name__)


class Convert(Job):
    """Convert a Hugging Face directory into a run's first checkpoint, or the policy of a run into such a directory."""

    name = "convert"
    can_be_submitted = False
    derived: RoleLayouts

    @classmethod
    def add_arguments(cls, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("source", metavar="SOURCE", help="Hugging Face directory, run or checkpoint")
        parser.add_argument("target", metavar="TARGET", help="folder of a run, or of the Hugging Face directory")
        parser.add_argument(
            "overrides", metavar="key=value", nargs="*", default=[], help="override a key of the config"
        )

    @classmethod
    def load(cls, arguments: argparse.Namespace) -> Config:
        folder = folder_of(arguments.source, arguments.target)
        return config_of(arguments.source, folder, arguments.overrides, cls.schema())

    @classmethod
    def check(cls, config: Config, num_ranks: int) -> RoleLayouts:
        return RoleLayouts(num_ranks, place(config, [ACTOR], num_ranks))

    def main(self) -> int:
        from hpcrl.run.start import find_start
        from hpcrl.workers.team import Inputs, build_team, policy_shape

        world, config, target = self.world, self.config, Path(self.arguments.target)
        shape = world.run_collectively(lambda: policy_shape(config))
        start = find_start(world, config)
        source = start.init_from
        assert source is not None
        team = build_team(world, config, self.derived, Inputs(shape), [POLICY, EXPORT])
        code = self.run_program(team, lambda controller: convert(world, controller, config, source, target))
        return DONE if code is None else code  # rank 0 has it


def convert(world: World, controller: Controller, config: Config, source: Path, target: Path) -> int:
    """The controller's program, on rank 0; gives the exit code."""
    from hpcrl.run.run import versions
    from hpcrl.run.saver import Saver, export

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


JOB = Convert
