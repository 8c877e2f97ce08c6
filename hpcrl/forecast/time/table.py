"""The table that `hpcrl plan CONFIG --machine NAME` adds: how long each phase of a step takes, and what limits it.

The same step as events for `hpcrl.observe.trace.perfetto`, which draws or writes them.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hpcrl.config.yaml_core import ConfigError
from hpcrl.forecast.memory.memory import TrainingPlan
from hpcrl.forecast.time.lengths import Lengths
from hpcrl.forecast.time.step import Prediction, Span, predict
from hpcrl.machine.machine_file import Machine, read_machine
from hpcrl.observe.trace import perfetto
from hpcrl.observe.trace.perfetto import Event, Slice, draw_trace, instant, write_trace
from hpcrl.runtime.exits import InputError
from hpcrl.runtime.launcher import format_spans

NAMED = 2  # kinds of a phase that a row names
LEAST = 0.01  # share of a kind that is named


def add_arguments(parser: argparse.ArgumentParser) -> None:
    machine = "seconds of a step, too, on a machine of configs/machines or of a file; without it, of job.machine"
    lengths = "with --machine: log-normal lengths of responses, by their mean in tokens and the standard deviation of "
    lengths += "their logarithm, up to data.max_response_length; without it, all have that length"
    timeline = "with --machine: draw the step into a .png file, or write it for Perfetto into a .json file; repeatable"
    parser.add_argument("--machine", metavar="NAME_OR_FILE", help=machine)
    parser.add_argument("--response-lengths", metavar="MEAN,SIGMA", help=lengths)
    parser.add_argument("--timeline", metavar="OUT", action="append", default=[], help=timeline)


def lines_of(job: TrainingPlan, parsed: argparse.Namespace) -> list[str]:
    """The lines of the table; none without --machine or job.machine. Raises ConfigError or InputError, one line."""
    name = parsed.machine or job.config.job.machine
    if name is None:
        if parsed.response_lengths or parsed.timeline:
            option = "--response-lengths" if parsed.response_lengths else "--timeline"
            raise ConfigError(f"found {option} without --machine; name a machine")
        return []
    machine, lengths = read_machine(name), lengths_of(job, parsed.response_lengths)
    prediction = predict(job, machine, lengths)
    title = f"step on {machine.name}: prompts of {lengths.prompt:.0f} tokens, responses of {lengths.response:.0f}"
    if parsed.response_lengths is not None:
        title += f" in the mean, {lengths.longest(job.derived.samples_per_step):.0f} the longest"
    caveat, what = machine.caveat(), "predicted" if machine.measured else "extrapolated"
    heading = f"{job.config.run.name} on {machine.name}, {what}: {prediction.seconds:.4g} s per step"
    check_timelines(parsed.timeline)
    return [
        "",
        title,
        *([] if caveat is None else [f"  {caveat}"]),
        *phase_rows(prediction, machine),
        *summary_rows(job, prediction),
        *(f"  {'timeline':<26}{write_timeline(Path(name), heading, prediction)}" for name in parsed.timeline),
    ]


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


def phase_rows(prediction: Prediction, machine: Machine) -> Iterator[str]:
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


def summary_rows(job: TrainingPlan, prediction: Prediction) -> Iterator[str]:
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


TIMELINE_SUFFIXES = (".png", ".json")


def check_timelines(names: Sequence[str]) -> None:
    """Raise ConfigError, one line, for a file that cannot be written."""
    for path in map(Path, names):
        if path.suffix not in TIMELINE_SUFFIXES:
            raise ConfigError(f"found --timeline {path}; expected a file that ends in {' or '.join(TIMELINE_SUFFIXES)}")
        if not path.parent.is_dir():
            raise ConfigError(f"found --timeline {path}, but there is no folder {path.parent}; create it first")


def write_timeline(path: Path, title: str, prediction: Prediction) -> str:
    """Write the file; return a line that says what it is. Raises InputError, one line."""
    if path.suffix == ".json":
        metadata = {"title": title, "source": "hpcrl plan --machine", "seconds_per_step": prediction.seconds}
        write_trace(path, timeline_events(title, prediction), metadata)
        return f"{path}: open it at https://ui.perfetto.dev"
    drawn = dict.fromkeys(span.phase for span in prediction.spans if span.end > span.start)
    legend = {it: f"{it} {prediction.phases[it]:.3g} s: {limits(prediction.parts[it])}" for it in drawn}
    try:
        draw_trace(list(timeline_events(title, prediction)), path, title, legend, mode=0o666)
    except ImportError:
        raise InputError(
            f"--timeline {path} needs matplotlib, which is not installed here; install it, or name a .json file"
        ) from None
    except OSError as error:
        raise InputError(f"{path} cannot be written: {error.strerror or error}; name another file") from None
    return f"{path}: the step as a picture"


def tracks(spans: Sequence[Span]) -> dict[tuple[int, ...], list[Span]]:
    """Groups of ranks that do the same, by their first rank, and what they do. Spans of no length are left out."""
    doing: dict[int, list[Span]] = {}
    for span in spans:
        for rank in span.ranks if span.end > span.start else ():
            doing.setdefault(rank, []).append(span)
    groups: dict[tuple[Span, ...], list[int]] = {}
    for rank in sorted(doing):
        groups.setdefault(tuple(doing[rank]), []).append(rank)
    return {tuple(ranks): list(its) for its, ranks in groups.items()}


def timeline_events(title: str, prediction: Prediction) -> Iterator[Event]:
    """Events in Chrome's trace event format: a track for each group of ranks, what limits each phase, and when the
    trainer's part of each of several steps ends."""
    yield perfetto.process_name(1, title)
    ends: dict[int, int] = {}
    for tid, (ranks, spans) in enumerate(tracks(prediction.spans).items(), 1):
        roles = dict.fromkeys(prediction.roles[span.phase] for span in spans)
        yield from perfetto.track_names(1, tid, f"ranks {format_spans(ranks)}: {', '.join(roles)}")
        for span in sorted(spans, key=lambda span: span.start):
            parts, role = prediction.parts[span.phase], prediction.roles[span.phase]
            arguments: dict[str, Any] = {"step": span.step} if span.step else {}
            arguments |= {"role": role, "seconds": span.end - span.start, "limited by": limits(parts)}
            arguments |= {kind: round(share, 4) for kind, share in parts.items()}
            start, end = (round(seconds * 1e9) for seconds in (span.start, span.end))
            yield perfetto.complete(Slice(start, -end, span.phase, "phase", arguments), 1, tid)
            if span.step and role == "actor":
                ends[span.step] = max(ends.get(span.step, 0), end)
    for step, end in ends.items():
        yield instant(f"end of step {step}", 1, 1, end, "step")
