"""The pictures of chosen rows of a dataset, each of them once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from hpcrl.batch.pictures import PictureColumn
from hpcrl.batch.ragged import Ragged

if TYPE_CHECKING:
    from hpcrl.data.media import MediaItem


class MediaRows(Protocol):
    """A dataset whose rows may have pictures."""

    def media(self, row: int) -> list[MediaItem]: ...

    def patches(self, row: int, index: int) -> np.ndarray: ...


@dataclass(frozen=True, eq=False)
class PictureIndex:
    """N rows with U distinct pictures; fields are those of `PictureColumn` without the contents. sources: a row and the
    number in it of each distinct picture."""

    dataset: MediaRows
    items: Ragged
    starts: Ragged
    keys: np.ndarray
    grids: np.ndarray
    intervals: np.ndarray
    sources: list[tuple[int, int]]

    @classmethod
    def of(cls, dataset: MediaRows, rows: Sequence[int]) -> PictureIndex:
        numbers: dict[int, int] = {}
        distinct: list[MediaItem] = []
        sources: list[tuple[int, int]] = []
        items, starts = [], []
        for row in rows:
            found = dataset.media(row)
            for index, item in enumerate(found):
                if item.key not in numbers:
                    numbers[item.key] = len(distinct)
                    distinct.append(item)
                    sources.append((row, index))
            items.append([numbers[item.key] for item in found])
            starts.append([item.start for item in found])
        return cls(
            dataset,
            Ragged.from_rows(items, np.int64),
            Ragged.from_rows(starts, np.int64),
            np.array([item.key for item in distinct], np.int64),
            np.array([item.grid for item in distinct], np.int32).reshape(-1, 3),
            np.array([item.interval for item in distinct], np.float32),
            sources,
        )

    def __len__(self) -> int:
        """The number of distinct pictures."""
        return len(self.keys)

    def patches(self, number: int) -> np.ndarray:
        """Decode a distinct picture: fp32 (patches, patch width)."""
        return self.dataset.patches(*self.sources[number])

    def column(self, values: Ragged, *, are_features: bool) -> PictureColumn:
        return PictureColumn(self.items, self.starts, self.keys, self.grids, self.intervals, values, are_features)

    def pixels(self) -> PictureColumn:
        """The column with the patches of all pictures."""
        found = [self.patches(number).reshape(-1) for number in range(len(self))]
        return self.column(Ragged.from_rows(found, np.float32), are_features=False)
