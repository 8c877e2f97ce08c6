"""Files of a predicted step: a picture, and a trace for Perfetto."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from hpcrl.config.yaml_core import ConfigError
from hpcrl.forecast.time.gantt import draw
from hpcrl.forecast.time.step import Prediction
from hpcrl.forecast.time.table import limits
from hpcrl.forecast.time.timeline import Span
from hpcrl.observe.trace.command import write as write_trace
from hpcrl.observe.trace.perfetto import Event, Slice, complete, process_name, track_names
from hpcrl.runtime.exits import InputError
from hpcrl.runtime.launcher import format_spans

SUFFIXES = (".png", ".json")


class Track(NamedTuple):
    """What a group of ranks does, if each of them does the same."""

    ranks: tuple[int, ...]
    spans: list[Span]


def check(names: Sequence[str]) -> None:
    """Raise ConfigError, one line, for a file that cannot be written."""
    for path in map(Path, names):
        if path.suffix not in SUFFIXES:
            raise ConfigError(f"found --timeline {path}; expected a file that ends in {' or '.join(SUFFIXES)}")
        if not path.parent.is_dir():
            raise ConfigError(f"found --timeline {path}, but there is no folder {path.parent}; create it first")


def write(path: Path, title: str, prediction: Prediction) -> str:
    """Write the file; return a line that says what it is. Raises InputError, one line."""
    if path.suffix == ".json":
        metadata = {"title": title, "source": "hpcrl plan --machine", "seconds_per_step": prediction.seconds}
        write_trace(path, events(title, prediction), metadata)
        return f"{path}: open it at https://ui.perfetto.dev"
    try:
        draw(path, title, prediction)
    except ImportError:
        raise InputError(
            f"--timeline {path} needs matplotlib, which is not installed here; install it, or name a .json file"
        ) from None
    except OSError as error:
        raise InputError(f"{path} cannot be written: {error.strerror or error}; name another file") from None
    return f"{path}: the step as a picture"


def tracks(spans: Sequence[Span]) -> list[Track]:
    """Groups of ranks that do the same, by their first rank. Spans of no length are left out."""
    doing: dict[int, list[int]] = {}
    for number, span in enumerate(spans):
        for rank in span.ranks if span.end > span.start else ():
            doing.setdefault(rank, []).append(number)
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank in sorted(doing):
        groups.setdefault(tuple(doing[rank]), []).append(rank)
    return [Track(tuple(ranks), [spans[number] for number in numbers]) for numbers, ranks in groups.items()]


def events(title: str, prediction: Prediction) -> Iterator[Event]:
    """Events in Chrome's trace event format: a track for each group of ranks, and what limits each phase."""
    yield process_name(1, title)
    for tid, track in enumerate(tracks(prediction.spans), 1):
        roles = dict.fromkeys(prediction.roles[span.task.partition("/")[0]] for span in track.spans)
        yield from track_names(1, tid, f"ranks {format_spans(track.ranks)}: {', '.join(roles)}")
        for span in sorted(track.spans, key=lambda span: span.start):
            phase, _, step = span.task.partition("/")
            parts = prediction.parts[phase]
            arguments: dict[str, Any] = {"step": int(step)} if step else {}
            arguments |= {"role": prediction.roles[phase], "seconds": span.end - span.start}
            arguments |= {"limited by": limits(parts), **{kind: round(share, 4) for kind, share in parts.items()}}
            yield complete(Slice(_ns(span.start), -_ns(span.end), phase, "phase", arguments), 1, tid)


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)
