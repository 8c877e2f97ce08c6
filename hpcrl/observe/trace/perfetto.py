"""Timelines, recorded or predicted, as files: events of Chrome's trace event format, and pictures of them.

The format: "Trace Event Format", Google, https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU.
Perfetto and chrome://tracing show it. Of a run, a node is a process, a rank is a thread whose ranges nest, and each
scoring process or saving thread is a thread, too.
"""

from __future__ import annotations

import gzip
import json
from collections import Counter as Count
from collections import defaultdict
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from hpcrl.observe.read.logs import Straggler
from hpcrl.observe.trace.records import RankStep, Window
from hpcrl.runtime.exits import InputError
from hpcrl.runtime.spans import WAIT, Beside, Recorded, Transfer
from hpcrl.sandbox.foreign_files import ERRORS
from hpcrl.sandbox.new_files import draft_of

Event = dict[str, Any]
TRACKS_PER_RANK = 1000
GIB = 2**30


class Slice(NamedTuple):
    """A complete event in ns since the beginning of the file; sorted so that outer ones come first."""

    began: int
    minus_ended: int
    name: str
    category: str
    arguments: dict[str, Any]

    @property
    def ended(self) -> int:
        return -self.minus_ended


@dataclass
class Timeline:
    """Makes the events of a file. Times in it are microseconds since the begin of the window `first`."""

    first: Window
    _processes: dict[str, int] = field(default_factory=dict)  # node -> pid
    _threads: dict[tuple[int, str], int] = field(default_factory=dict)  # (rank, track) -> tid
    _flows: dict[tuple[Any, ...], int] = field(default_factory=dict)
    _unpaired: dict[int, Event] = field(default_factory=dict)  # flow -> the end that was found first

    def process(self, node: str) -> Generator[Event, None, int]:
        """Yield the events that name a node, the first time. Returns its pid."""
        if node not in self._processes:
            pid = self._processes[node] = len(self._processes) + 1
            yield process_name(pid, f"node {node}")
            yield _meta("process_sort_index", pid, sort_index=pid)
        return self._processes[node]

    def thread(self, pid: int, rank: int, track: str, label: str) -> Generator[Event, None, int]:
        """Yield the events that name a track, the first time. Returns its tid."""
        if (rank, track) not in self._threads:
            index = sum(other == rank for other, _ in self._threads)
            tid = self._threads[rank, track] = (rank + 1) * TRACKS_PER_RANK + index
            yield from track_names(pid, tid, label)
        return self._threads[rank, track]

    def step(self, window: Window, rank: RankStep, stragglers: Sequence[Straggler]) -> Iterator[Event]:
        """The events of one step of one rank.

        Args:
            stragglers: stragglers of the whole run.
        """
        zero = self.first.began - (window.wall - self.first.wall)  # on rank 0's clock

        def ns(at: float) -> int:
            return round((rank.on_rank_0(at) - zero) * 1e9)

        first, last = round((window.began - zero) * 1e9), round((window.ended - zero) * 1e9)
        pid = yield from self.process(rank.node)
        tid = yield from self.thread(pid, rank.rank, "", f"rank {rank.rank}")
        slices: list[Slice] = []
        beside: list[Beside] = []
        ends: list[tuple[int, Transfer, bool]] = []
        for record in rank.records:
            events = record.events()
            slices += [_slice(span, ns(span.began), ns(span.ended)) for span in events.spans]
            for transfer in events.transfers:
                began, ended = ns(transfer.began), ns(transfer.ended)
                is_sender = transfer.source == rank.rank
                if transfer.kind == "columns":
                    name = f"send to rank {transfer.destination}" if is_sender else f"receive from {transfer.source}"
                    slices.append(Slice(began, -ended, name, "transfer", _bytes(transfer)))
                ends.append(((began if is_sender else max(began, ended - 1)), transfer, is_sender))
            beside += events.beside
            for counter in events.counters:
                if first <= (at := ns(counter.at)) <= last:
                    name, value = f"rank {rank.rank} {counter.name}", counter.value / GIB
                    yield {"ph": "C", "name": name, "pid": pid, "tid": 0, "ts": at / 1e3, "args": {"GiB": value}}
            for mark in events.instants:
                if first <= (at := ns(mark.at)) <= last:
                    yield instant(mark.name, pid, tid, at)
        for one in nested(_clip(slices, first, last)):
            yield complete(one, pid, tid)
        seen: Count[tuple[Any, ...]] = Count()
        for at, transfer, is_sender in sorted(ends, key=lambda end: end[0]):
            key = (window.slice_ns, transfer.command, transfer.kind, transfer.source, transfer.destination)
            seen[key] += 1
            if first <= at <= last:
                flow = self._flows.setdefault((*key, seen[key]), len(self._flows) + 1)
                yield from self._pair(flow, _flow(flow, transfer, pid, tid, at, is_sender))
        work = [(one.track, Slice(ns(one.began), -ns(one.ended), one.name, "background", {})) for one in beside]
        yield from self._beside(pid, rank.rank, work, first, last)
        for slow in stragglers:
            if (slow.step, slow.rank) == (window.step, rank.rank):
                yield instant(_verdict(slow), pid, tid, last)

    def _pair(self, flow: int, event: Event) -> Iterator[Event]:
        """Both ends of an arrow, once both are found."""
        other = self._unpaired.pop(flow, None)
        if other is None:
            self._unpaired[flow] = event
        else:
            yield from (other, event)

    def _beside(self, pid: int, rank: int, work: list[tuple[str, Slice]], first: int, last: int) -> Iterator[Event]:
        """Tracks of child processes and threads. Work of one track that overlaps is put on tracks of its own."""
        for name in sorted({track for track, _ in work}):
            busy_until: list[int] = []
            for one in sorted(_clip([one for track, one in work if track == name], first, last), key=_order):
                lane = next((lane for lane, until in enumerate(busy_until) if until <= one.began), len(busy_until))
                busy_until[lane : lane + 1] = [one.ended]
                track = name if lane == 0 else f"{name} ({lane + 1})"
                tid = yield from self.thread(pid, rank, track, f"rank {rank} {track}")
                yield complete(one, pid, tid)


