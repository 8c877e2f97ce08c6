"""Where the pictures of chosen rows of a dataset are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np

from hpcrl.batch.pictures import PicturePlaces
from hpcrl.batch.ragged import Ragged

if TYPE_CHECKING:
    from hpcrl.data.media import MediaItem


class MediaRows(Protocol):
    """A dataset whose rows may have pictures."""

    def media(self, row: int) -> list[MediaItem]: ...


class PictureIndex(NamedTuple):
    """places: of the pictures in the chosen rows. sources: (row, index) of each distinct picture in the dataset."""

    places: PicturePlaces
    sources: list[tuple[int, int]]


def index_pictures(dataset: MediaRows, rows: Sequence[int]) -> PictureIndex:
    """Find the pictures of these rows; equal ones in several rows are one."""
    distinct: dict[int, tuple[MediaItem, tuple[int, int]]] = {}
    numbers: dict[int, int] = {}
    media = [dataset.media(row) for row in rows]
    for row, found in zip(rows, media, strict=True):
        for index, item in enumerate(found):
            if item.key not in numbers:
                numbers[item.key] = len(numbers)
                distinct[item.key] = item, (row, index)
    items, sources = [item for item, _ in distinct.values()], [source for _, source in distinct.values()]
    places = PicturePlaces(
        Ragged.from_rows([[numbers[item.key] for item in found] for found in media], np.int64),
        Ragged.from_rows([[item.start for item in found] for found in media], np.int64),
        np.array([item.key for item in items], np.int64),
        np.array([item.grid for item in items], np.int32).reshape(-1, 3),
        np.array([item.interval for item in items], np.float32),
    )
    return PictureIndex(places, sources)
