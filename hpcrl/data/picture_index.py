"""Pictures of chosen rows of a dataset: where they are, and the work of a tower that is trained on them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np

from hpcrl.batch.pictures import PicturePlaces

if TYPE_CHECKING:
    from hpcrl.data.media import MediaItem
    from hpcrl.model.shape import ModelShape


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
    places = PicturePlaces.of_samples([[(item.key, item.picture) for item in items] for items in media])
    return PictureIndex(places, list(sources.values()))


def tower_tokens(dataset: MediaRows, rows: np.ndarray, shape: ModelShape) -> np.ndarray:
    """Return what the work of a trained tower on the pictures of each row is worth in tokens of the language model,
    int64 (len(rows),); 0 for a frozen tower."""
    if shape.vision is None or shape.vision.train == "none":
        return np.zeros(len(rows), np.int64)
    patches = [sum(math.prod(item.grid) for item in dataset.media(row)) for row in rows.tolist()]
    return (shape.tokens_per_patch * np.array(patches, np.int64)).astype(np.int64)
