"""Rows of a dataset's training and validation split, and pairs of answers from scored samples of a policy."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hpcrl.data.duplicates import normalised, picture_key, prompt_text
from hpcrl.data.row_file import ROWS_PER_BATCH, RowFile, read_jsonl, short_names
from hpcrl.data.source import Dropped, Row, Source
from hpcrl.rewards.registry import scorer_for
from hpcrl.runtime.exits import InputError
from hpcrl.sandbox.new_files import draft_of

if TYPE_CHECKING:
    import pyarrow


@dataclass
class Split:
    """Rows of a split as an Arrow table, a hash of each row's problem, uint64 (rows,), and counts."""

    table: pyarrow.Table
    problems: np.ndarray
    num_read: int
    dropped: Counter[str] = field(default_factory=Counter)

    def __len__(self) -> int:
        return self.table.num_rows

    def take(self, mask: np.ndarray) -> Split:
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

    def add(self, row: Row) -> None:
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
    val = train.take(held_out)
    return train.take(~held_out), Split(renamed(val.table, "val"), val.problems, 0)


def renamed(table: pyarrow.Table, split: str) -> pyarrow.Table:
    """The same rows with another `extra_info.split`."""
    import pyarrow

    rows = [row | {"extra_info": row["extra_info"] | {"split": split}} for row in table.to_pylist()]
    return pyarrow.Table.from_pylist(rows, schema=table.schema)


SAMPLE_KEYS = ("uid", "response", "score")


def best_and_worst(samples: Iterable[dict[str, Any]]) -> dict[str, tuple[str, str]]:
    """uid -> (response with the highest score, response with the lowest), the first drawn of equal ones; without the
    prompts whose scores are all equal. A sample without a score, because scoring failed, does not count."""
    best: dict[str, dict[str, Any]] = {}
    worst: dict[str, dict[str, Any]] = {}
    for sample in samples:
        uid, score = sample["uid"], sample["score"]
        if score is None:
            continue
        if uid not in best or score > best[uid]["score"]:
            best[uid] = sample
        if uid not in worst or score < worst[uid]["score"]:
            worst[uid] = sample
    return {
        uid: (best[uid]["response"], worst[uid]["response"]) for uid in best if best[uid]["score"] > worst[uid]["score"]
    }


def read_samples(path: str) -> Iterable[dict[str, Any]]:
    """The lines that `hpcrl generate` wrote."""
    for number, sample in read_jsonl(path):
        missing = [name for name in SAMPLE_KEYS if name not in sample]
        if missing:
            raise InputError(
                f"{path}:{number}: no {', '.join(missing)}; expected scored samples of `hpcrl generate`; "
                "it scores those of prompts that have a rule"
            )
        yield sample


def pairs_of_samples(samples: str, files: Sequence[str], out: Path) -> tuple[int, int]:
    """Write the rows of data files with the columns `chosen` and `rejected` from samples of their prompts.

    Returns the numbers of pairs, and of prompts with samples. Raises InputError if there is no pair.
    """
    import pyarrow
    import pyarrow.parquet

    row_files = {name: RowFile(path) for name, path in zip(short_names(files), files, strict=True)}
    uids = dict.fromkeys(str(sample["uid"]) for sample in read_samples(samples))
    pairs = best_and_worst(read_samples(samples))
    rows = []
    for uid, (chosen, rejected) in pairs.items():
        name, row, _ = uid.rsplit(":", 2)
        if name not in row_files or int(row) >= len(row_files[name]):
            raise InputError(
                f"{samples}: a sample of row {row} of {name}, which is not in --data {', '.join(files)}; "
                "name the files that were data.val_files of `hpcrl generate`, in their order"
            )
        rows.append(row_files[name][int(row)] | {"chosen": chosen, "rejected": rejected})
    if not rows:
        raise InputError(
            f"{samples}: all samples of each of {len(uids)} prompts have the same score; draw more of them (rollout.n)"
        )
    out.parent.mkdir(parents=True, exist_ok=True)
    with draft_of(out) as draft:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), draft)
    return len(rows), len(uids)
