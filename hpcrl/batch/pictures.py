"""The pictures of samples: where they are among the tokens, and their contents, each of them once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from hpcrl.batch.ragged import Ragged, Rows, row_index


class Picture(NamedTuple):
    """A picture, or a video, in a sequence.

    start: place of its first placeholder token. grid: patches in time, height and width. interval: positions between
    two steps in time.
    """

    start: int
    grid: tuple[int, int, int]
    interval: float = 1.0

    @classmethod
    def of(cls, start: int, grid: Sequence[int], interval: float) -> Picture:
        """From numbers of an array or a file."""
        time, height, width = grid
        return cls(int(start), (int(time), int(height), int(width)), float(interval))


@dataclass(frozen=True, eq=False)
class PicturePlaces:
    """The places of pictures in N samples; U of the pictures are distinct.

    items: int64, N rows; for each picture of a sample its number among the distinct ones. starts: int64, rows of the
    same lengths; the place of its first placeholder token in the sequence. keys: int64 (U,), hashes of the contents.
    grids: int32 (U, 3), patches in time, height and width. intervals: fp32 (U,), positions between two steps in time.
    """

    items: Ragged
    starts: Ragged
    keys: np.ndarray
    grids: np.ndarray
    intervals: np.ndarray

    @staticmethod
    def of_samples(samples: Sequence[Sequence[tuple[int, Picture]]]) -> PicturePlaces:
        """Return the places of the pictures of samples. Equal keys are one picture; the distinct ones are in the order
        in which they come first.

        Args:
            samples: the key and the place of each picture of each sample.
        """
        distinct: dict[int, Picture] = {}
        for sample in samples:
            for key, picture in sample:
                distinct.setdefault(key, picture)
        number_of = {key: number for number, key in enumerate(distinct)}
        return PicturePlaces(
            Ragged.from_rows([[number_of[key] for key, _ in sample] for sample in samples], np.int64),
            Ragged.from_rows([[picture.start for _, picture in sample] for sample in samples], np.int64),
            np.array(list(distinct), np.int64),
            np.array([picture.grid for picture in distinct.values()], np.int32).reshape(-1, 3),
            np.array([picture.interval for picture in distinct.values()], np.float32),
        )

    def __len__(self) -> int:
        return len(self.items)

    def of_row(self, row: int) -> list[tuple[int, Picture]]:
        """Return the pictures of a sample, in order, each with its number among the distinct ones."""
        pairs = zip(self.items.row(row).tolist(), self.starts.row(row).tolist(), strict=True)
        return [(item, Picture.of(start, self.grids[item], self.intervals[item])) for item, start in pairs]

    def samples(self) -> list[list[tuple[int, Picture]]]:
        """Return what `of_samples` makes these places from."""
        keys = self.keys.tolist()
        return [[(keys[item], picture) for item, picture in self.of_row(row)] for row in range(len(self))]


@dataclass(frozen=True, eq=False)
class PictureColumn(PicturePlaces):
    """A column with the pictures of N samples.

    values: fp32, U rows; the patches of each picture, or with `are_features` what the vision tower made of them.
    """

    values: Ragged
    are_features: bool = False

    @classmethod
    def of(cls, places: PicturePlaces, values: Sequence[np.ndarray], *, are_features: bool = False) -> PictureColumn:
        """Return the column of the pictures at `places`.

        Args:
            values: an array for each distinct picture, of any shape.
        """
        rows = Ragged.from_rows([each.reshape(-1) for each in values], np.float32)
        return cls(**vars(places), values=rows, are_features=are_features)

    def take(self, rows: Rows) -> PictureColumn:
        """The given samples in the given order, repeats allowed, with their pictures only."""
        index = row_index(rows)
        items, starts = self.items.take(index), self.starts.take(index)
        used, numbers = np.unique(items.values, return_inverse=True)
        if len(used) == len(self.keys):
            return replace(self, items=items, starts=starts)
        return replace(
            self,
            items=Ragged.from_lengths(numbers.astype(np.int64), items.lengths),
            starts=starts,
            keys=self.keys[used],
            grids=self.grids[used],
            intervals=self.intervals[used],
            values=self.values.take(used),
        )

    @classmethod
    def concat(cls, parts: Sequence[PictureColumn]) -> PictureColumn:
        """The samples of all parts, in order; equal pictures of several parts are joined."""
        keys = np.concatenate([part.keys for part in parts])
        _, firsts, numbers = np.unique(keys, return_index=True, return_inverse=True)
        bounds = np.cumsum([0, *(len(part.keys) for part in parts)])
        items = [
            numbers[start:][part.items.values] if len(part.items.values) else part.items.values
            for part, start in zip(parts, bounds, strict=False)
        ]
        lengths = np.concatenate([part.items.lengths for part in parts])
        return cls(
            items=Ragged.from_lengths(np.concatenate(items).astype(np.int64), lengths),
            starts=Ragged.concat([part.starts for part in parts]),
            keys=keys[firsts],
            grids=np.concatenate([part.grids for part in parts])[firsts],
            intervals=np.concatenate([part.intervals for part in parts])[firsts],
            values=Ragged.concat([part.values for part in parts]).take(firsts),
            are_features=parts[0].are_features,
        )

    def equal(self, other: object) -> bool:
        """Whether `other` has the same pictures in the same samples, bit for bit."""
        if not isinstance(other, PictureColumn) or self.are_features != other.are_features:
            return False
        mine, theirs = (column.take(np.arange(len(column))) for column in (self, other))
        return (
            np.array_equal(mine.keys[mine.items.values], theirs.keys[theirs.items.values])
            and mine.starts.equal(theirs.starts)
            and mine.values.take(mine.items.values).equal(theirs.values.take(theirs.items.values))
        )
