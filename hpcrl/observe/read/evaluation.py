"""The files of an evaluation: `evaluation.json` with metrics, and beside it `evaluation.jsonl` with a line for each
problem and way of sampling."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from shlex import quote
from typing import Any, NamedTuple

from hpcrl.observe.read.runlog import RunError, read_run, with_different_names
from hpcrl.runtime.exits import InputError
from hpcrl.sandbox.foreign_files import parse_json, read_bytes, read_json

RESULT_FILE = "evaluation.json"
PROBLEMS_FILE = "evaluation.jsonl"
MOST_BYTES = 1 << 30  # of PROBLEMS_FILE
EXPECTED = "expected the folder of a run that `hpcrl evaluate` has evaluated, or its evaluation.json"


class Way(NamedTuple):
    """How responses are sampled. n: samples per problem. Greedy: temperature 0, top_k -1, top_p 1."""

    n: int
    temperature: float
    top_k: int
    top_p: float

    def __str__(self) -> str:
        more = f", top_k={self.top_k}" * (self.top_k != -1) + f", top_p={self.top_p:g}" * (self.top_p != 1)
        return f"n={self.n}, temperature={self.temperature:g}{more}"


class Problem(NamedTuple):
    """The results of one problem in one way of sampling.

    file, row: where it was. digest: of its data source, prompt and answer. variable: `acc`, or `reward` where the
    scorer has no `acc`. values: of each sample; 0 where scoring failed. lengths: response tokens. truncated: responses
    that reached the length limit.
    """

    file: str
    row: int
    digest: str
    source: str
    way: Way
    variable: str
    values: tuple[float, ...]
    lengths: tuple[int, ...]
    truncated: int


@dataclass(frozen=True)
class Evaluation:
    """name: of the run, or of the file. settings: contents of evaluation.json."""

    name: str
    path: Path
    settings: Mapping[str, Any]
    problems: Sequence[Problem]


def read_evaluations(paths: Sequence[str | os.PathLike[str]]) -> list[Evaluation]:
    """Read several evaluations; those of the same name are named by their paths."""
    return with_different_names(paths, [read_evaluation(path) for path in paths])


def read_evaluation(path: str | os.PathLike[str]) -> Evaluation:
    """Read the evaluation of a run's folder, or one of its two files. Raises InputError, one line."""
    place = Path(path)
    if not place.exists():
        raise InputError(f"{path}: no such run or file; {EXPECTED}")
    if place.is_dir():
        summary = place / RESULT_FILE
        if not summary.exists():
            raise InputError(_without_evaluation(place))
    elif place.suffix not in (".json", ".jsonl"):
        raise InputError(f"{path} is no evaluation; {EXPECTED}; a template is evaluated without --compare")
    else:
        summary = place.with_suffix(".json")
    lines = summary.with_suffix(".jsonl")
    try:
        settings = read_json(summary)
        if not lines.exists():
            raise InputError(
                f"{summary} has no {lines.name} with the results of each problem beside it; "
                f"{how_to_evaluate(summary.parent)}"
            )
        content = read_bytes(lines, most=MOST_BYTES)
    except (OSError, ValueError) as error:
        raise InputError(f"{summary}: not readable ({error}); {EXPECTED}") from None
    if not isinstance(settings, dict) or "metrics" not in settings:
        raise InputError(f"{summary} is no result of `hpcrl evaluate`; {EXPECTED}")
    if settings.get("problems_digest") != digest_of_bytes(content):
        raise InputError(
            f"{lines} is not of the same evaluation as {summary.name}: one of them was replaced or changed; "
            f"{how_to_evaluate(summary.parent)}"
        )
    problems = list(_problems(lines, content))
    own = summary.name == RESULT_FILE
    return Evaluation(summary.resolve().parent.name if own else summary.stem, summary, settings, problems)


def digest_of_bytes(content: bytes) -> str:
    return blake2b(content, digest_size=16).hexdigest()


def how_to_evaluate(run: Path) -> str:
    """What to do about a missing evaluation."""
    config = run / "config.yaml"
    if not config.exists():
        return "evaluate again"
    return f"make it with: hpcrl evaluate {quote(str(config))} model.init_from={quote(str(run))}"


def _without_evaluation(run: Path) -> str:
    try:
        tags = read_run(run).tags()
    except RunError:
        return f"{run} has no {RESULT_FILE}; {EXPECTED}"
    losses = [tag for tag in ("val/loss", "val/perplexity") if tag in tags]
    why = f"{' and '.join(losses)} depend on the tokenizer and are not compared, scores are; " if losses else ""
    return f"{run} has no {RESULT_FILE}; {why}{how_to_evaluate(run)}"


def _problems(path: Path, content: bytes) -> Iterator[Problem]:
    seen = set()
    for number, line in enumerate(content.splitlines(), 1):
        try:
            entry = _problem(parse_json(line))
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise InputError(f"{path}, line {number}: not the results of a problem ({error}); evaluate again") from None
        key = (entry.file, entry.row, entry.way)
        if key in seen:
            raise InputError(f"{path}, line {number}: row {entry.row} of {entry.file} is there twice; evaluate again")
        seen.add(key)
        yield entry
    if not seen:
        raise InputError(f"{path} holds no problem; evaluate again")


def _problem(line: dict[str, Any]) -> Problem:
    n, temperature, top_k, top_p = (line["way"][name] for name in Way._fields)
    way = Way(int(n), float(temperature), int(top_k), float(top_p))
    variable = "acc" if line["acc"] is not None else "reward"
    values = tuple(0.0 if value is None else float(value) for value in line[variable])
    lengths, truncated = tuple(int(length) for length in line["response_length"]), line["truncated"]
    if not (way.n == len(values) == len(lengths) == len(truncated) >= 1) or not all(map(math.isfinite, values)):
        raise ValueError(f"expected {way.n} samples with finite values")
    where = str(line["file"]), int(line["row"]), str(line["digest"]), str(line["data_source"])
    return Problem(*where, way, variable, values, lengths, sum(bool(cut) for cut in truncated))
