"""Rows of a dataset -> train.parquet and val.parquet in verl's schema, and dataset.json, which says what is in them.

The same files, options and version of pyarrow make the same bytes.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hpcrl.data.duplicates import (
    Duplicates,
    equal_problems,
    find_duplicates,
    near_duplicates,
    normalised,
    picture_key,
    prompt_text,
)
from hpcrl.data.row_file import ROWS_PER_BATCH
from hpcrl.data.source import (
    Dropped,
    FileSource,
    Row,
    Source,
    SyntheticSource,
    files_summary,
    find_files,
    read_rows,
    sha256,
)
from hpcrl.rewards.registry import scorer_for
from hpcrl.runtime.exits import InputError
from hpcrl.sandbox.foreign_files import writable
from hpcrl.sandbox.new_files import draft_of

if TYPE_CHECKING:
    import pyarrow

SPLITS = ("train", "val")
DESCRIPTION = "dataset.json"
HELD_OUT_SHARE, MAX_HELD_OUT = 20, 1000  # one row in so many, at most so many rows
MAX_USELESS_DRAWS = 10_000  # one after the other
ROWS_WITH_PICTURES = 100  # of a row group, because a job reads whole ones


@dataclass
class Split:
    """Rows of a split as an Arrow table, a hash of each row's problem, uint64 (rows,), and counts."""

    table: pyarrow.Table
    problems: np.ndarray
    num_read: int
    dropped: Counter[str] = field(default_factory=Counter)

    def __len__(self) -> int:
        return self.table.num_rows

    def filtered(self, mask: np.ndarray) -> Split:
        """The rows where `mask`, bool (rows,), is true, with the same counts."""
        return Split(self.table.filter(mask), self.problems[mask], self.num_read, self.dropped)

    def prompts(self) -> Iterator[str]:
        for batch in self.table.select(["prompt"]).to_batches(ROWS_PER_BATCH):
            yield from (prompt_text(row["prompt"]) for row in batch.to_pylist())

    def pictures(self) -> list[str]:
        """`picture_key` of each row."""
        if "images" not in self.table.column_names:
            return [""] * len(self)
        return [picture_key(images.as_py()) for images in self.table["images"]]


class RowCollector:
    """Collects rows in batches, which become Arrow tables, and counts those that cannot be used."""

    def __init__(self, source: Source, split: str, seed: int) -> None:
        self._source, self._split, self._seed = source, split, seed
        self._rows: list[Row] = []
        self._tables: list[pyarrow.Table] = []
        self._problems: list[int] = []
        self._truths: dict[bytes, bytes] = {}
        self.num_read = 0
        self.dropped: Counter[str] = Counter()

    def problem(self, row: Row) -> int:
        """A hash of the row's problem and the seed, below 2^64."""
        identify = self._source.problem
        if identify is None:
            text = normalised(prompt_text(row["prompt"])) + picture_key(row.get("images"))
        else:
            text = identify(row)
        hashed = hashlib.blake2b(text.encode(), digest_size=8, key=str(self._seed).encode())
        return int.from_bytes(hashed.digest(), "big")

    def add_row(self, row: Row) -> None:
        """Add a row with its split, and its number among the rows that were read. Raises Dropped for a repeated row."""
        self._require_new(row)
        require_right_answer(row)
        row["extra_info"] = {"split": self._split, "index": self.num_read, **row["extra_info"]}
        self._problems.append(self.problem(row))
        self._rows.append(row)
        if len(self._rows) == ROWS_PER_BATCH:
            self._flush()

    def _require_new(self, row: Row) -> None:
        """An SFT or a preference row is its prompt, pictures and answers; another row is its prompt and pictures, with
        its problem where the dataset names one."""
        answers = map(row.get, ("answer", "messages", "chosen", "rejected"))
        problem = self._source.problem(row) if self._source.problem is not None else None
        identity = digest([row["prompt"], picture_key(row.get("images")), *answers, problem])
        truth = digest(row["reward_model"])
        if identity in self._truths:
            same = self._truths[identity] == truth
            raise Dropped("repeats a row" if same else "repeats a prompt with another ground truth")
        self._truths[identity] = truth

    def _flush(self) -> None:
        import pyarrow

        schema = self._tables[0].schema if self._tables else None
        self._tables.append(pyarrow.Table.from_pylist(self._rows, schema=schema))
        self._rows = []

    def split(self) -> Split:
        import pyarrow

        if self._rows:
            self._flush()
        problems = np.array(self._problems, dtype=np.uint64)
        return Split(pyarrow.concat_tables(self._tables), problems, self.num_read, self.dropped)


