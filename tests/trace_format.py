"""A checker of Chrome's trace event format, from its public description, "Trace Event Format" (Google): phases X, M, C,
i, s and f, with the keys that each must have, and complete events that nest."""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

Event = dict[str, Any]
NUMBER = (int, float)
REQUIRED: dict[str, dict[str, Any]] = {  # phase -> key -> type, besides ph, name, pid, tid, ts
    "X": {"dur": NUMBER, "cat": str},
    "M": {"args": dict},
    "C": {"args": dict},
    "i": {"s": str},
    "s": {"id": int, "cat": str},
    "f": {"id": int, "cat": str, "bp": str},
}
METADATA = {"process_name", "process_sort_index", "thread_name", "thread_sort_index"}


class Flow(NamedTuple):
    """An arrow from one rank to another."""

    start: Event
    end: Event


class Trace:
    """A file of the format. Raises AssertionError for one that is not valid."""

    def __init__(self, path: Path) -> None:
        text = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        document = json.loads(text)
        assert set(document) == {"displayTimeUnit", "traceEvents", "metadata"}
        assert document["displayTimeUnit"] in ("ms", "ns")
        self.metadata: dict[str, Any] = document["metadata"]
        self.events: list[Event] = document["traceEvents"]
        self.processes: dict[int, str] = {}
        self.threads: dict[tuple[int, int], str] = {}
        for event in self.events:
            check_event(event)
            track = event["pid"], event["tid"]
            if event["name"] == "process_name":
                assert event["pid"] not in self.processes
                self.processes[event["pid"]] = event["args"]["name"]
            elif event["name"] == "thread_name":
                assert track not in self.threads
                self.threads[track] = event["args"]["name"]
        for event in self.events:
            assert event["pid"] in self.processes
            assert event["ph"] in "MC" or (event["pid"], event["tid"]) in self.threads
        assert len(set(self.threads.values())) == len(self.threads)
        self.slices = {name: self._slices(track) for track, name in self.threads.items()}
        self.flows = self._flows()

    def of(self, phase: str) -> list[Event]:
        return [event for event in self.events if event["ph"] == phase]

    def _slices(self, track: tuple[int, int]) -> list[Event]:
        """The complete events of a track in their order, each inside the one that is open when it begins."""
        found = [event for event in self.of("X") if (event["pid"], event["tid"]) == track]
        open_until: list[float] = []
        last = 0.0
        for event in found:
            assert event["ts"] >= last, "not in the order of their time"
            last, end = event["ts"], ns(event["ts"]) + ns(event["dur"])
            while open_until and open_until[-1] <= ns(last):
                open_until.pop()
            assert not open_until or end <= open_until[-1], f"{event} overlaps the event around it"
            event["depth"] = len(open_until)
            open_until.append(end)
        return found

    def _flows(self) -> list[Flow]:
        starts, ends = ({event["id"]: event for event in self.of(phase)} for phase in "sf")
        assert len(starts) == len(self.of("s")) and len(ends) == len(self.of("f")), "an id is used twice"
        assert starts.keys() == ends.keys(), "an arrow has one end only"
        for event in (*starts.values(), *ends.values()):
            around = self.slices[self.threads[event["pid"], event["tid"]]]
            at = ns(event["ts"])
            assert any(ns(one["ts"]) <= at <= ns(one["ts"]) + ns(one["dur"]) for one in around), "binds to no slice"
        for number, start in starts.items():
            assert (start["name"], start["cat"]) == (ends[number]["name"], ends[number]["cat"])
        return [Flow(start, ends[number]) for number, start in starts.items()]


def ns(microseconds: float) -> int:
    return round(microseconds * 1e3)


def check_event(event: Event) -> None:
    for key, kind in {"ph": str, "name": str, "pid": int, "tid": int, "ts": NUMBER}.items():
        assert isinstance(event.get(key), kind), f"{key} of {event}"
    assert event["ph"] in REQUIRED, event
    for key, kind in REQUIRED[event["ph"]].items():
        assert isinstance(event.get(key), kind), f"{key} of {event}"
    assert event["ts"] >= 0 and event.get("dur", 0) >= 0
    assert isinstance(event.get("args", {}), dict)
    if event["ph"] == "M":
        assert event["name"] in METADATA
    elif event["ph"] == "C":
        assert event["args"] and all(isinstance(value, NUMBER) for value in event["args"].values())
    elif event["ph"] == "i":
        assert event["s"] in "gpt"
    elif event["ph"] == "f":
        assert event["bp"] == "e"


def seconds_by_name(slices: list[Event]) -> dict[str, float]:
    """Seconds by name; of the slices, not of what is inside them."""
    found: dict[str, float] = defaultdict(float)
    for event in slices:
        found[event["name"]] += event["dur"] / 1e6
    return found
