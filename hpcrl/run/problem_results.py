"""Results of an evaluation for each problem and way of sampling, and their file."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np

from hpcrl.data.prompts import PromptDataset
from hpcrl.observe.read.evaluation import MOST_BYTES, Way, digest_of_bytes
from hpcrl.observe.record.writer import write_generations
from hpcrl.sandbox.foreign_files import read_bytes


class ProblemResults:
    """A row for each problem and way: `file` and `row`, `digest` of its contents, `data_source`, `way`, and of each of
    its samples `acc` (null: no `acc` of this source; a null in the list: scoring failed, which counts as 0), `reward`,
    `truncated`, `response_length` in tokens."""

    def __init__(self, prompts: PromptDataset) -> None:
        self.prompts = prompts
        self.rows: list[dict[str, Any]] = []
        self._ways = set[Way]()
        self._digest = lru_cache(maxsize=None)(self._digest_of)  # the same in each way

    def add(self, samples: Mapping[str, np.ndarray], sources: Sequence[str], way: Way) -> None:
        """Add the way's samples (n * problems), which are sorted by problem. sources: data source of each."""
        if way in self._ways:
            return
        self._ways.add(way)
        acc, cut = samples["acc"], samples["finish_reason"] == "length"
        with_acc = {source for source, value in zip(sources, acc.tolist(), strict=True) if not np.isnan(value)}
        for first in range(0, len(acc), way.n):
            own, source, row = slice(first, first + way.n), sources[first], int(samples["row"][first])
            file, number, _ = self.prompts.uid(row, 0).rsplit(":", 2)
            self.rows.append(
                {
                    "file": file,
                    "row": int(number),
                    "digest": self._digest(row, source),
                    "data_source": source,
                    "way": way._asdict(),
                    "acc": acc[own].tolist() if source in with_acc else None,
                    "reward": samples["score"][own].tolist(),
                    "truncated": cut[own].tolist(),
                    "response_length": samples["response_length"][own].tolist(),
                }
            )

    def write(self, path: Path) -> str:
        """Write the rows as JSON lines, atomically; returns the digest of the file."""
        write_generations(path, self.rows)
        return digest_of_bytes(read_bytes(path, most=MOST_BYTES))

    def _digest_of(self, row: int, source: str) -> str:
        """A digest of what is asked and how it is scored; the same in every file and for every tokenizer. Pictures are
        not part of it."""
        record = self.prompts.record(row)
        content = [source, record["prompt"], record["ground_truth"]]
        text = json.dumps(content, sort_keys=True, default=str)
        return blake2b(text.encode(), digest_size=8).hexdigest()
