"""Patches of the pictures of a dataset, decoded by processes; and which pictures chosen rows have."""

from __future__ import annotations

import math
import pickle
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, ClassVar, NamedTuple, Protocol

import numpy as np

from hpcrl.batch.pictures import PictureColumn, PicturePlaces
from hpcrl.data.media import readable
from hpcrl.runtime.exits import InputError
from hpcrl.sandbox import worker
from hpcrl.sandbox.process_pool import ProcessPool
from hpcrl.sandbox.worker import Outcome, Ready, answer_in_turn, describe, use_one_thread

if TYPE_CHECKING:
    from hpcrl.data.images import ImageProcessor
    from hpcrl.data.media import Located, MediaItem
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


TIMEOUT_SECONDS = 60.0  # for a picture; then the rank decodes it


class Dataset(MediaRows, Protocol):
    """PromptDataset, and other datasets with pictures."""

    def where(self, row: int) -> str: ...
    def locate(self, row: int, index: int) -> Located: ...


@dataclass(frozen=True)
class ImageSource:
    """What a process runs: an ImageProcessor, pickled, so that only the process itself imports transformers."""

    images: bytes
    topic: ClassVar[str] = "data.image_workers"

    def serve(self, pipe: Connection, memory_limit_mb: int | None, log: str | None) -> None:
        worker.supervise(lambda: _work(pipe, self.images), log)

    def load_error(self, why: str) -> InputError:
        return InputError(f"cannot start a process that decodes pictures: {why}; set data.image_workers=0")


class ImageLoader:
    """Decodes submitted pictures in `data.image_workers` processes; with 0, `take_patches` decodes.

    Each process gets its share of a submission as one request, and works while the rank does other things.
    """

    def __init__(self, dataset: Dataset, images: ImageProcessor, num_workers: int) -> None:
        self.dataset, self._images, self._num_workers = dataset, images, num_workers
        self._requests: dict[int, list[tuple[int, int]]] = {}  # (row, index) of those under way
        self._number_of: dict[tuple[int, int], int] = {}
        self._patches: dict[tuple[int, int], np.ndarray] = {}
        source = ImageSource(pickle.dumps(images))
        self._pool = ProcessPool(source, num_workers, TIMEOUT_SECONDS) if num_workers else None

    def submit(self, pictures: Iterable[tuple[int, int]]) -> None:
        """Start to decode these pictures, (row, index) each, which `take_patches` returns once. Does not wait."""
        if self._pool is None:
            return
        known = self._number_of.keys() | self._patches.keys()
        places = [place for place in dict.fromkeys(pictures) if place not in known]
        for first in range(min(self._num_workers, len(places))):
            share = places[first :: self._num_workers]
            number = self._pool.submit({"items": [self.dataset.locate(*place) for place in share]}, weight=len(share))
            self._requests[number] = share
            self._number_of |= dict.fromkeys(share, number)

    def submit_ahead(self, pictures: Sequence[tuple[int, int]]) -> None:
        """As `submit`, for a later step. Pictures of earlier calls that nothing has taken are dropped."""
        pictures_ahead = set(pictures)
        for number, share in list(self._requests.items()):
            if pictures_ahead.isdisjoint(share):
                self._receive(number)
        self._patches = {place: patches for place, patches in self._patches.items() if place in pictures_ahead}
        self.submit(pictures)

    def load_ahead(self, rows: Sequence[int]) -> None:
        """Start to decode the pictures of these rows, which `column` will be called with."""
        self.submit_ahead(index_pictures(self.dataset, rows).sources)

    def take_patches(self, row: int, index: int) -> np.ndarray:
        """Return the patches of a picture, float32 (patches, width). Waits for those of its submission, if any."""
        number = self._number_of.get((row, index))
        if number is not None:
            self._receive(number)
        patches = self._patches.pop((row, index), None)
        if patches is None:
            with readable(self.dataset.where(row), index):
                patches = self._images.patches_of(*self.dataset.locate(row, index))
        return patches

    def load(self, pictures: Sequence[tuple[int, int]]) -> list[np.ndarray]:
        """Return the patches of these pictures, (row, index) each; the processes decode them together."""
        self.submit(pictures)
        return [self.take_patches(*picture) for picture in pictures]

    def column(self, rows: Sequence[int]) -> PictureColumn:
        """Return the pictures of these rows as patches."""
        places, sources = index_pictures(self.dataset, rows)
        return PictureColumn.of(places, self.load(sources))

    def close(self) -> None:
        """End the processes. May be called twice."""
        if self._pool is not None:
            self._pool.close()

    def _receive(self, number: int) -> None:
        assert self._pool is not None
        share, outcome = self._requests.pop(number), self._pool.take(number)
        for place in share:
            del self._number_of[place]
        if outcome.fate == "ok":  # otherwise this process decodes them, and raises what there is to raise
            self._patches |= zip(share, outcome.result, strict=True)


def _work(pipe: Connection, images: bytes) -> None:
    use_one_thread()
    try:
        processor = pickle.loads(images)
    except Exception as error:
        pipe.send(Ready(why=describe(error)))
        return
    answer_in_turn(pipe, lambda request: _answer(processor, **request))


def _answer(processor: ImageProcessor, items: list[Located]) -> Outcome:
    try:
        return Outcome("ok", [processor.patches_of(*item) for item in items])
    except Exception as error:
        return Outcome("errors", None, describe(error))