def digest(part: Any) -> bytes:
    """A hash of JSON. Raises Dropped for text that no Parquet file can have: half of a surrogate pair."""
    try:
        return hashlib.blake2b(json.dumps(part, ensure_ascii=False).encode(), digest_size=16).digest()
    except UnicodeEncodeError:
        raise Dropped("text that is not Unicode") from None


def require_right_answer(row: Row) -> None:
    """Raises Dropped if the rule for the row's data source does not give its own answer the full score."""
    if row.get("answer") is None or row["reward_model"]["style"] != "rule":
        return
    data_source, truth = row["data_source"], row["reward_model"]["ground_truth"]
    given = {"extra_info": row["extra_info"], "sandbox": "none"}  # the answer is no model's
    try:
        result = scorer_for(data_source)(data_source, row["answer"], truth, **given)
    except ValueError:
        raise Dropped("a ground truth that its rule cannot use") from None
    if (result["score"] if isinstance(result, dict) else result) != 1:
        raise Dropped("its own answer does not score 1")


def hold_out(train: Split, val_rows: int) -> tuple[Split, Split]:
    """Hold out at least `val_rows` of the training rows: all rows of the problems with the smallest hashes.

    Returns the other rows and the held-out ones. Raises InputError if there are not so many rows.
    """
    problems, counts = np.unique(train.problems, return_counts=True)
    last = int(np.searchsorted(np.cumsum(counts), val_rows))
    if last + 1 >= len(problems):
        raise InputError(
            f"--val-rows {val_rows}: there are {len(train)} rows of {len(problems)} problems; hold out fewer"
        )
    held_out = train.problems <= problems[last]
    val = train.filtered(held_out)
    return train.filtered(~held_out), Split(renamed(val.table, "val"), val.problems, 0)


def renamed(table: pyarrow.Table, split: str) -> pyarrow.Table:
    """The same rows with another `extra_info.split`."""
    import pyarrow

    rows = [row | {"extra_info": row["extra_info"] | {"split": split}} for row in table.to_pylist()]
    return pyarrow.Table.from_pylist(rows, schema=table.schema)


@dataclass(frozen=True)
class Dataset:
    """What is written: splits, the duplicates between them before any were dropped, and what dataset.json says."""

    splits: dict[str, Split]
    duplicates: Duplicates
    examples: list[dict[str, Any]]
    inputs: dict[str, Any]
    held_out: bool


