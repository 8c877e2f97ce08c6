"""Where the pictures of chosen rows of a dataset are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

from hpcrl.batch.pictures import Picture, PicturePlaces

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
    media = [dataset.media(row) for row in rows]
    sources: dict[int, tuple[int, int]] = {}
    for row, items in zip(rows, media, strict=True):
        for index, item in enumerate(items):
            sources.setdefault(item.key, (row, index))
    places = [[(item.key, Picture(item.start, item.grid, item.interval)) for item in items] for items in media]
    return PictureIndex(PicturePlaces.of_samples(places), list(sources.values()))