def _clip(slices: list[Slice], first: int, last: int) -> list[Slice]:
    """The parts of the slices between two times."""
    return [
        one._replace(began=max(one.began, first), minus_ended=-min(one.ended, last))
        for one in slices
        if one.began < last and one.ended > first or first <= one.began == one.ended < last
    ]


def _order(one: Slice) -> tuple[int, int]:
    return one[:2]


def nested(slices: list[Slice]) -> Iterator[Slice]:
    """The slices in the order of their start, each inside the one that was open when it began: what would end later is
    cut, as the format demands."""
    open_until: list[int] = []
    for one in sorted(slices, key=_order):
        while open_until and open_until[-1] <= one.began:
            open_until.pop()
        ended = min(one.ended, open_until[-1]) if open_until else one.ended
        open_until.append(ended)
        yield one._replace(minus_ended=-ended)


def _slice(span: Recorded, began: int, ended: int) -> Slice:
    if span.name == WAIT:
        return Slice(began, -ended, WAIT, WAIT, {})
    category = "phase" if span.name.startswith("controller.") else "command" if span.command else "range"
    arguments: dict[str, Any] = {"waited_ms": round(span.waited * 1e3, 6)}
    if span.command:
        arguments["command"] = span.command
    return Slice(began, -ended, span.name, category, arguments)


def complete(one: Slice, pid: int, tid: int) -> Event:
    event: Event = {
        "ph": "X",
        "name": one.name,
        "cat": one.category,
        "pid": pid,
        "tid": tid,
        "ts": one.began / 1e3,
        "dur": (one.ended - one.began) / 1e3,
    }
    if one.category == WAIT:
        event["cname"] = "grey"
    if one.arguments:
        event["args"] = one.arguments
    return event


def _bytes(transfer: Transfer) -> dict[str, Any]:
    return {"source": transfer.source, "destination": transfer.destination, "bytes": transfer.nbytes}


