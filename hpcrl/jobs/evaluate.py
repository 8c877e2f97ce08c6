"""the validation of a training run, of the weights in model.init_from"""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import TYPE_CHECKING

from hpcrl.config.derive import RoleLayouts
from hpcrl.config.schema import Config
from hpcrl.config.yaml_core import ConfigError
from hpcrl.observe.read.runlog import RunError, read_run
from hpcrl.observe.record.progress import PhaseTimers
from hpcrl.observe.record.writer import METRICS_FILE, TENSORBOARD_FOLDER, MetricsWriter
from hpcrl.run.inference import SamplingJob, check_inference
from hpcrl.run.start import set_aside
from hpcrl.run.validation import Validator
from hpcrl.runtime import run_owner
from hpcrl.runtime.job import run_directory
from hpcrl.sandbox.new_files import replace_json

if TYPE_CHECKING:
    from hpcrl.controller.controller import Controller

log = logging.getLogger(__name__)

RESULT_FILE = "evaluation.json"


class Evaluate(SamplingJob):
    """Validate in the ways of rollout.val_kwargs, in a folder of its own inside the run's."""

    name = "evaluate"

    @classmethod
    def check(cls, config: Config, num_ranks: int) -> RoleLayouts:
        if not config.data.val_files:
            raise ConfigError(
                "data.val_files is empty; name at least one Parquet or JSONL file of prompts to evaluate on"
            )
        return check_inference(config, num_ranks, sum(way.n for way in config.rollout.val_kwargs), scored=True)

    def sample(self, controller: Controller, timers: PhaseTimers, refit: dict[str, float]) -> None:
        """Validate; write the metrics to files and print the most important ones."""
        config, step, folder = self.config, self.step, run_directory(self.config)
        generations = config.trainer.validation_data_dir
        run_owner.check()
        _keep_earlier(folder, step, [generations] if generations else [])
        validator = Validator.of_job(controller, config, self.inputs, folder)
        with timers("testing"):
            metrics, shown = validator.run(step)
        run_owner.check()
        writer = MetricsWriter(folder, first_step=step)
        writer.log(step, metrics | refit | timers.collect() | controller.collect_traffic())
        if shown:
            writer.text("validation/samples", step, shown)
        writer.close()
        result = {
            "weights": str(self.start.init_from) if self.start.init_from is not None else None,
            "step": step,
            "files": config.data.val_files,
            "num_prompts": len(self.inputs.prompts["val"]),
            "metrics": metrics,
        }
        path = self.run_folder / RESULT_FILE
        replace_json(path, result)
        log.info("%s\nall metrics are in %s, %s and TensorBoard, in %s", table(metrics), path, METRICS_FILE, folder)


def _keep_earlier(folder: Path, step: int, names: list[str]) -> None:
    """Move the files of an earlier evaluation of this step or a later one: only evaluations of increasing steps form a
    curve."""
    try:
        last = max(read_run(folder).rows)
    except RunError:
        return
    if last >= step:
        set_aside(folder, [METRICS_FILE, TENSORBOARD_FOLDER, *names], f"step {last} was evaluated before step {step}")


def table(metrics: dict[str, float]) -> str:
    """The core metrics, the means of the others, and the numbers of failed scores, one per line."""
    shown = [name for name in metrics if name.startswith("val-core/")]
    shown += [name for name in sorted(metrics) if re.fullmatch("val-aux/(?!.*acc_success_only).*/mean@[0-9]+", name)]
    shown += [name for name, count in metrics.items() if name.startswith("val-aux/reward/") and count]
    width = max(map(len, shown), default=0)
    return "\n".join(["evaluation", *(f"  {name:<{width}}  {metrics[name]:.4g}" for name in shown)])


JOB = Evaluate
