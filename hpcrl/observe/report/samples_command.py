"""`hpcrl samples`: the archived samples of a run, in a terminal or as JSON lines. Needs neither MPI nor torch."""

from __future__ import annotations

import json
import logging
import sys
from argparse import ArgumentTypeError, Namespace
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from hpcrl.observe.read.archive import open_archive, read_samples
from hpcrl.observe.read.runlog import step_range
from hpcrl.observe.read.samples import FOLDER, PER_TOKEN, Sample, StepArchive, recorded_steps
from hpcrl.observe.record.archive import ArchiveError, step_path
from hpcrl.observe.record.writer import json_line
from hpcrl.runtime import exits
from hpcrl.runtime.exits import ArgumentParser, InputError
from hpcrl.runtime.launcher import format_spans
from hpcrl.sandbox.foreign_files import is_folder, printable, read_bytes

if TYPE_CHECKING:
    from hpcrl.observe.report.samples_view import PromptPair

log = logging.getLogger(__name__)

DEFAULT_COUNT = 20
SMALL = 2**22  # bytes of a file


def main(arguments: Sequence[str]) -> NoReturn:
    options = _parser().parse_args(arguments)
    start_warnings()
    with exits.one_line_for_user_errors():
        show(options)
    sys.exit(exits.DONE)


def start_warnings() -> None:
    """Print warnings to stderr, as one line each; they may contain names from files of others."""

    class Formatter(logging.Formatter):
        def format(self, record: logging.LogRecord) -> str:
            return f"hpcrl: {record.levelname.lower()}: {printable(record.getMessage(), one_line=True)}"

    handler = logging.StreamHandler()
    handler.setFormatter(Formatter())
    logging.getLogger("hpcrl").handlers = [handler]


def _parser() -> ArgumentParser:
    parser = ArgumentParser(
        prog="hpcrl samples",
        description="Samples of a run, from its rollouts/: with coloured tokens in a terminal, JSON lines in a pipe.",
    )
    parser.add_argument("run", metavar="RUN", help="a run's folder, <run.dir>/<run.name>")
    parser.add_argument(
        "--step", metavar="N", help="N, A:B or all; default: the last step, of --uid all; of --diff the last common one"
    )
    which = parser.add_mutually_exclusive_group()
    counted: dict[str, Any] = {"metavar": "N", "type": _count, "nargs": "?", "const": DEFAULT_COUNT}
    which.add_argument("--worst", help=f"the N lowest scores of each step (default, with N={DEFAULT_COUNT})", **counted)
    which.add_argument("--best", help="the N highest scores of each step", **counted)
    which.add_argument("--grep", metavar="TEXT", help="samples whose prompt or response contains TEXT")
    which.add_argument("--uid", metavar="U", help="samples of a prompt: FILE:ROW:EPOCH, or FILE:ROW for all epochs")
    which.add_argument("--diff", metavar="RUN2", help="the same prompts of two runs, those first where RUN2 is worse")
    parser.add_argument("--limit", metavar="N", type=_count, help="at most N samples, or prompts of --diff")
    parser.add_argument(
        "--color", choices=("advantage", "gap", "entropy", "none"), default="advantage",
        help="what colours a token; gap: log-prob of training minus that of the rollout engine",
    )  # fmt: skip
    parser.add_argument("--full", action="store_true", help="do not cut long texts in the terminal")
    parser.add_argument("--json", action="store_true", help="JSON lines also into a terminal")
    parser.add_argument("--text", action="store_true", help="text also into a pipe; with FORCE_COLOR=1 colours, too")
    parser.add_argument("--tokens", action="store_true", help="JSON lines with the values of each token")
    return parser


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ArgumentTypeError(f"found {text!r}; expected a number of at least 1")
    return int(text)


def show(options: Namespace) -> None:
    as_json = options.json or options.tokens or not (options.text or sys.stdout.isatty())
    items: Iterable[Any] = pairs(options) if options.diff else samples(options)
    if options.limit is not None:
        items = islice(items, options.limit)
    if as_json:
        line_of = pair_line if options.diff else sample_line
        for item in items:
            sys.stdout.write(line_of(item, options.tokens))
        sys.stdout.flush()
        return
    from hpcrl.observe.report.samples_view import SamplesView

    view = SamplesView(options.color, cut=not options.full, names=(options.run, options.diff or ""))
    count = 0
    for item in items:
        (view.show_pair if options.diff else view.show)(item)
        count += 1
    if not count:
        print("no sample matches", file=sys.stderr)


def samples(options: Namespace) -> Iterator[Sample]:
    """The samples that the options select, step after step."""
    run = Path(options.run)
    steps = recorded(run)
    if options.step is None and options.uid is None:
        yield from _selected(newest(run, steps), options)
        return
    for step in chosen_steps(steps, options.step):
        if options.uid is not None and not may_have_uid(run, step, options.uid):
            continue
        archive = open_step(run, step, only=len(steps) == 1 or options.step == str(step))
        if archive is not None:
            yield from _selected(archive, options)


def recorded(run: Path) -> list[int]:
    steps = recorded_steps(run)
    if not steps:
        what = f"{run / FOLDER} has no step_*.h5" if run.is_dir() else f"{run} is no folder"
        if (run / FOLDER).is_dir() and not is_folder(run / FOLDER, run):
            what = f"{run / FOLDER} is a link that leads out of {run}"
        raise InputError(f"{what}; expected the folder of a run that has archived a step (trainer.save_rollouts)")
    return steps