def prepare_files(
    name: str,
    source: FileSource,
    folder: Path,
    out: Path,
    *,
    seed: int,
    val_rows: int | None,
    drop_duplicates: bool,
    threshold: float | None,
) -> Dataset:
    """Read the files below `folder`. Where there are none for validation, hold out `val_rows` of the training rows
    (None: one in HELD_OUT_SHARE, at most MAX_HELD_OUT) by a hash of the problem and the seed.

    Raises InputError for missing or malformed files, and if no row of a file can be used.

    Args:
        threshold: similarity from which rows are near duplicates; None for a source with problems.
    """
    if folder.resolve() == out.resolve():
        raise InputError(f"--out {out} is the folder of --from, too; use another one")
    train_files, val_files = find_files(name, source.files, folder, out)
    if val_files and val_rows is not None:
        raise InputError(f"--val-rows {val_rows}: {val_files[0]} has the validation rows of {name}; leave it out")
    train = convert_files(source, "train", train_files, seed, out)
    inputs = {"train": files_summary(train_files, folder)}
    if val_files:
        val = convert_files(source, "val", val_files, seed, out)
        inputs["val"] = files_summary(val_files, folder)
    else:
        num_held_out = min(max(len(train) // HELD_OUT_SHARE, 1), MAX_HELD_OUT) if val_rows is None else val_rows
        train, val = hold_out(train, num_held_out)
    return compared(train, val, inputs, not val_files, drop_duplicates, threshold)


def convert_files(source: FileSource, split: str, paths: Sequence[Path], seed: int, out: Path) -> Split:
    rows = RowCollector(source, split, seed)
    for path in paths:
        for where, row in read_rows(path):
            try:
                converted = source.convert(row)
                if source.stage is not None:
                    source.stage(converted, path.parent, out)
                rows.add_row(converted)
            except Dropped as reason:
                rows.dropped[str(reason)] += 1
            except InputError as error:
                raise InputError(f"{where}: {error}") from None
            rows.num_read += 1
    if rows.dropped.total() == rows.num_read:
        reasons = "; ".join(f"{reason} ({count})" for reason, count in rows.dropped.most_common())
        raise InputError(f"{paths[0]}: none of {rows.num_read} rows can be used: {reasons or 'no rows'}")
    return rows.split()


def draw_rows(source: SyntheticSource, *, rows: int, val_rows: int, seed: int) -> Dataset:
    """Draw rows with different problems: first those for validation, so that they do not depend on `rows`.

    Raises InputError if there are not so many different ones that can be used.
    """
    rng = random.Random(seed)
    splits, problems = {}, set[int]()
    for split, count in (("val", val_rows), ("train", rows)):
        collector = RowCollector(source, split, seed)
        num_useless = 0
        while collector.num_read - collector.dropped.total() < count:
            if num_useless == MAX_USELESS_DRAWS:
                reasons = "".join(f"; {reason} ({number})" for reason, number in collector.dropped.most_common())
                raise InputError(f"--rows {rows}: found {len(problems)} different problems; draw fewer{reasons}")
            num_useless += 1
            try:
                row = source.draw(rng)
                problem = collector.problem(row)
                if problem in problems:
                    continue
                collector.add_row(row)
                problems.add(problem)
                num_useless = 0
            except Dropped as reason:
                collector.dropped[str(reason)] += 1
            collector.num_read += 1
        splits[split] = collector.split()
    return compared(splits["train"], splits["val"], {}, False, False, None)


def compared(
    train: Split, val: Split, inputs: dict[str, Any], held_out: bool, drop_duplicates: bool, threshold: float | None
) -> Dataset:
    if threshold is None:
        duplicates = equal_problems(train.problems, val.problems)
    else:
        pictures = train.pictures(), val.pictures()
        duplicates = find_duplicates(train.prompts(), val.prompts(), threshold, pictures)
    examples = [
        {
            "similarity": round(example.similarity, 3),
            "train": prompt_text(train.table["prompt"][example.train_row].as_py()),
            "val": prompt_text(val.table["prompt"][example.val_row].as_py()),
        }
        for example in duplicates.examples
    ]
    if drop_duplicates and duplicates.train.any():
        train.dropped["is a duplicate of a validation prompt"] += int(duplicates.train.sum())
        if duplicates.train.all():
            raise InputError("--drop-duplicates: every training prompt is in the validation data, too; nothing is left")
        train = train.filtered(~duplicates.train)
    return Dataset({"train": train, "val": val}, duplicates, examples, inputs, held_out)


def write(
    name: str, source: Source, dataset: Dataset, out: Path, *, seed: int, threshold: float | None
) -> dict[str, Any]:
    """Write the three files, dataset.json last, and return what it says.

    Raises InputError if `out` has a train.parquet or val.parquet that does not come from this command.
    """
    import pyarrow
    import pyarrow.parquet

    for split in SPLITS:
        path = out / f"{split}.parquet"
        if path.exists() and not (out / DESCRIPTION).exists():
            raise InputError(f"--out {out}: {path} exists without {DESCRIPTION}; use another folder")
    out.mkdir(parents=True, exist_ok=True)
    described = {}
    for split, rows in dataset.splits.items():
        path = out / f"{split}.parquet"
        large = "images" in rows.table.column_names
        with draft_of(path) as draft:
            pyarrow.parquet.write_table(rows.table, draft, row_group_size=ROWS_WITH_PICTURES if large else None)
        described[split] = {
            "file": path.name,
            "rows": len(rows),
            "read": rows.num_read,
            "dropped": dict(sorted(rows.dropped.items())),
            "sha256": sha256(path),
        }
    description = {
        "name": name,
        "template": source.template,
        "seed": seed,
        "pyarrow": pyarrow.__version__,
        **({"drawn_from": source.drawn_from} if isinstance(source, SyntheticSource) and source.drawn_from else {}),
        "inputs": dataset.inputs,
        "val_is_held_out_of_train": dataset.held_out,
        "splits": described,
        "duplicates": {
            "compared": "problems" if threshold is None else "prompts",
            **({} if threshold is None else near_duplicates(threshold)),
            "train_rows": dataset.duplicates.counts("train"),
            "val_rows": dataset.duplicates.counts("val"),
            "examples": dataset.examples,
        },
    }
    text = writable(json.dumps(description, indent=1, ensure_ascii=False)) + "\n"
    with draft_of(out / DESCRIPTION) as draft:
        draft.write_text(text, encoding="utf-8")
    return description
