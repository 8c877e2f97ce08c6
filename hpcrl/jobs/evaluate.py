"""the validation of a training run, of the weights in model.init_from; --compare: evaluations with error bars"""

from __future__ import annotations

import argparse
import logging
import re
from pathlib import Path
from typing import TYPE_CHECKING

from hpcrl.config.derive import RoleLayouts
from hpcrl.config.schema import Config
from hpcrl.config.yaml_core import ConfigError
from hpcrl.observe.read.evaluation import PROBLEMS_FILE, RESULT_FILE, how_to_evaluate
from hpcrl.observe.read.runlog import RunError, read_run
from hpcrl.observe.record.progress import PhaseTimers
from hpcrl.observe.record.writer import METRICS_FILE, TENSORBOARD_FOLDER, MetricsWriter
from hpcrl.run.inference import ProblemResults, SamplingJob, check_inference
from hpcrl.run.start import set_aside
from hpcrl.run.validation import Validator
from hpcrl.runtime import run_owner
from hpcrl.runtime.exits import InputError
from hpcrl.runtime.job import run_directory
from hpcrl.sandbox.new_files import replace_json

if TYPE_CHECKING:
    from hpcrl.controller.controller import Controller

log = logging.getLogger(__name__)


class Evaluate(SamplingJob):
    """Validate in the ways of rollout.val_kwargs, in a folder of its own inside the run's. With --compare: print what
    existing evaluations reached, with standard errors, and their differences."""

    name = "evaluate"

    @classmethod
    def add_arguments(cls, parser: argparse.ArgumentParser) -> None:
        super().add_arguments(parser)
        parser.usage = (
            f"{parser.prog} [-h] CONFIG [key=value ...]\n"
            f"       {parser.prog} [-h] RUN [RUN ...] --compare [--json] [--plot FILE]"
        )
        more = "compare evaluations that exist, each with the first: folders of runs, or their evaluation.json"
        parser.add_argument("--compare", action="store_true", help=more)
        parser.add_argument("--json", action="store_true", help="of --compare: print JSON")
        parser.add_argument("--plot", metavar="FILE", help="of --compare: draw the intervals; .png, .pdf or .svg")

    @classmethod
    def run_without_ranks(cls, arguments: argparse.Namespace) -> bool:
        if not arguments.compare:
            if arguments.json or arguments.plot:
                raise InputError(f"evaluate: found {'--json' if arguments.json else '--plot'}, which needs --compare")
            if (Path(arguments.config) / RESULT_FILE).exists():
                raise InputError(
                    f"{arguments.config} is a run that has an evaluation; to see it, add --compare; "
                    f"{how_to_evaluate(Path(arguments.config))}"
                )
            return False
        from hpcrl.observe.report.tables import show_comparison

        show_comparison([arguments.config, *arguments.overrides], as_json=arguments.json, plot=arguments.plot)
        return True

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
        results = ProblemResults(self.inputs.prompts["val"])
        validator = Validator.of_job(controller, config, self.inputs, folder, results)
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
            "max_response_length": config.data.max_response_length,
            "problems_digest": results.write(self.run_folder / PROBLEMS_FILE),
            "metrics": metrics,
        }
        path = self.run_folder / RESULT_FILE
        replace_json(path, result)
        log.info(
            "%s\nall metrics are in %s, %s and TensorBoard, in %s; results of each problem in %s",
            *(table(metrics), path, METRICS_FILE, folder, PROBLEMS_FILE),
        )


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
