"""The table that `hpcrl plan CONFIG --machine NAME` adds: how long each phase of a step takes, and what limits it.

The same step as a Gantt chart, a row for each role, and as a trace for Perfetto.
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
from hpcrl.observe.trace.command import write_trace
from hpcrl.observe.trace.perfetto import Event, Slice, complete, process_name, track_names
from hpcrl.runtime.exits import InputError
from hpcrl.runtime.launcher import format_spans
from hpcrl.sandbox.new_files import draft_of

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


WIDTH = 11.0  # inches
BARS = 9.0  # inches of it for the time axis, about
LETTER = 0.066  # inches, of a label
LEGEND_COLUMNS = 3


def draw_timeline(path: Path, title: str, prediction: Prediction) -> None:
    """Draw the spans. Raises ImportError without matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.patches import Patch

    spans = [span for span in prediction.spans if span.end > span.start]
    rows = rows_of(spans, prediction.roles)
    phases = [phase for phase in prediction.phases if any(span.phase == phase for span in spans)]
    palette = plt.get_cmap("Set3")
    colors = {phase: palette(number % palette.N) for number, phase in enumerate(phases)}
    last = max(span.end for span in spans)
    legend_lines = -(-len(phases) // LEGEND_COLUMNS)
    figure, axes = plt.subplots(figsize=(WIDTH, 1.2 + 0.55 * len(rows) + 0.2 * legend_lines), layout="constrained")
    for place, (_, mine) in enumerate(rows):
        for span in mine:
            length = span.end - span.start
            axes.barh(place, length, 0.8, span.start, color=colors[span.phase], edgecolor="black", linewidth=0.4)
            after = min((other.start for other in mine if other.start >= span.end), default=last)
            for text, at, align in bar_labels(span, after, last):
                axes.text(at, place, text, ha=align, va="center", fontsize=8)
    for end in ends_of_steps(spans, prediction.roles):
        axes.axvline(end, color="black", linewidth=0.8, linestyle="--")
    axes.set_yticks(range(len(rows)), [name for name, _ in rows])
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_xlim(0, last)
    axes.set_xlabel("seconds")
    axes.set_title(title, fontsize=10)
    labels = {it: f"{it} {prediction.phases[it]:.3g} s: {limits(prediction.parts[it])}" for it in phases}
    handles = [Patch(color=color, label=labels[phase]) for phase, color in colors.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=LEGEND_COLUMNS, fontsize=8, frameon=False)
    with draft_of(path) as draft:
        figure.savefig(draft, dpi=90)
    plt.close(figure)


def rows_of(spans: Sequence[Span], roles: Mapping[str, str]) -> list[tuple[str, list[Span]]]:
    """For each role: its name with its ranks, and the spans of its phases. A refit is the actor's and the engine's, on
    those ranks of them that take part."""
    ranks: dict[str, tuple[int, ...]] = {}
    for span in spans:
        if span.phase != "update_weights":
            ranks.setdefault(roles[span.phase], span.ranks)
    rows = []
    for role, own in ranks.items():
        refits = ("update_weights",) if role in ("rollout", "actor") else ()
        mine = [it for it in spans if it.phase in refits or (it.phase != "update_weights" and roles[it.phase] == role)]
        name = f"{role}\nrank{'s'[: len(own) > 1]} {format_spans(own)}"
        rows.append((name, [it for it in mine if not set(own).isdisjoint(it.ranks)]))
    return rows


def bar_labels(span: Span, after: float, last: float) -> list[tuple[str, float, str]]:
    """The text of a bar, its place in seconds and its alignment; none if there is no room in the bar, nor beside it.

    after: when the next bar of the row begins. last: the end of the axis.
    """
    phase, step = span.phase, span.step
    texts = (f"{phase}, step {step}", f"{phase} {step}", str(step)) if step else (phase,)
    for text in texts:
        length = len(text) * LETTER / BARS * last
        if length < span.end - span.start:
            return [(text, (span.start + span.end) / 2, "center")]
        if not step and length * 1.05 < after - span.end:
            return [(text, span.end + 0.005 * last, "left")]
    return []


def ends_of_steps(spans: Sequence[Span], roles: Mapping[str, str]) -> list[float]:
    """When the trainer's part of each of several steps ends."""
    ends: dict[int, float] = {}
    for span in spans:
        if span.step and roles[span.phase] == "actor":
            ends[span.step] = max(ends.get(span.step, 0.0), span.end)
    return list(ends.values())


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
    try:
        draw_timeline(path, title, prediction)
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
    """Events in Chrome's trace event format: a track for each group of ranks, and what limits each phase."""
    yield process_name(1, title)
    for tid, (ranks, spans) in enumerate(tracks(prediction.spans).items(), 1):
        roles = dict.fromkeys(prediction.roles[span.phase] for span in spans)
        yield from track_names(1, tid, f"ranks {format_spans(ranks)}: {', '.join(roles)}")
        for span in sorted(spans, key=lambda span: span.start):
            parts = prediction.parts[span.phase]
            arguments: dict[str, Any] = {"step": span.step} if span.step else {}
            arguments |= {"role": prediction.roles[span.phase], "seconds": span.end - span.start}
            arguments |= {"limited by": limits(parts), **{kind: round(share, 4) for kind, share in parts.items()}}
            start, end = (round(seconds * 1e9) for seconds in (span.start, span.end))
            yield complete(Slice(start, -end, span.phase, "phase", arguments), 1, tid)
