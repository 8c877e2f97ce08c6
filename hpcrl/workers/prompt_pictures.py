"""Pictures of prompts: encoded for the rollout engine, and as a column for the roles that train."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from hpcrl.batch.pictures import PictureColumn
from hpcrl.batch.ragged import Ragged
from hpcrl.data.picture_index import PictureIndex
from hpcrl.model.vision import Picture
from hpcrl.rollout.native.engine import NativeEngine
from hpcrl.rollout.protocol import PromptPicture

if TYPE_CHECKING:
    from torch import Tensor

    from hpcrl.data.image_loader import ImageLoader
    from hpcrl.model.vision import Vision


class PromptPictures:
    """One rank's pictures of a call of the rollout worker. Every method that encodes is collective over the engine's
    tensor-parallel ranks.

    With a frozen tower a picture's features never change: they are the column's values, so that no other role encodes
    the picture, and up to `cache_bytes` of them are kept in host memory for later steps, by content.
    """

    def __init__(
        self, engine: NativeEngine, vision: Vision, cache_bytes: int, loaders: Mapping[str, ImageLoader]
    ) -> None:
        """loaders: of each split."""
        self._engine, self._cache_bytes, self._loaders = engine, cache_bytes, loaders
        self._is_frozen = vision.train == "none"
        self._cache: OrderedDict[int, Tensor] = OrderedDict()  # least recently used first
        self._held = 0
        self.num_encoded = 0  # by the replica

    def close(self) -> None:
        """End the processes that decode."""
        for loader in self._loaders.values():
            loader.close()

    def encode(self, split: str, index: PictureIndex, *, divided: bool = True) -> list[Tensor]:
        """Return the features of each distinct picture, fp32 (tokens, width). divided: over the replica's ranks."""
        keys = index.keys.tolist()
        missing = [number for number, key in enumerate(keys) if key not in self._cache]
        grids, sources, loader = index.grids[missing], [index.sources[it] for it in missing], self._loaders[split]
        encoded: list[Tensor] = []
        if missing:
            loader.submit(sources[it] for it in self._engine.share(grids, divided=divided))
            encoded = self._engine.encode(grids, lambda at: loader.take(*sources[at]), divided=divided)
        self.num_encoded += len(missing)
        found = dict(zip(missing, encoded, strict=True))
        features = [found[number] if number in found else self._cache[key] for number, key in enumerate(keys)]
        if self._is_frozen:
            for key, each in zip(keys, features, strict=True):
                self._keep(key, each)
        return features

    def column(self, index: PictureIndex, features: Sequence[Tensor]) -> PictureColumn:
        """The pictures for other roles: features of a frozen tower, or patches for one that is trained."""
        if not self._is_frozen:
            return index.pixels()
        values = Ragged.from_rows([each.flatten().numpy() for each in features], np.float32)
        return index.column(values, are_features=True)

    def of_rows(self, index: PictureIndex, features: Sequence[Tensor]) -> list[tuple[PromptPicture, ...]]:
        """The pictures of each row, for its requests."""
        return [
            tuple(
                PromptPicture(int(index.keys[item]), self._place(index, item, start), features[item])
                for item, start in zip(index.items.row(row).tolist(), index.starts.row(row).tolist(), strict=True)
            )
            for row in range(len(index.items))
        ]

    @staticmethod
    def _place(index: PictureIndex, item: int, start: int) -> Picture:
        time, height, width = index.grids[item].tolist()
        return Picture(start, (time, height, width), float(index.intervals[item]))

    def _keep(self, key: int, features: Tensor) -> None:
        if key not in self._cache:
            self._held += features.nbytes
            self._cache[key] = features.clone()
        self._cache.move_to_end(key)
        while self._held > self._cache_bytes:
            self._held -= self._cache.popitem(last=False)[1].nbytes