def open_step(run: Path, step: int, only: bool) -> StepArchive | None:
    """The archive of a step; None, with a warning, if it is damaged. InputError if it is the only one asked for."""
    try:
        return StepArchive(run, step)
    except ArchiveError as error:
        if only:
            raise InputError(printable(str(error), one_line=True)) from None
        log.warning("skipped: %s", error)
        return None


def newest(run: Path, steps: Sequence[int]) -> StepArchive:
    """The archive of the last step that can be read."""
    for step in reversed(steps):
        if (archive := open_step(run, step, only=step == steps[0])) is not None:
            return archive
    raise AssertionError("the first step raises")


def chosen_steps(steps: Sequence[int], text: str | None) -> list[int]:
    """Recorded steps in `--step`. InputError if there is none."""
    if text is None or text == "all":
        return list(steps)
    span = step_range(text)
    if span is None:
        raise InputError(f"samples: --step {text}; expected a step, A:B, A:, :B, or all")
    chosen = [step for step in steps if (span[0] or 0) <= step <= (steps[-1] if span[1] is None else span[1])]
    if not chosen:
        raise InputError(f"samples: --step {text} is not archived; archived steps: {format_spans(list(steps))}")
    return chosen


def may_have_uid(run: Path, step: int, uid: str) -> bool:
    """Whether a step has the uid, or is damaged. Small files are searched for its bytes, because archives are not
    compressed and reading a column takes several milliseconds; of others that column is read."""
    path = step_path(run / FOLDER, step)
    try:
        if path.stat().st_size <= SMALL and uid.encode() not in read_bytes(path, run):
            with open_archive(path, run):  # OSError for a half-copied file
                return False
        uids = read_samples(path, ("uid",), run)["uid"]
    except (ArchiveError, OSError):
        return True  # `open_step` reports it
    return any(one.startswith(uid) and matches(one, uid) for one in map(str, uids.tolist()))


def matches(found: str, uid: str) -> bool:
    """Whether a sample's uid, <file>:<row>:<epoch>, is `uid`, with its epoch or without."""
    return found == uid or found.rpartition(":")[0] == uid


def _selected(archive: StepArchive, options: Namespace) -> Iterator[Sample]:
    rows: Iterable[int] = range(len(archive))
    if options.grep is not None:
        rows = (row for row in rows if options.grep in archive.response(row) or options.grep in archive.prompt(row))
    elif options.uid is not None:
        rows = [row for row in rows if matches(str(archive.columns["uid"][row]), options.uid)]
    elif len(archive):
        scores = archive.columns["score"].astype(np.float64)
        count = options.best or options.worst or DEFAULT_COUNT
        rows = np.argsort(-scores if options.best else scores, kind="stable")[:count].tolist()
    return map(archive.sample, rows)


def pairs(options: Namespace) -> Iterator[PromptPair]:
    """The prompts that both runs have in a step, those first where the second run's scores are lower."""
    from hpcrl.observe.report.samples_view import paired

    runs = [Path(options.run), Path(options.diff)]
    common = sorted(set(recorded(runs[0])) & set(recorded(runs[1])))
    if not common:
        raise InputError(f"{runs[0]} and {runs[1]} have archived no step in common; expected runs with equal steps")
    steps = common if options.step is None else chosen_steps(common, options.step)
    for step in steps if options.step is not None else reversed(steps):
        first, second = (open_step(run, step, only=len(steps) == 1) for run in runs)
        if first is None or second is None:
            continue
        common_prompts = paired(first, second)
        if (pair := next(common_prompts, None)) is None:
            log.warning("step %d: the runs have no prompt in common: other data files, or another order", step)
        else:
            yield pair
            yield from common_prompts
        if options.step is None:
            return


def sample_line(sample: Sample, with_tokens: bool) -> str:
    return _line(_plain(sample, with_tokens))


def pair_line(pair: PromptPair, with_tokens: bool) -> str:
    first, second = ([_plain(sample, with_tokens) for sample in side] for side in pair.sides)
    means = pair.mean_scores
    row: dict[str, Any] = {name: getattr(pair, name) for name in ("step", "uid", "data_source", "prompt")}
    return _line(row | {"mean_score": means[0], "mean_score_2": means[1], "samples": first, "samples_2": second})


def _line(row: dict[str, Any]) -> str:
    line = json_line(row)
    # ASCII only where it would reach a terminal: JSON does not escape all that a terminal acts on
    return json.dumps(json.loads(line)) + "\n" if sys.stdout.isatty() else line


def _plain(sample: Sample, with_tokens: bool) -> dict[str, Any]:
    names = ("step", "uid", "sample_index", "data_source", "score", "parts", "finish_reason", "length")
    row = {name: getattr(sample, name) for name in (*names, "prompt", "response")}
    if sample.turns:
        row["turns"] = [
            {
                "text": "".join(sample.token_texts[turn.start : turn.answer]),
                "reward": turn.reward,
                "answer": "".join(sample.token_texts[turn.answer : turn.end]),
            }
            for turn in sample.turns
        ]
    if with_tokens:
        row["token_texts"] = sample.token_texts
        for name in PER_TOKEN:
            values = getattr(sample, name)
            row[name] = None if values is None else values.tolist()
    return row
