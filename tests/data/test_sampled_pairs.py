"""Pairs from scored samples."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hpcrl.data.command import pairs_of_samples
from hpcrl.data.row_file import RowFile
from hpcrl.runtime.exits import InputError


def write(path: Path, rows: list[dict]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def sample(row: int, response: str, score: float | None) -> dict:
    return {"uid": f"val.jsonl:{row}:0", "response": response, "score": score}


def test_best_and_worst_of_each_prompt(tmp_path: Path) -> None:
    data = write(tmp_path / "val.jsonl", [{"prompt": f"p{row}"} for row in range(4)])
    drawn = [(0, "a", 0.0), (0, "b", 1.0), (0, "c", 1.0), (0, "d", 0.0), (1, "e", 1.0), (1, "f", 1.0)]
    drawn += [(3, "g", 0.5), (3, "h", None), (3, "i", 0.25)]
    samples = write(tmp_path / "samples.jsonl", [sample(*one) for one in drawn])
    assert pairs_of_samples(samples, [data], tmp_path / "pairs.parquet") == (2, 3)
    assert list(RowFile(str(tmp_path / "pairs.parquet"))) == [
        {"prompt": "p0", "chosen": "b", "rejected": "a"},
        {"prompt": "p3", "chosen": "g", "rejected": "i"},
    ]


@pytest.mark.parametrize(
    ("samples", "line"),
    [
        ([sample(0, "a", 1.0), sample(0, "b", 1.0)], "all samples of each of 1 prompts have the same score"),
        ([sample(9, "a", 1.0), sample(9, "b", 0.0)], "a sample of row 9 of val.jsonl, which is not in --data"),
        ([{"uid": "val.jsonl:0:0", "response": "a"}], ":1: no score; expected scored samples"),
    ],
)
def test_samples_without_pairs(tmp_path: Path, samples: list[dict], line: str) -> None:
    data = write(tmp_path / "val.jsonl", [{"prompt": "p"}])
    with pytest.raises(InputError, match=line):
        pairs_of_samples(write(tmp_path / "samples.jsonl", samples), [data], tmp_path / "pairs.parquet")
    assert not (tmp_path / "pairs.parquet").exists()
