"""Log files of a run: of its ranks, `logs/rank_00003.log`, and Slurm's output of each slice, `slurm-<job>.out`."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from hpcrl.sandbox.foreign_files import is_folder, open_file
from hpcrl.sandbox.new_files import read_json_or

MOST_BYTES = 16 * 2**20  # of one log that are read: its end
MOST_BYTES_IN_ALL = 128 * 2**20
LONGEST_TEXT = 2000  # characters of one line that are kept
LEVELS = ("WARNING", "ERROR", "CRITICAL")

_LINE = re.compile(r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d),\d{3} ([A-Z]+) ([^\s:]+): (.*)", re.S)
_NAME = re.compile(r"rank_(\d+)\.log")
_NUMBER = re.compile(r"0x[0-9a-fA-F]+|\d+(?:\.\d+)?(?:[eE][-+]?\d+)?")


@dataclass(frozen=True)
class LogLine:
    """time: local time of the rank's node, `2026-11-26 10:54:15`. text: with the lines that follow it, such as a
    traceback, up to LONGEST_TEXT characters of its beginning and as many of its end."""

    rank: int
    time: str
    level: str
    logger: str
    text: str


@dataclass
class WarningGroup:
    """Lines that differ in numbers only. text: the first one."""

    level: str
    logger: str
    text: str
    first: str
    last: str
    count: int = 0
    ranks: set[int] = field(default_factory=set)


def log_files(run: Path) -> dict[int, Path]:
    """Rank -> its log."""
    folder = run / "logs"
    paths = folder.glob("rank_*.log") if is_folder(folder, run) else ()
    named = ((_NAME.fullmatch(path.name), path) for path in paths)
    return dict(sorted((int(name[1]), path) for name, path in named if name))


def read_log(rank: int, path: Path, root: Path, most: int = MOST_BYTES) -> Iterator[LogLine]:
    """The lines of a log inside `root`, of its last `most` bytes. Raises OSError."""
    with open_file(path, root) as file:
        size = file.seek(0, 2)
        file.seek(max(size - most, 0))
        lines = file.read(most).decode("utf-8", errors="replace").split("\n")
    current: tuple[str, ...] | None = None
    following: list[str] = []
    for text in lines:
        found = _LINE.fullmatch(text)
        if found is None:
            following.append(text)
            continue
        if current is not None:
            yield _line(rank, current, following)
        current, following = found.groups(), []
    if current is not None:
        yield _line(rank, current, following)


def _line(rank: int, fields: tuple[str, ...], following: list[str]) -> LogLine:
    time, level, logger, text = fields
    return LogLine(rank, time, level, logger, shorten("\n".join([text, *following]).rstrip(), LONGEST_TEXT))


def shorten(text: str, most: int) -> str:
    """`text`, or its beginning and its end with a note of what is left out between them."""
    if len(text) <= 2 * most:
        return text
    return f"{text[:most]}\n[... {len(text) - 2 * most} characters left out ...]\n{text[-most:]}"


def group_warnings(lines: Iterable[LogLine]) -> list[WarningGroup]:
    """Warnings and errors that differ in numbers only, as one group each: errors first, then the most frequent."""
    groups: dict[tuple[str, str, str], WarningGroup] = {}
    for line in lines:
        if line.level not in LEVELS:
            continue
        key = line.level, line.logger, _NUMBER.sub("#", line.text.split("\n", 1)[0])
        group = groups.setdefault(key, WarningGroup(line.level, line.logger, line.text, line.time, line.time))
        group.count += 1
        group.ranks.add(line.rank)
        group.first, group.last = min(group.first, line.time), max(group.last, line.time)
    return sorted(groups.values(), key=lambda group: (group.level == "WARNING", -group.count, group.first))


MOST_OUTPUT_BYTES = 16 * 2**20  # of one file: its end

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
                file.seek(max(os.fstat(file.fileno()).st_size - MOST_OUTPUT_BYTES, 0))
                text = file.read(MOST_OUTPUT_BYTES).decode("utf-8", errors="replace")
        except OSError:
            continue
        found += _slices(text)
    return sorted(found, key=lambda part: (int(re.sub(r"\D", "", part.job) or 0), part.restart))


def output_files(run: Path) -> list[Path]:
    """In the run's folder; of an element of an array, in the folder of the array, which chain.json names."""
    paths = sorted(run.glob("slurm-*.out"))
    links = read_json_or(run / "chain.json", {}).get("links")
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