def _flow(flow: int, transfer: Transfer, pid: int, tid: int, at: int, is_sender: bool) -> Event:
    name = f"{transfer.kind} {transfer.source} to {transfer.destination}"
    event: Event = {"ph": "s" if is_sender else "f", "id": flow, "name": name, "cat": transfer.kind}
    event |= {"pid": pid, "tid": tid, "ts": at / 1e3, "args": _bytes(transfer)}
    return event if is_sender else event | {"bp": "e"}


def instant(name: str, pid: int, tid: int, at: int, category: str = "event") -> Event:
    return {"ph": "i", "s": "t", "name": name, "cat": category, "pid": pid, "tid": tid, "ts": at / 1e3}


def _verdict(slow: Straggler) -> str:
    return f"straggler in {slow.phase}: {slow.ratio} times the median"


def _meta(kind: str, pid: int, tid: int = 0, **arguments: Any) -> Event:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "ts": 0, "args": arguments}


def process_name(pid: int, name: str) -> Event:
    return _meta("process_name", pid, name=name)


def track_names(pid: int, tid: int, name: str) -> Iterator[Event]:
    """The events that name a track, and put it behind those of smaller numbers."""
    yield _meta("thread_name", pid, tid, name=name)
    yield _meta("thread_sort_index", pid, tid, sort_index=tid)


def phases_of(rows: dict[int, dict[str, float]], steps: list[int], stragglers: Sequence[Straggler]) -> Iterator[Event]:
    """Events of steps of which there is no trace, from metrics: the phases of a step one after the other."""
    yield process_name(1, "phases, from metrics.jsonl")
    for tid, name in enumerate(("steps", "phases in sequence"), 1):
        yield from track_names(1, tid, name)
    at = 0
    for step in steps:
        seconds = {
            key.removeprefix("timing_s/"): value
            for key, value in rows.get(step, {}).items()
            if key.startswith("timing_s/") and value > 0  # not NaN either
        }
        whole = round(seconds.pop("step", 0.0) * 1e9)
        ended = at
        for name, value in seconds.items():
            length = round(value * 1e9)
            yield complete(Slice(ended, -(ended + length), name, "phase", {}), 1, 2)
            ended += length
        yield complete(Slice(at, -(at + whole), f"step {step}", "phase", {}), 1, 1)
        for slow in stragglers:
            if slow.step == step:
                yield instant(f"rank {slow.rank}: {_verdict(slow)}", 1, 1, at + whole)
        at = max(ended, at + whole)


def write_trace(out: Path, events: Iterable[Event], metadata: dict[str, Any], drawn: list[Event] | None = None) -> int:
    """Write the file, whole or not at all; `metadata` is read after the last event. Returns the number of events.

    Args:
        drawn: list to which the events are appended.
    """
    count = 0
    try:
        with draft_of(out, mode=0o600) as draft, _opened(draft, out.suffix == ".gz") as file:
            file.write('{"displayTimeUnit": "ms", "traceEvents": [')
            for event in events:
                file.write(",\n" if count else "\n")
                file.write(json.dumps(event, ensure_ascii=False, allow_nan=False, separators=(",", ":")))
                count += 1
                if drawn is not None:
                    drawn.append(event)
            file.write(f'\n], "metadata": {json.dumps(metadata, ensure_ascii=False)}}}\n')
    except OSError as error:
        raise InputError(f"{out} cannot be written: {error.strerror or error}; name another file") from error
    return count


def _opened(draft: Path, is_compressed: bool) -> TextIO:
    if is_compressed:
        return gzip.open(draft, "wt", encoding="utf-8", errors=ERRORS, compresslevel=3)  # type: ignore[return-value]
    return open(draft, "w", encoding="utf-8", errors=ERRORS)


MOST_TRACKS = 40  # rows of a picture; further tracks are left out
MOST_NAMES = 12  # in the legend of a recorded timeline, those with most time
HEIGHTS = {"phase": 0.95, "command": 0.8, "wait": 0.8, "background": 0.6}  # of bars, by category, in their order
GREYS = {"phase": "#f0f0f0", "command": "#a0a0a0", "wait": "#d0d0d0", "background": "#a0a0a0"}  # of other names
LETTER = 0.0073  # width of a letter in a bar, as a share of the time axis


