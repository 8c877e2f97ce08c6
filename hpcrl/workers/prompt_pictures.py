"""Pictures of prompts: encoded for the rollout engine, and as a column for the roles that train."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from hpcrl.batch.pictures import PictureColumn, PicturePlaces
from hpcrl.data.picture_index import index_pictures
from hpcrl.model.sizes import tower_flops
from hpcrl.rollout.native.engine import NativeEngine
from hpcrl.rollout.protocol import PromptPicture

if TYPE_CHECKING:
    from torch import Tensor

    from hpcrl.data.image_loader import ImageLoader
    from hpcrl.model.vision import Vision


@dataclass(frozen=True, eq=False)
class EncodedPictures:
    """The distinct pictures of rows. features: fp32 (tokens, width) of each. patches: of each, on leaders of a job that
    trains the tower; None: the features are the column's values. num_encoded: pictures that the tower has run on."""

    places: PicturePlaces
    features: Sequence[Tensor]
    patches: Sequence[np.ndarray] | None = None
    num_encoded: int = 0

    def of_rows(self) -> list[tuple[PromptPicture, ...]]:
        """The pictures of each row, for its requests."""
        keys = self.places.keys.tolist()
        return [
            tuple(PromptPicture(keys[item], picture, self.features[item]) for item, picture in self.places.of_row(row))
            for row in range(len(self.places))
        ]

    def column(self) -> PictureColumn:
        """The pictures for other roles: features of a frozen tower, or patches for one that is trained."""
        if self.patches is not None:
            return PictureColumn.of(self.places, self.patches)
        return PictureColumn.of(self.places, [each.numpy() for each in self.features], are_features=True)


class PromptPictures:
    """One rank's pictures of a call of the rollout worker.

    With a frozen tower a picture's features never change: they are the column's values, so that no other role encodes
    the picture, and up to `cache_bytes` of them are kept in host memory for later steps, by content.
    """

    def __init__(
        self,
        engine: NativeEngine,
        vision: Vision,
        cache_bytes: int,
        loaders: Mapping[str, ImageLoader],
        *,
        is_leader: bool,
    ) -> None:
        """loaders: of each split."""
        self._engine, self._cache_bytes, self._loaders = engine, cache_bytes, loaders
        self._vision, self._is_frozen, self._is_leader = vision, vision.train == "none", is_leader
        self._cache: OrderedDict[int, Tensor] = OrderedDict()  # least recently used first
        self._held = 0

    def close(self) -> None:
        """End the processes that decode."""
        for loader in self._loaders.values():
            loader.close()

    def encode(self, split: str, rows: Sequence[int], *, divided: bool = True) -> EncodedPictures:
        """Encode the pictures of these rows. Collective over the replica if `divided`: its ranks divide them."""
        loader = self._loaders[split]
        places, sources = index_pictures(loader.dataset, rows)
        keys = places.keys.tolist()
        missing = [number for number, key in enumerate(keys) if key not in self._cache]
        decoded: dict[int, np.ndarray] = {}

        def decode(numbers: Sequence[int]) -> list[np.ndarray]:
            """Patches of distinct pictures, which a leader keeps for the column."""
            found = loader.load([sources[number] for number in numbers])
            if not self._is_frozen and self._is_leader:
                decoded.update(zip(numbers, found, strict=True))
            return found

        encoded: list[Tensor] = []
        if missing:
            own = places.grids[missing]
            encoded = self._engine.encode(own, lambda at: decode([missing[it] for it in at]), divided=divided)
        found = dict(zip(missing, encoded, strict=True))
        features = [found[number] if number in found else self._cache[key] for number, key in enumerate(keys)]
        if self._is_frozen:
            for key, each in zip(keys, features, strict=True):
                self._keep(key, each)
        patches = None
        if not self._is_frozen and self._is_leader:
            decode([number for number in range(len(keys)) if number not in decoded])
            patches = [decoded[number] for number in range(len(keys))]
        return EncodedPictures(places, features, patches, len(missing))

    def pixels(self, split: str, rows: Sequence[int]) -> PictureColumn:
        """The pictures of these rows as patches, which every role encodes."""
        return self._loaders[split].column(rows)

    def of_requests(self, split: str, rows: Sequence[int], pictures: Sequence[PromptPicture]) -> EncodedPictures:
        """As `encode`, of rows whose pictures are given; with a frozen tower."""
        places = index_pictures(self._loaders[split].dataset, rows).places
        features = {picture.key: picture.features for picture in pictures}
        return EncodedPictures(places, [features[key] for key in places.keys.tolist()])

    def flops(self, pictures: EncodedPictures) -> float:
        """Operations of a pass of the tower over the distinct pictures."""
        return tower_flops(self._vision, pictures.places.grids.tolist())

    def _keep(self, key: int, features: Tensor) -> None:
        if key not in self._cache:
            self._held += features.nbytes
            self._cache[key] = features.clone()
        self._cache.move_to_end(key)
        while self._held > self._cache_bytes:
            self._held -= self._cache.popitem(last=False)[1].nbytes
