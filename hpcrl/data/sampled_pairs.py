"""Pairs of answers from scored samples of a policy, for `hpcrl preference` and `hpcrl rm`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from hpcrl.data.row_file import RowFile, read_jsonl, short_names
from hpcrl.runtime.exits import InputError
from hpcrl.sandbox.new_files import draft_of

NEEDED = ("uid", "response", "score")


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
        missing = [name for name in NEEDED if name not in sample]
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

    found = {name: RowFile(path) for name, path in zip(short_names(files), files, strict=True)}
    uids = dict.fromkeys(str(sample["uid"]) for sample in read_samples(samples))
    pairs = best_and_worst(read_samples(samples))
    rows = []
    for uid, (chosen, rejected) in pairs.items():
        name, row, _ = uid.rsplit(":", 2)
        if name not in found or int(row) >= len(found[name]):
            raise InputError(
                f"{samples}: a sample of row {row} of {name}, which is not in --data {', '.join(files)}; "
                "name the files that were data.val_files of `hpcrl generate`, in their order"
            )
        rows.append(found[name][int(row)] | {"chosen": chosen, "rejected": rejected})
    if not rows:
        raise InputError(
            f"{samples}: all samples of each of {len(uids)} prompts have the same score; draw more of them (rollout.n)"
        )
    out.parent.mkdir(parents=True, exist_ok=True)
    with draft_of(out) as draft:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), draft)
    return len(rows), len(uids)