def draw_trace(
    events: Sequence[Event], path: Path, title: str, legend: Mapping[str, str] | None = None, mode: int = 0o600
) -> None:
    """Draw commands, phases, waits and background work of the first tracks, and arrows for transfers.

    Raises ImportError without matplotlib.

    Args:
        legend: phases of a predicted timeline, with what the legend says of them; bars have their names then.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.patches import Patch

    names = {(event["pid"], event["tid"]): event["args"]["name"] for event in events if event["name"] == "thread_name"}
    tracks = sorted(names, key=lambda track: track[::-1])[:MOST_TRACKS]
    row = {track: number for number, track in enumerate(tracks)}
    shown = [
        event
        for event in events
        if event["ph"] == "X" and event["cat"] in HEIGHTS
        and event["name"] != "controller.step" and (event["pid"], event["tid"]) in row
    ]  # fmt: skip
    labels = _longest(shown) | {WAIT: WAIT} if legend is None else legend
    palette = plt.get_cmap("tab20" if legend is None else "Set3")
    colors = {name: palette(number % palette.N) for number, name in enumerate(labels)} | {WAIT: GREYS[WAIT]}
    figure, axes = plt.subplots(figsize=(12, 1.5 + 0.4 * len(tracks)), layout="constrained")
    bars: dict[tuple[int, str, Any], list[tuple[float, float]]] = defaultdict(list)
    for event in shown:
        where, color = row[event["pid"], event["tid"]], colors.get(event["name"], GREYS[event["cat"]])
        bars[where, event["cat"], color].append((event["ts"] / 1e6, event["dur"] / 1e6))
    for order, height in HEIGHTS.items():
        for (where, category, color), spans in bars.items():
            if category == order:
                axes.broken_barh(spans, (where - height / 2, height), facecolors=color)
    starts = {event["id"]: event for event in events if event["ph"] == "s"}
    for event in [event for event in events if event["ph"] == "f" and event["id"] in starts][:200]:
        begin = starts[event["id"]]
        ends = [(one["ts"] / 1e6, row.get((one["pid"], one["tid"]))) for one in (begin, event)]
        if None not in (ends[0][1], ends[1][1]):
            arrow = {"arrowstyle": "->", "color": "black", "linewidth": 0.6}
            axes.annotate("", xy=ends[1], xytext=ends[0], arrowprops=arrow)
    if legend is not None:
        last = max(event["ts"] + event["dur"] for event in shown)
        for event in shown:
            middle, where = (event["ts"] + event["dur"] / 2) / 1e6, row[event["pid"], event["tid"]]
            axes.text(middle, where, _bar_text(event, last), ha="center", va="center", fontsize=8)
        for event in events:
            if event["ph"] == "i":
                axes.axvline(event["ts"] / 1e6, color="black", linewidth=0.8, linestyle="--")
    axes.set_yticks(range(len(tracks)), [names[track] for track in tracks])
    axes.set_ylim(len(tracks) - 0.4, -0.6)
    axes.margins(x=0.01)
    axes.set_xlabel("seconds")
    axes.set_title(title, fontsize="medium")
    handles = [Patch(color=colors[name], label=label) for name, label in labels.items()]
    place = {"loc": "outside right upper"} if legend is None else {"loc": "outside lower center", "ncols": 3}
    figure.legend(handles=handles, fontsize="small", **place)
    with draft_of(path, mode=mode) as draft:
        figure.savefig(draft, dpi=110)
    plt.close(figure)


def _longest(shown: Sequence[Event]) -> dict[str, str]:
    """The commands and the background work with most time, each with its name for the legend."""
    seconds: Count[str] = Count()
    for event in shown:
        if event["cat"] in ("command", "background"):
            seconds[event["name"]] += event["dur"]
    return {name: name for name, _ in seconds.most_common(MOST_NAMES)}


def _bar_text(event: Event, last: float) -> str:
    """The text of a bar that it has room for.

    Args:
        last: the end of the time axis.
    """
    name, step = event["name"], event["args"].get("step")
    texts = (f"{name}, step {step}", f"{name} {step}", str(step)) if step else (name,)
    return next((text for text in texts if len(text) * LETTER * last < event["dur"]), "")
