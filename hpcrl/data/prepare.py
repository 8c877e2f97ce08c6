"""Rows of a dataset -> train.parquet and val.parquet in verl's schema, and dataset.json, which says what is in them.

The same files, options and version of pyarrow make the same bytes.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpcrl.data.duplicates import (
    COMMON_COUNT,
    COMMON_SHARE,
    NUM_WORDS,
    Duplicates,
    equal_problems,
    find_duplicates,
    prompt_text,
)
from hpcrl.data.source import Dropped, FileSource, Source, SyntheticSource, files_summary, find_files, read_rows, sha256
from hpcrl.data.split import RowCollector, Split, hold_out
from hpcrl.runtime.exits import InputError
from hpcrl.sandbox.foreign_files import writable
from hpcrl.sandbox.new_files import draft_of

SPLITS = ("train", "val")
DESCRIPTION = "dataset.json"
HELD_OUT_SHARE, MAX_HELD_OUT = 20, 1000  # one row in so many, at most so many rows
MAX_USELESS_DRAWS = 10_000  # one after the other
ROWS_WITH_PICTURES = 100  # of a row group, because a job reads whole ones


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
    threshold: of near duplicates; None for a source with problems.

    Raises InputError for missing or malformed files, and if no row of a file can be used.
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
                rows.add(converted)
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
                collector.add(row)
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
        train = train.take(~duplicates.train)
    return Dataset({"train": train, "val": val}, duplicates, examples, inputs, held_out)


def near_duplicates(threshold: float) -> dict[str, Any]:
    """What a near duplicate is, for dataset.json."""
    common = {"more_prompts_than": COMMON_COUNT, "larger_share_than": COMMON_SHARE}
    return {"words_per_shingle": NUM_WORDS, "jaccard_threshold": threshold, "common_shingles": common}


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
