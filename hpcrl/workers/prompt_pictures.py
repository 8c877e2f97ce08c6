"""Pictures of prompts and of tools: encoded for the rollout engine, a column for roles that train, and archived."""

from __future__ import annotations

import json
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from hpcrl.algorithms.metrics import Sum
from hpcrl.batch.data_proto import DataProto
from hpcrl.batch.pictures import Picture, PictureColumn, PicturePlaces
from hpcrl.data.image_loader import ImageLoader, index_pictures
from hpcrl.data.images import ImageProcessor, Source
from hpcrl.engine.microbatch import tokens_of_towers
from hpcrl.model.vision import tower_flops
from hpcrl.observe.record.archive import ArchiveError, PictureFolder
from hpcrl.rollout.protocol import PictureEncoder, PromptPicture, Request, RolloutEngine, ToolPicture, Trajectory
from hpcrl.runtime.job import run_directory
from hpcrl.workers.response_columns import TOWER_FLOPS

if TYPE_CHECKING:
    from torch import Tensor

    from hpcrl.model.shape import ModelShape
    from hpcrl.workers.team import Team

log = logging.getLogger(__name__)


def keep_tool_pictures(folder: PictureFolder, pictures: Iterable[ToolPicture]) -> None:
    """Write the pictures; on failure, log a warning."""
    try:
        for picture in pictures:
            folder.keep(_name(picture), partial(bytes, picture.png))
    except OSError as error:
        log.warning(
            "%s: %s; pictures of tools are not kept, and the step cannot be replayed: free some space",
            *(error.filename, error.strerror or error),
        )


def tool_pictures_text(pictures: Sequence[ToolPicture]) -> str:
    """One sample's pictures as JSON: the names of their files, and their places in the sequence."""
    return json.dumps([{"name": _name(picture), **picture.place._asdict()} for picture in pictures])


def tool_pictures_of(text: str, *folders: PictureFolder) -> tuple[ToolPicture, ...]:
    """The pictures of one sample, each from the first folder that has it.

    Raises ArchiveError if none has it, or if the text is another's.
    """
    try:
        return tuple(_picture(folders, **values) for values in json.loads(text))
    except (ValueError, TypeError) as error:
        if isinstance(error, ArchiveError):
            raise
        raise ArchiveError(f"tool_pictures: found {text[:80]!r} ({error}); expected the pictures of a sample") from None


def _name(picture: ToolPicture) -> str:
    return f"{picture.key:016x}.whole.png"


def _picture(folders: Sequence[PictureFolder], name: str, **place: Any) -> ToolPicture:
    folder = next((folder for folder in folders if folder.has(name)), folders[0])
    return ToolPicture(int(name.partition(".")[0], 16), Picture.of(**place), folder.read(name))


@dataclass(eq=False)
class EncodedPictures:
    """The pictures of some samples, by key.

    samples: the pictures of each prompt. features: fp32 (tokens, width) each. patches: fp32 (patches, width) each, on
    leaders of a job that trains the tower; None: the features are the column's values. num_encoded: pictures that the
    tower has run on.
    """

    samples: Sequence[Sequence[tuple[int, Picture]]]
    features: dict[int, Tensor] = field(default_factory=dict)
    patches: dict[int, np.ndarray] | None = None
    num_encoded: int = 0

    @classmethod
    def of_requests(cls, requests: Sequence[Request]) -> EncodedPictures:
        """Those of requests that have them, with a frozen tower."""
        samples = [[(picture.key, picture.place) for picture in request.pictures] for request in requests]
        return cls(samples, {picture.key: picture.features for request in requests for picture in request.pictures})

    def added_to(self, requests: Sequence[Request]) -> list[Request]:
        """The requests of the samples, each with the pictures of its prompt."""
        return [
            replace(request, pictures=tuple(PromptPicture(key, place, self.features[key]) for key, place in sample))
            for request, sample in zip(requests, self.samples, strict=True)
        ]

    def column(self, answers: Sequence[Sequence[ToolPicture]] | None = None) -> PictureColumn:
        """The pictures for other roles: features of a frozen tower, or patches for one that is trained.

        Args:
            answers: the pictures that tools returned, of each sample.
        """
        samples = self.samples if answers is None else with_answers(self.samples, answers)
        places = PicturePlaces.of_samples(samples)
        keys = places.keys.tolist()
        if self.patches is not None:
            return PictureColumn.of(places, [self.patches[key] for key in keys])
        return PictureColumn.of(places, [self.features[key].numpy() for key in keys], are_features=True)


