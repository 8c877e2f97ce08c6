"""What this rank does and when, in memory until `hpcrl.observe.trace` writes it: named ranges, waits for other ranks,
transfers between ranks, work of child processes and threads, counters.

Times are seconds of `time.perf_counter`, which on Linux is the same clock as `time.monotonic`, in all processes of a
node.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, NamedTuple

WAIT = "wait"  # name of the spans in which a rank waits for other ranks inside MPI
MOST_EVENTS = 2048  # spans kept of a step; then the shorter half is dropped
SHORTEST_WAIT = 20e-6  # seconds; shorter waits are counted only
_NOTHING = nullcontext()


class Recorded(NamedTuple):
    """A range of the main thread. waited: seconds inside it in which the rank waited for other ranks. command: number
    of the controller's command that ran, 0 outside commands."""

    began: float
    ended: float
    name: str
    waited: float
    command: int


class Transfer(NamedTuple):
    """A message between ranks, as one of the two ranks sees it. kind: "columns" or "refit"."""

    began: float
    ended: float
    kind: str
    command: int
    source: int
    destination: int
    nbytes: int


class Beside(NamedTuple):
    """Work outside the main thread, of a child process or a background thread."""

    began: float
    ended: float
    track: str
    name: str


class Counter(NamedTuple):
    """Bytes at a time."""

    at: float
    name: str
    value: int


class Instant(NamedTuple):
    at: float
    name: str


@dataclass
class Events:
    """Everything that was recorded from `began` to `ended`. waited: seconds of all waits. num_dropped: spans that were
    shorter than `shortest` seconds, because there were more than MOST_EVENTS."""

    began: float
    ended: float
    waited: float = 0.0
    spans: list[Recorded] = field(default_factory=list)
    transfers: list[Transfer] = field(default_factory=list)
    beside: list[Beside] = field(default_factory=list)
    counters: list[Counter] = field(default_factory=list)
    instants: list[Instant] = field(default_factory=list)
    num_dropped: int = 0
    shortest: float = 0.0


class _Span:
    """One named range, as a context."""

    __slots__ = ("_recorder", "_name", "_inner", "_command", "_outer_command", "_began", "_waited")

    def __init__(self, recorder: SpanRecorder, name: str, inner: AbstractContextManager[object] | None, command: int):
        self._recorder, self._name, self._inner, self._command = recorder, name, inner, command

    def __enter__(self) -> None:
        recorder = self._recorder
        if self._command:
            self._outer_command, recorder.command = recorder.command, self._command
        recorder._open.append(self)
        self._waited = recorder._waited
        self._began = recorder._clock()
        if self._inner is not None:
            self._inner.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, stack: TracebackType | None
    ) -> None:
        if self._inner is not None:
            self._inner.__exit__(kind, error, stack)
        recorder = self._recorder
        self._cut(recorder._clock())
        if self._command:
            recorder.command = self._outer_command
        if recorder._open and recorder._open[-1] is self:
            recorder._open.pop()
        elif self in recorder._open:  # timers of megatron need not nest
            recorder._open.remove(self)

    def _cut(self, now: float) -> None:
        """Record the range up to now, and continue it from there."""
        recorder = self._recorder
        recorder._add(Recorded(self._began, now, self._name, recorder._waited - self._waited, self._command))
        self._began, self._waited = now, recorder._waited


class SpanRecorder:
    """Records while `enabled`. Only the main thread calls it, except for `add_beside`."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.enabled = False
        self._clock = clock
        self.command = 0  # that runs
        self._open: list[_Span] = []
        self._waited = 0.0  # seconds
        self._wait_began: float | None = None
        self._beside: deque[Beside] = deque(maxlen=MOST_EVENTS)
        self._reset(0.0)

    def start(self) -> None:
        self.enabled, self._waited, self.command = True, 0.0, 0
        self._open.clear()
        self._beside.clear()
        self._wait_began = None
        self._reset(self._clock())

    def stop(self) -> None:
        self.enabled = False

    def span(
        self, name: str, inner: AbstractContextManager[object] | None = None, command: int = 0
    ) -> AbstractContextManager[object]:
        """A context that is recorded under this name; `inner` is entered inside it.

        Args:
            command: the controller's command that runs in it.
        """
        return _Span(self, name, inner, command) if self.enabled else inner or _NOTHING

    def begin_wait(self, now: float) -> None:
        if self.enabled:
            self._wait_began = now

    def end_wait(self, now: float) -> None:
        if self._wait_began is not None:
            self._cut_wait(now)
            self._wait_began = None

    def add_transfer(self, kind: str, source: int, destination: int, nbytes: int, began: float, ended: float) -> None:
        """Record a message of the command that runs, at its sender or its receiver."""
        if self.enabled:
            self._keep(self._events.transfers, Transfer(began, ended, kind, self.command, source, destination, nbytes))

    def add_beside(self, track: str, name: str, began: float, ended: float) -> None:
        """Record work of a child process or of a background thread; may be called by this thread."""
        if self.enabled:
            self._beside.append(Beside(began, ended, track, name))

    def add_counter(self, name: str, value: int) -> None:
        if self.enabled:
            self._keep(self._events.counters, Counter(self._clock(), name, value))

    def add_instant(self, name: str) -> None:
        if self.enabled:
            self._keep(self._events.instants, Instant(self._clock(), name))

    def take(self) -> Events:
        """Everything since the last call. Ranges and waits that have not ended are cut in two."""
        now, wait_began = self._clock(), self._wait_began
        if wait_began is not None:
            self._cut_wait(now)
            self._wait_began = now
            for span in self._open:
                if span._began >= wait_began:  # a command that runs inside the wait
                    span._waited = self._waited
        for span in self._open:
            span._cut(now)
        events, events_beside = self._events, self._beside
        while events_beside:
            events.beside.append(events_beside.popleft())
        events.ended, events.waited = now, self._waited - self._waited_before
        self._reset(now)
        return events

    def _reset(self, now: float) -> None:
        self._events = Events(now, now)
        self._waited_before = self._waited

    def _cut_wait(self, now: float) -> None:
        assert self._wait_began is not None
        seconds = now - self._wait_began
        self._waited += seconds
        if seconds >= SHORTEST_WAIT:
            self._add(Recorded(self._wait_began, now, WAIT, seconds, 0))

    def _add(self, span: Recorded) -> None:
        events = self._events
        if span.ended - span.began < events.shortest:
            events.num_dropped += 1
            return
        events.spans.append(span)
        if len(events.spans) > MOST_EVENTS:
            self._drop_short_spans()

    def _drop_short_spans(self) -> None:
        """Drop the shorter half. What lies inside a dropped span is shorter, so it is dropped with it."""
        events = self._events
        seconds = sorted(span.ended - span.began for span in events.spans)
        events.shortest = max(seconds[len(seconds) // 2], SHORTEST_WAIT) * (1 + 1e-9)
        kept = [span for span in events.spans if span.ended - span.began >= events.shortest]
        events.num_dropped += len(events.spans) - len(kept)
        events.spans = kept

    def _keep(self, events: list[Any], event: tuple[Any, ...]) -> None:
        if len(events) < MOST_EVENTS:
            events.append(event)
        else:
            self._events.num_dropped += 1


# Of this process: ranges and waits are below torch.distributed, megatron and MPI, to which no object can be passed.
spans = SpanRecorder()
