"""a Hugging Face directory into a run, or a run's policy into such a directory"""

from __future__ import annotations

import argparse
import logging
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from hpcrl.config.loader import dump_config
from hpcrl.config.roles import EXPORT, POLICY
from hpcrl.config.schema import CheckpointConfig, Config
from hpcrl.engine.checkpoint.store import TRAINER_FILE, is_hugging_face
from hpcrl.observe.record.progress import PhaseTimers
from hpcrl.run.job import WeightsJob, add_overrides
from hpcrl.run.job_config import config_of, folder_of, run_of
from hpcrl.run.model_card import card_facts
from hpcrl.run.run import versions
from hpcrl.run.saver import Saver, export
from hpcrl.runtime import run_owner
from hpcrl.runtime.exits import DONE, OTHER, InputError
from hpcrl.runtime.job import run_directory
from hpcrl.sandbox.new_files import draft_of, read_json_or

if TYPE_CHECKING:
    from hpcrl.controller.controller import Controller

log = logging.getLogger(__name__)


class Convert(WeightsJob):
    """Convert a Hugging Face directory into a run's first checkpoint, or the policy of a run into such a directory."""

    name = "convert"

    @classmethod
    def add_arguments(cls, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("source", metavar="SOURCE", help="Hugging Face directory, run or checkpoint")
        parser.add_argument("target", metavar="TARGET", help="folder of a run, or of the Hugging Face directory")
        add_overrides(parser)

    @classmethod
    def load(cls, arguments: argparse.Namespace) -> Config:
        folder = folder_of(arguments.source, arguments.target)
        return config_of(arguments.source, folder, arguments.overrides, cls.schema())

    @classmethod
    def prepare_folder(cls, config: Config, arguments: argparse.Namespace) -> None:
        folder_of(arguments.source, arguments.target)  # another conversion may have ended meanwhile

    def main(self) -> int:
        team, source = self.build([POLICY, EXPORT])
        assert source is not None
        code = self.run_program(team, lambda controller: self._convert(controller, source))
        return DONE if code is None else code  # rank 0 has it

    def _convert(self, controller: Controller, source: Path) -> int:
        """The controller's program, on rank 0; returns the exit code."""
        config, target = self.config, Path(self.arguments.target)
        controller["actor"].load(str(source), role="actor", weights_only=True).get()
        if is_hugging_face(source):
            options = config.trainer.model_copy(update={"checkpoint": CheckpointConfig(async_save=False)})
            saver = Saver(self.world.key_value_store, options, run_directory(config) / "checkpoints", PhaseTimers())
            stamp = {"roles": ["actor"], "job": "convert", "versions": versions()}
            saver.begin(controller, 0, ("actor",), {}, lambda folder: stamp)
            if not saver.wait():
                return OTHER
            run_owner.check()
            with draft_of(run_directory(config) / "config.yaml") as draft:
                draft.write_text(dump_config(config), encoding="utf-8")
        else:
            try:
                parent = target.absolute().parent
                parent.mkdir(parents=True, exist_ok=True)
                draft = Path(tempfile.mkdtemp(prefix=f"{target.name}.", dir=parent)) / "draft"
                run, state = run_of(source), read_json_or(source / TRAINER_FILE, {}, source)
                assert run is not None  # its config is this one's
                export(controller, config, draft, card_facts(run, state, state["step"]))
                os.replace(draft, target)
                draft.parent.rmdir()
            except OSError as error:
                raise InputError(f"cannot write {target}: {error.strerror or error}") from error
        log.info("%s is now %s", source, target)
        return DONE


JOB = Convert
