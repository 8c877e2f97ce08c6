"""The table that `hpcrl plan CONFIG --machine NAME` adds: how long each phase of a step takes, and what limits it."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from hpcrl.config.yaml_core import ConfigError
from hpcrl.forecast.memory.memory import TrainingPlan
from hpcrl.forecast.time.lengths import Lengths
from hpcrl.forecast.time.step import Prediction, predict
from hpcrl.machine.machine_file import Machine, read_machine

NAMED = 2  # kinds of a phase that a row names
LEAST = 0.01  # share of a kind that is named


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--machine",
        metavar="NAME_OR_FILE",
        help="seconds of a step, too, on a machine of configs/machines or of a file; without it, of job.machine",
    )
    parser.add_argument(
        "--response-lengths",
        metavar="MEAN,SIGMA",
        help="with --machine: log-normal lengths of responses, by their mean in tokens and the standard deviation of "
        "their logarithm, up to data.max_response_length; without it, all have that length",
    )
    parser.add_argument(
        "--timeline",
        metavar="OUT",
        action="append",
        default=[],
        help="with --machine: draw the step into a .png file, or write it for Perfetto into a .json file; repeatable",
    )


def lines_of(job: TrainingPlan, parsed: argparse.Namespace) -> list[str]:
    """The lines of the table; none without --machine or job.machine. Raises ConfigError or InputError, one line."""
    name = parsed.machine or job.config.job.machine
    if name is None:
        given = {"--response-lengths": parsed.response_lengths, "--timeline": parsed.timeline}
        for option in (option for option, value in given.items() if value):
            raise ConfigError(f"found {option} without --machine; name a machine")
        return []
    machine, lengths = read_machine(name), lengths_of(job, parsed.response_lengths)
    prediction = predict(job, machine, lengths)
    title = f"step on {machine.name}: prompts of {lengths.prompt:.0f} tokens, responses of {lengths.response:.0f}"
    if parsed.response_lengths is not None:
        title += f" in the mean, {lengths.longest(job.derived.samples_per_step):.0f} the longest"
    caveat = machine.caveat()
    return [
        "",
        title,
        *([] if caveat is None else [f"  {caveat}"]),
        *rows(prediction, machine),
        *summary(job, prediction),
        *_written(job, prediction, machine, parsed.timeline),
    ]


def _written(job: TrainingPlan, prediction: Prediction, machine: Machine, names: Sequence[str]) -> Iterator[str]:
    if names:
        from hpcrl.forecast.time import timeline_files

        timeline_files.check(names)
        what = "extrapolated" if not machine.measured else "predicted"
        title = f"{job.config.run.name} on {machine.name}, {what}: {prediction.seconds:.4g} s per step"
        for name in names:
            yield f"  {'timeline':<26}{timeline_files.write(Path(name), title, prediction)}"


def lengths_of(job: TrainingPlan, text: str | None) -> Lengths:
    """The lengths that the option names: prompts are as long as they may be."""
    prompt, longest = job.config.data.max_prompt_length, job.config.data.max_response_length
    if text is None:
        return Lengths.fixed(prompt, longest)
    try:
        mean, sigma = map(float, text.split(","))
        return Lengths.log_normal(prompt, mean, sigma, longest)
    except (ValueError, OverflowError):
        why = f"found --response-lengths {text}; expected MEAN,SIGMA, such as 800,0.7: tokens above 0, and 0 or more"
        raise ConfigError(why) from None


def rows(prediction: Prediction, machine: Machine) -> Iterator[str]:
    yield f"  {'phase':<26}{'seconds':>10}{'share':>8}  limited by"
    for name, seconds in prediction.phases.items():
        share = seconds / prediction.seconds
        yield f"  {name:<26}{seconds:>10.4g}{share:>8.1%}  {limits(prediction.parts[name])}"
    low, high = prediction.band(machine)
    yield f"  {'step':<26}{prediction.seconds:>10.4g}          {low:.4g} to {high:.4g} by the error of its phases"


def limits(parts: Mapping[str, float]) -> str:
    """The kinds that take most of a phase."""
    largest = sorted(parts.items(), key=lambda part: -part[1])[:NAMED]
    return ", ".join(f"{kind} {share:.0%}" for kind, share in largest if share >= LEAST) or "-"


def summary(job: TrainingPlan, prediction: Prediction) -> Iterator[str]:
    size, what = job.derived.world_size, "GPU" if job.on_gpu else "rank"
    yield f"  {'tokens/s per ' + what:<26}{prediction.tokens_per_second / size:>10.4g}"
    steps, config = job.config.trainer.total_training_steps, job.config
    if steps is None:
        each = prediction.seconds * config.job.nodes / 3600
        yield f"  {'node-hours':<26}{each:>10.4g} per step; the number of steps depends on the data"
    else:
        hours = steps * prediction.seconds / 3600
        took = f"{steps} steps in {hours:.3g} h, without validation"
        yield f"  {'node-hours':<26}{hours * config.job.nodes:>10.4g} for {took}"
