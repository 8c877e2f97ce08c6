"""Log-probs of a reference for a whole data set of pairs, computed once and kept in the run directory."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping
from hashlib import blake2b
from pathlib import Path

import numpy as np

from hpcrl.data.answers import CHOSEN, REJECTED, AnswerDataset

log = logging.getLogger(__name__)

FILE = "ref_logps.npz"
PAIRS_AT_ONCE = 1024


class RefLogps:
    """values: split -> float32 (number of pairs, 2), NaN where they are not computed yet. Lives on rank 0.

    The file has the values of a key, which stands for the data and the weights; those of another key are not read.
    """

    def __init__(self, path: Path, key: str, sizes: Mapping[str, int]) -> None:
        """sizes: split -> number of pairs."""
        self.path, self.key = path, key
        self.values = {split: np.full((size, 2), np.nan, np.float32) for split, size in sizes.items()}
        self._read()

    @property
    def num_missing(self) -> int:
        """Pairs whose values are not computed yet."""
        return sum(int(np.isnan(values).any(1).sum()) for values in self.values.values())

    def fill(self, compute: Callable[[str, np.ndarray], np.ndarray]) -> None:
        """Compute what is missing, and write the file, in any case with what is computed so far.

        compute(split, rows): float32 (2 * number of rows,), chosen and rejected in turn.
        """
        try:
            for split, rows in self._missing():
                self.values[split][rows] = compute(split, rows).reshape(-1, 2)
        finally:
            self._write()

    def of(self, split: str, rows: np.ndarray) -> np.ndarray:
        """Log-probs of chosen and rejected of these rows in turn, float32 (2 * number of rows,)."""
        return self.values[split][rows].reshape(-1)

    def _missing(self) -> Iterator[tuple[str, np.ndarray]]:
        """(split, rows) of what is not computed yet. Which rows come together does not depend on what is computed, so
        that an interrupted pass has the values of an uninterrupted one."""
        for split, values in self.values.items():
            for start in range(0, len(values), PAIRS_AT_ONCE):
                rows = np.arange(start, min(start + PAIRS_AT_ONCE, len(values)))
                if np.isnan(values[rows]).any():
                    yield split, rows

    def _read(self) -> None:
        try:
            with np.load(self.path, allow_pickle=False) as found:
                kept = {name: found[name] for name in found.files}
        except FileNotFoundError:
            return
        except (OSError, ValueError) as error:
            log.warning("%s cannot be read and is computed again: %s", self.path, error)
            return
        if str(kept.pop("key", "")) != self.key:
            log.info("%s is of other data or start weights", self.path)
            return
        for split, values in self.values.items():
            rows = min(len(values), len(kept.get(split, ())))
            if rows:
                values[:rows] = kept[split][:rows]

    def _write(self) -> None:
        draft = self.path.with_name(f"{self.path.name}.tmp")
        with draft.open("wb") as file:
            np.savez(file, allow_pickle=False, key=np.array(self.key), **self.values)
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, self.path)


def key_of(datasets: Mapping[str, AnswerDataset], *further: object) -> str:
    """A hash of all token ids, and of what else the values depend on."""
    digest = blake2b(repr(further).encode(), digest_size=16)
    for split, dataset in datasets.items():
        digest.update(split.encode())
        for row in range(len(dataset)):
            for ids in (dataset.prompts.prompt_ids(row), dataset.answer(row, CHOSEN), dataset.answer(row, REJECTED)):
                digest.update(len(ids).to_bytes(4, "little") + ids.tobytes())
    return digest.hexdigest()
