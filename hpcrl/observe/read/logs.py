"""Log files of a run: of its ranks, `logs/rank_00003.log`, Slurm's output of each slice, `slurm-<job>.out`, and slow
ranks, `stragglers.jsonl`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from hpcrl.sandbox.foreign_files import is_folder, parse_json, read_end, read_text
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
    count: int = 0
    ranks: set[int] = field(default_factory=set)
    first: str = ""
    last: str = ""

    @property
    def is_own(self) -> bool:
        """Whether hpcrl wrote it, not a library."""
        return self.logger.split(".")[0] == "hpcrl"


def log_files(run: Path) -> dict[int, Path]:
    """Rank -> its log."""
    folder = run / "logs"
    paths = folder.glob("rank_*.log") if is_folder(folder, run) else ()
    named = ((_NAME.fullmatch(path.name), path) for path in paths)
    return dict(sorted((int(name[1]), path) for name, path in named if name))


def read_log(rank: int, path: Path, root: Path, most: int = MOST_BYTES) -> Iterator[LogLine]:
    """The lines of a log inside `root`, of its last `most` bytes. Raises OSError."""
    entries: list[list[str]] = []  # time, level, logger, and the lines of the text
    for text in read_end(path, most, root).split("\n"):
        if found := _LINE.fullmatch(text):
            entries.append(list(found.groups()))
        elif entries:
            entries[-1].append(text)
    for time, level, logger, *texts in entries:
        yield LogLine(rank, time, level, logger, shorten("\n".join(texts).rstrip(), LONGEST_TEXT))


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
        group = groups.setdefault(key, WarningGroup(line.level, line.logger, line.text, first=line.time))
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
            found += _slices(read_end(path, MOST_OUTPUT_BYTES))
        except OSError:
            continue
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


def _slices(text: str) -> list[BatchSlice]:
    slices: list[BatchSlice] = []
    for line in text.split("\n"):
        if found := _BEGIN.search(line):
            slices.append(BatchSlice(found[1], int(found[2]), int(found[3]), found[4].strip()))
        elif not slices:
            continue
        elif found := (_END.search(line) or _SLURM.search(line)):
            slices[-1].ended = "; ".join(filter(None, (slices[-1].ended, shorten(found[1].strip(" *"), 200))))
        elif found := _PROGRESS.search(line):
            slices[-1].last_step = int(found[1])
    return slices


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
