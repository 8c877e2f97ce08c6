"""the validation of a training run, of the weights in model.init_from"""

from __future__ import annotations

import argparse
import json
import logging
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

from hpcrl.config.schema import Config
from hpcrl.config.yaml_core import ConfigError
from hpcrl.run.inference import (
    INFERENCE_ADVICE,
    DerivedGenerate,
    check_inference,
    close,
    inference_roles,
    inside_run,
    load_engine,
    run_folder,
    step_of,
    write_config,
)
from hpcrl.run.job import Job
from hpcrl.run.start import Start, set_aside
from hpcrl.runtime.exits import DONE
from hpcrl.runtime.job import run_directory
from hpcrl.telemetry.progress import PhaseTimers
from hpcrl.telemetry.runlog import RunError, read_run
from hpcrl.telemetry.writer import METRICS_FILE, TENSORBOARD_FOLDER, MetricsWriter

if TYPE_CHECKING:
    from hpcrl.controller.controller import Controller
    from hpcrl.workers.team import Inputs

log = logging.getLogger(__name__)

RESULT_FILE = "evaluation.json"


class Evaluate(Job):
    """Validate in the ways of rollout.val_kwargs, in a folder of its own inside the run's."""

    name = "evaluate"
    memory_advice = INFERENCE_ADVICE
    derived: DerivedGenerate

    @classmethod
    def load(cls, arguments: argparse.Namespace) -> Config:
        return inside_run(super().load(arguments), cls.name)

    @classmethod
    def check(cls, config: Config, num_ranks: int) -> DerivedGenerate:
        if not config.data.val_files:
            raise ConfigError(
                "data.val_files is empty; name at least one Parquet or JSONL file of prompts to evaluate on"
            )
        return check_inference(config, num_ranks, sum(way.n for way in config.rollout.val_kwargs), scored=True)

    def main(self) -> int:
        from hpcrl.run.inference import find_weights
        from hpcrl.workers.team import build_team, read_generation_inputs

        world, config, derived = self.world, self.config, self.derived
        inputs = world.run_collectively(lambda: read_generation_inputs(config, "val", world))
        start = find_weights(world, config, derived)
        team = build_team(world, config, derived, inputs, inference_roles(derived))
        self.run_program(team, lambda controller: evaluate(controller, config, inputs, start))
        return DONE


def evaluate(controller: Controller, config: Config, inputs: Inputs, start: Start) -> dict[str, float]:
    """The validation's metrics, which also go into files and onto the terminal. Runs on rank 0."""
    folder, step, timers = run_directory(config), step_of(start), PhaseTimers(announce=controller.phase)
    write_config(config)
    generations = config.trainer.validation_data_dir
    _keep_earlier(folder, step, [generations] if generations else [])
    from hpcrl.run.validation import Validator

    validator = Validator.of_job(controller, config, inputs, folder)
    refit = load_engine(controller, start, step, timers)
    with timers("testing"):
        metrics, shown = validator.run(step)
    close(controller)
    writer = MetricsWriter(folder, first_step=step)
    writer.log(step, metrics | refit | timers.collect() | controller.traffic.collect())
    if shown:
        writer.text("validation/samples", step, shown)
    writer.close()
    weights = str(start.init_from) if start.init_from is not None else None
    result = {
        "weights": weights,
        "step": step,
        "files": config.data.val_files,
        "num_prompts": len(inputs.prompts["val"]),
        "metrics": metrics,
    }
    path = run_folder(config) / RESULT_FILE
    draft = path.with_name(path.name + ".tmp")
    draft.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    os.replace(draft, path)
    log.info("%s\nall metrics are in %s, %s and TensorBoard's files in %s", table(metrics), path, METRICS_FILE, folder)
    return metrics


def _keep_earlier(folder: Path, step: int, names: list[str]) -> None:
    """Evaluations of rising steps make one curve; another one of the same step, or of an earlier one, starts anew."""
    try:
        last = max(read_run(folder).rows)
    except RunError:
        return
    if last >= step:
        set_aside(folder, [METRICS_FILE, TENSORBOARD_FOLDER, *names], f"step {last} was evaluated before step {step}")


def table(metrics: dict[str, float]) -> str:
    """The core metrics, the means of the others, and how many scores failed, one a line."""
    shown = [name for name in metrics if name.startswith("val-core/")]
    shown += [name for name in sorted(metrics) if re.fullmatch("val-aux/(?!.*acc_success_only).*/mean@[0-9]+", name)]
    shown += [name for name, count in metrics.items() if name.startswith("val-aux/reward/") and count]
    width = max(map(len, shown), default=0)
    return "\n".join(["evaluation", *(f"  {name:<{width}}  {metrics[name]:.4g}" for name in shown)])


JOB = Evaluate
