"""Slurm's output files of a run, `slurm-<job>.out`: what the batch script and Slurm printed about each slice."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hpcrl.observe.read.rank_logs import shorten
from hpcrl.sandbox.foreign_files import open_file
from hpcrl.sandbox.new_files import read_json

MOST_BYTES = 16 * 2**20  # of one file: its end

_BEGIN = re.compile(r"hpcrl: job (\S+), restart (\d+): (\d+) ranks on \d+ node\(s\) ?(.*?), mpi ")
_END = re.compile(r"hpcrl: ((?:saved|killed \(.*?\))(?:;|,) .*)")
_SLURM = re.compile(r"(?:slurmstepd|srun): (?:error: )?(.*(?:CANCELLED AT|oom_kill|Node failure|DUE TO).*)")
_PROGRESS = re.compile(r"(?:^|\r)[^|]* (\d+)/\d+ \| \S+ s/step \| ")


@dataclass
class BatchSlice:
    """One run of the batch script. nodes: as Slurm writes them, n[0-3]. ended: what the script printed about the end.
    last_step: the last one that a progress line reported, None without such a line."""

    job: str
    restart: int
    ranks: int
    nodes: str
    ended: str = ""
    last_step: int | None = None


def batch_slices(run: Path) -> list[BatchSlice]:
    """The slices of all output files, in the order of jobs and restarts. Files that cannot be read are skipped."""
    found: list[BatchSlice] = []
    for path in output_files(run):
        try:
            with open_file(path) as file:
                file.seek(max(os.fstat(file.fileno()).st_size - MOST_BYTES, 0))
                text = file.read(MOST_BYTES).decode("utf-8", errors="replace")
        except OSError:
            continue
        found += _slices(text)
    return sorted(found, key=lambda part: (int(re.sub(r"\D", "", part.job) or 0), part.restart))


def output_files(run: Path) -> list[Path]:
    """In the run's folder; of an element of an array, in the folder of the array, which chain.json names."""
    paths = sorted(run.glob("slurm-*.out"))
    links = read_json(run / "chain.json", {}).get("links")
    for link in links if isinstance(links, list) else []:
        try:
            elements = [Path(element).name for element in link["runs"]]
            if len(elements) > 1 and re.fullmatch(r"\w+", str(link["job"])) and run.resolve().name in elements:
                name = f"slurm-{link['job']}_{elements.index(run.resolve().name)}.out"
                paths += [path for path in (Path(link["folder"], name),) if path.is_file()]
        except (KeyError, TypeError):
            continue
    return paths


def _slices(text: str) -> Iterator[BatchSlice]:
    current: BatchSlice | None = None
    for line in text.split("\n"):
        if found := _BEGIN.search(line):
            if current is not None:
                yield current
            current = BatchSlice(found[1], int(found[2]), int(found[3]), found[4].strip())
        elif current is None:
            continue
        elif found := (_END.search(line) or _SLURM.search(line)):
            current.ended = "; ".join(filter(None, (current.ended, shorten(found[1].strip(" *"), 200))))
        elif found := _PROGRESS.search(line):
            current.last_step = int(found[1])
    if current is not None:
        yield current