def with_answers(
    samples: Sequence[Sequence[tuple[int, Picture]]], answers: Sequence[Sequence[ToolPicture]]
) -> list[list[tuple[int, Picture]]]:
    """The pictures of each sample: those of its prompt, then those that tools returned."""
    pairs = zip(samples, answers, strict=True)
    return [[*sample, *((picture.key, picture.place) for picture in answer)] for sample, answer in pairs]


@dataclass(eq=False)
class PromptPictures:
    """One rank's pictures of a call of the rollout worker.

    With a frozen tower a picture's features never change: they are the column's values, so that no other role encodes
    the picture, and up to `cache_bytes` of them are kept in host memory for later steps, by content.

    shape: of a model with a vision tower. images: decodes what tools return. loaders: of each split. folder: for what
    tools return, beside the run's archive.
    """

    engine: PictureEncoder
    shape: ModelShape
    images: ImageProcessor
    cache_bytes: int
    loaders: Mapping[str, ImageLoader]
    folder: PictureFolder
    is_leader: bool = field(kw_only=True)

    def __post_init__(self) -> None:
        assert self.shape.vision is not None
        self._vision, self._is_frozen = self.shape.vision, self.shape.vision.train == "none"
        self._cache: OrderedDict[int, Tensor] = OrderedDict()  # least recently used first
        self._held = 0

    @classmethod
    def build(cls, team: Team, engine: RolloutEngine, *, is_leader: bool) -> PromptPictures | None:
        """None for a language model."""
        config, inputs = team.config, team.inputs
        if inputs.images is None:
            return None
        cache_bytes, loaders = int(config.model.vision.cache_gib * 2**30), team.image_loaders(inputs.prompts)
        folder = PictureFolder(run_directory(config) / "rollouts")
        encoder = cast(PictureEncoder, engine)
        return cls(encoder, inputs.shape, inputs.images, cache_bytes, loaders, folder, is_leader=is_leader)

    def close(self) -> None:
        """End the processes that decode."""
        for loader in self.loaders.values():
            loader.close()

    def load_ahead(self, split: str, rows: Sequence[int]) -> None:
        """Start to decode this rank's pictures of rows that `encode` will be called with."""
        loader = self.loaders[split]
        places, sources = index_pictures(loader.dataset, rows)
        missing = [number for number, key in enumerate(places.keys.tolist()) if key not in self._cache]
        own = self.engine.share(places.grids[missing])
        if self.is_leader and not self._is_frozen:  # it needs all of them for the column
            own = list(range(len(missing)))
        loader.submit_ahead([sources[missing[number]] for number in own])

    def encode(self, split: str, rows: Sequence[int], *, divided: bool = True) -> EncodedPictures:
        """Encode the pictures of these rows. Collective over the replica if `divided`: its ranks divide them."""
        loader = self.loaders[split]
        places, sources = index_pictures(loader.dataset, rows)
        keys = places.keys.tolist()
        shown = EncodedPictures(places.samples(), patches=None if self._is_frozen or not self.is_leader else {})

        def decode(numbers: Sequence[int]) -> list[np.ndarray]:
            return loader.load([sources[number] for number in numbers])

        self._add(shown, keys, places.grids, decode, divided=divided)
        return shown

    def add_answers(
        self, shown: EncodedPictures, pictures: Sequence[ToolPicture], *, divided: bool = True
    ) -> list[Tensor]:
        """Encode pictures that tools returned, and add them to `shown`. Returns the features of each. Collective as
        `encode`."""
        distinct = list({picture.key: picture for picture in pictures}.values())
        grids = np.array([picture.place.grid for picture in distinct], np.int32).reshape(-1, 3)

        def decode(numbers: Sequence[int]) -> list[np.ndarray]:
            return [self._patches_of(distinct[number]) for number in numbers]

        self._add(shown, [picture.key for picture in distinct], grids, decode, divided=divided)
        return [shown.features[picture.key] for picture in pictures]

    def drawn(
        self, shown: EncodedPictures, trajectories: Sequence[Trajectory], *, has_tools: bool, archives: bool
    ) -> DataProto:
        """The pictures of drawn responses as columns, and their counts as metrics. For leaders.

        Args:
            has_tools: add a column of what tools returned.
            archives: write that to files, for a replay.
        """
        answers = [done.pictures for done in trajectories]
        returned = [picture for answer in answers for picture in answer]
        self.add_answers(shown, returned, divided=False)  # those of recalled responses
        column = shown.column(answers)
        samples = self.work_of(column)
        if has_tools:
            samples["tool_pictures"] = np.array([tool_pictures_text(answer) for answer in answers], object)
        if archives:
            keep_tool_pictures(self.folder, returned)
        counts = {"perf/pictures": float(len(shown.features)), "perf/pictures_encoded": float(shown.num_encoded)}
        if flops := self.flops(column):
            counts[TOWER_FLOPS] = flops
        metrics = {name: Sum(count) for name, count in counts.items()}
        return DataProto({"pictures": column}, samples, {"metrics": metrics})

    def recorded(self, folder: str, samples: Mapping[str, np.ndarray]) -> DataProto:
        """The pictures of recorded samples as columns: patches, which every role encodes. Those that tools returned are
        beside the archive in `folder`, or, of samples from a checkpoint, in the run's own."""
        rows, folders = samples["row"].tolist(), (PictureFolder(folder), self.folder)
        answers = [tool_pictures_of(text, *folders) for text in samples.get("tool_pictures", ["[]"] * len(rows))]
        column = self.loaders["train"].column(rows)
        if any(answers):
            values = {key: column.values.row(number) for number, key in enumerate(column.keys.tolist())}
            values |= {picture.key: self._patches_of(picture) for answer in answers for picture in answer}
            places = PicturePlaces.of_samples(with_answers(column.samples(), answers))
            column = PictureColumn.of(places, [values[key] for key in places.keys.tolist()])
        return DataProto({"pictures": column}, self.work_of(column))

    def work_of(self, column: PictureColumn) -> dict[str, np.ndarray]:
        """The samples' column `tower_tokens`: what a trained tower's work on each is worth in tokens of the language
        model, int64 (N,). Nothing with a frozen tower."""
        return {} if self._is_frozen else {"tower_tokens": tokens_of_towers(column, self.shape)}

    def _add(
        self,
        shown: EncodedPictures,
        keys: Sequence[int],
        grids: np.ndarray,
        decode: Callable[[Sequence[int]], list[np.ndarray]],
        *,
        divided: bool,
    ) -> None:
        """Encode the pictures with these distinct keys that neither `shown` nor the cache has.

        Args:
            decode: returns the patches of pictures, given their numbers.
        """
        missing = [number for number, key in enumerate(keys) if key not in shown.features and key not in self._cache]

        def decode_missing(numbers: Sequence[int]) -> list[np.ndarray]:
            decoded = decode([missing[number] for number in numbers])
            if shown.patches is not None:
                shown.patches |= {keys[missing[at]]: patches for at, patches in zip(numbers, decoded, strict=True)}
            return decoded

        encoded: list[Tensor] = []
        if missing:
            encoded = self.engine.encode(grids[missing], decode_missing, divided=divided)
        new_features = {keys[number]: features for number, features in zip(missing, encoded, strict=True)}
        for key in keys:
            if key not in shown.features:
                shown.features[key] = new_features[key] if key in new_features else self._cache[key]
            if self._is_frozen:
                self._keep(key, shown.features[key])
        shown.num_encoded += len(missing)
        if shown.patches is not None:
            undecoded = [number for number, key in enumerate(keys) if key not in shown.patches]
            shown.patches |= {
                keys[number]: patches for number, patches in zip(undecoded, decode(undecoded), strict=True)
            }

    def _patches_of(self, picture: ToolPicture) -> np.ndarray:
        return self.images.patches_of(Source("image", picture.png), "", 0, picture.place.grid)

    def flops(self, column: PictureColumn) -> float:
        """Operations of the tower's pass over the distinct pictures of a column; 0 if it has their features."""
        return 0.0 if column.are_features else tower_flops(self._vision, column.grids.tolist())

    def _keep(self, key: int, features: Tensor) -> None:
        if key not in self._cache:
            self._held += features.nbytes
            self._cache[key] = features.clone()
        self._cache.move_to_end(key)
        while self._held > self.cache_bytes:
            self._held -= self._cache.popitem(last=False)[1].nbytes
