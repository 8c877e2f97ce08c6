"""Ranks that were found to be slow during a run: `stragglers.jsonl`, which `hpcrl.run.performance` writes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hpcrl.sandbox.foreign_files import parse_json, read_text

STRAGGLERS_FILE = "stragglers.jsonl"  # of hpcrl.runtime.watchdog, which imports mpi4py


@dataclass(frozen=True)
class Straggler:
    """A rank that was slower than its peers in a phase, and how many times as long it was busy."""

    step: int
    rank: int
    node: str
    phase: str
    ratio: float


def read_stragglers(run: Path) -> Iterator[Straggler]:
    """Those that the run has logged; none if the file is missing."""
    try:
        text = read_text(run / STRAGGLERS_FILE, errors="replace")
    except OSError:
        return
    for line in text.split("\n"):
        try:
            record = parse_json(line)
            step, rank, ratio = int(record["step"]), int(record["rank"]), float(record["ratio"])
            yield Straggler(step, rank, str(record["node"]), str(record["phase"]), ratio)
        except (ValueError, KeyError, TypeError):
            continue  # the last line of a run that continues may be torn
