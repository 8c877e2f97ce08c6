"""Pictures and videos as patches, by the model directory's own image processor. transformers is imported on use."""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from hpcrl.data.pictures import BadImage, Video, as_png, frame_limits, limits_of, open_picture, video_of
from hpcrl.data.tokenizer import own_code
from hpcrl.model.vision import Vision
from hpcrl.runtime.exits import InputError
from hpcrl.sandbox.foreign_files import check_folder, read_json

if TYPE_CHECKING:
    from PIL import Image

    from hpcrl.config.schema import DataConfig

Grid = tuple[int, int, int]
Kind = Literal["image", "video"]
FILE = "preprocessor_config.json"
THUMBNAIL = 96


class Source(NamedTuple):
    """A picture or a video as it is in a data file."""

    kind: Kind
    value: Any


class Entry(NamedTuple):
    """What the tokens of a picture need. A video of Qwen3-VL has one for each two of its frames.

    key: 63 bits, equal for equal pixels that are resized to an equal size. grid: patches in time, height and width.
    interval: positions between two steps in time.
    """

    key: int
    grid: Grid
    interval: float = 1.0


class Limits(NamedTuple):
    """Pixels of a picture after resizing."""

    min_pixels: int
    max_pixels: int

    def within(self, low: int | None, high: int | None) -> Limits:
        """A picture's own limits, as far as these allow."""
        found = (self.min_pixels if low is None else low, self.max_pixels if high is None else high)
        return Limits(*(min(max(number, self.min_pixels), self.max_pixels) for number in found))


class ImageProcessor:
    """Opens, resizes and normalises pictures, and cuts them into patches, as Qwen2VLImageProcessor of transformers.

    A process that gets it by pickle needs no transformers.

    Args:
        table: the normalised value of each of the 256 values of a pixel, float32 (3, 256).
        resample: Pillow's filter.
    """

    def __init__(self, table: np.ndarray, resample: int, limits: Limits, vision: Vision, max_image_pixels: int) -> None:
        self.vision, self.limits = vision, limits
        self._table, self._resample, self._max_source = table, resample, max_image_pixels
        self._factor = vision.patch_size * vision.merge_size
        self._num_frames = int(vision.tower["temporal_patch_size"])  # of a patch

    @classmethod
    def of_model(cls, folder: str, vision: Vision, cfg: DataConfig) -> ImageProcessor:
        """Read preprocessor_config.json of a model's folder through transformers.

        Raises InputError if it differs from the vision tower.
        """
        where, processor = f"{folder}/{FILE}", _load(folder)
        for key, expected in (
            ("patch_size", vision.patch_size),
            ("merge_size", vision.merge_size),
            ("temporal_patch_size", vision.tower["temporal_patch_size"]),
        ):
            if getattr(processor, key) != expected:
                raise InputError(
                    f"{where}: {key}={getattr(processor, key)}; expected {expected}, as in vision_config of "
                    "config.json; use the files of one model"
                )
        own = _limits_of_file(where, processor)
        limits = Limits(cfg.min_pixels or own.min_pixels, cfg.max_pixels or own.max_pixels)
        if limits.min_pixels > limits.max_pixels:
            raise InputError(
                f"data.min_pixels={limits.min_pixels} is above data.max_pixels={limits.max_pixels}; null is the value "
                f"in {where}; set both"
            )
        images = cls(np.zeros((3, 256), np.float32), int(processor.resample), limits, vision, cfg.max_image_pixels)
        images._learn(processor, where)
        return images

    def open(self, value: Any, folder: str = "") -> Image.Image:
        """Return a picture of a data file in RGB. Raises BadImage.

        Args:
            folder: where relative paths begin.
        """
        return open_picture(value, folder, self._max_source)

    def grid(self, width: int, height: int, limits: Limits | None = None) -> Grid:
        """Patches in time, height and width of a picture of this size."""
        return self._grid(1, fitted(height, width, self._factor, limits or self.limits))

    def patches(self, image: Image.Image, limits: Limits | None = None) -> tuple[np.ndarray, Grid]:
        """Return the patches of an RGB picture, float32 (patches, vision.patch_width), and its grid."""
        grid = self.grid(*image.size, limits)
        return self._cut([self._resized(image, grid)] * self._num_frames, grid), grid

    def thumbnail(self, source: Source, folder: str, entry: int) -> bytes:
        """Return the picture, or the first frame of an entry of a video, as a PNG of at most `THUMBNAIL` pixels a side.

        Raises BadImage.
        """
        value = source.value
        if source.kind == "video":
            video = video_of(value)
            value = video.frames[self._groups(video)[entry][0]]
        image = self.open(value, folder)
        image.thumbnail((THUMBNAIL, THUMBNAIL))
        return as_png(image)

    def num_entries(self, source: Source) -> int:
        """Entries of a picture or a video, without opening it. Raises BadImage."""
        return 1 if source.kind == "image" else len(self._groups(video_of(source.value)))

    def read(self, source: Source, folder: str) -> list[Entry]:
        """Decode a picture or a video, and return its entries. Raises BadImage."""
        if source.kind == "video":
            return self._read_video(video_of(source.value), folder)
        image = self.open(source.value, folder)
        grid = self.grid(*image.size, self._limits_of(source.value))
        return [Entry(self._key(grid, [_digest(image)]), grid)]

    def patches_of(self, source: Source, folder: str, entry: int, grid: Grid) -> np.ndarray:
        """Return the patches of one entry of a source, float32 (patches, vision.patch_width).

        Raises BadImage, also if its grid differs from `grid`: the file has changed since.
        """
        if source.kind == "video":
            video = video_of(source.value)
            frames = [video.frames[frame] for frame in self._groups(video)[entry]]
            return self._cut([self._resized(frame, grid) for frame in self._open_frames(frames, folder)], grid)
        patches, grid_now = self.patches(self.open(source.value, folder), self._limits_of(source.value))
        if grid_now != grid:
            raise BadImage(f"found a picture of {grid_now} patches; expected {grid}, as when the job read it first")
        return patches

    def times_of(self, source: Source) -> list[str]:
        """Texts before the entries of a video of Qwen3-VL: "<0.3 seconds>", the mean time of each group of frames.

        Empty for a picture, and for Qwen2.5-VL.
        """
        if source.kind == "image" or not self.vision.mrope_interleaved:
            return []
        video = video_of(source.value)
        ends = [(group[0], group[-1]) for group in self._groups(video)]
        return [f"<{(first / video.fps + last / video.fps) / 2:.1f} seconds>" for first, last in ends]

    def _learn(self, processor: Any, where: str) -> None:
        """Fill the table with what the processor makes of each value, and compare the patches of a picture.

        Raises InputError if they differ, because the file is untrusted and transformers may change.
        """
        from PIL import Image

        height, width = self._factor, self._factor * -(-256 // self._factor**2)
        ramp = (np.arange(height * width) % 256).astype(np.uint8).reshape(height, width)
        values = Image.fromarray(np.stack([ramp] * 3, axis=-1))
        noise = np.random.default_rng(0).integers(0, 256, (self._factor + 3, 2 * self._factor + 9, 3), np.uint8)
        picture = Image.fromarray(noise)
        size = {"shortest_edge": self.limits.min_pixels, "longest_edge": self.limits.max_pixels}
        try:
            normalised = np.asarray(processor(values, do_resize=False, return_tensors="np")["pixel_values"], np.float32)
            expected = processor(picture, size=size, return_tensors="np")["pixel_values"]
            self._table[:] = np.arange(256)
            raw = self._cut([values] * self._num_frames, self._grid(1, (height, width))).astype(np.uint8)
            for table, its_values, expected_values in zip(
                self._table, _by_channel(raw), _by_channel(normalised), strict=True
            ):
                table[its_values] = expected_values
            patches, _ = self.patches(picture)
        except Exception as error:  # of NumPy and transformers
            why = f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
        else:
            if patches.shape[1] == self.vision.patch_width and np.array_equal(patches, expected):
                return
            why = f"patches of {expected.shape[1]} numbers that differ from Qwen2VLImageProcessor's"
        raise InputError(f"{where}: {why}; expected the file of Qwen2.5-VL or Qwen3-VL")

    def _limits_of(self, value: Any) -> Limits:
        return self.limits.within(*limits_of(value))

    def _grid(self, time: int, size: tuple[int, int]) -> Grid:
        height, width = size
        return time, height // self.vision.patch_size, width // self.vision.patch_size

    def _key(self, grid: Grid, digests: Sequence[bytes]) -> int:
        whole = hashlib.blake2b(self._table.tobytes(), digest_size=8)
        for part in (str(grid).encode(), *digests):
            whole.update(part)
        return int.from_bytes(whole.digest(), "little") >> 1

    def _groups(self, video: Video) -> list[list[int]]:
        """Numbers of the frames of each entry; the last frame is repeated to fill the patches in time."""
        num, each = len(video.frames), self._num_frames
        frames = [min(frame, num - 1) for frame in range(-(-num // each) * each)]
        step = each if self.vision.mrope_interleaved else len(frames)
        return [frames[start : start + step] for start in range(0, len(frames), step)]

    def _read_video(self, video: Video, folder: str) -> list[Entry]:
        digests, size = list[bytes](), None
        for frame in self._open_frames(video.frames, folder):
            digests.append(_digest(frame))
            size = size or frame.size
        assert size is not None  # there is a frame
        low, high = frame_limits(video, self._factor, self._num_frames)
        fitting = fitted(size[1], size[0], self._factor, Limits(low, min(high, max(low, self.limits.max_pixels))))
        interval = 1.0
        if not self.vision.mrope_interleaved:
            interval = self.vision.tower.get("tokens_per_second", 4) * self._num_frames / video.fps
        entries = []
        for group in self._groups(video):
            grid = self._grid(len(group) // self._num_frames, fitting)
            entries.append(Entry(self._key(grid, [digests[frame] for frame in group]), grid, interval))
        return entries

    def _open_frames(self, frames: Sequence[Any], folder: str) -> Iterator[Image.Image]:
        for number, frame in enumerate(frames):
            try:
                yield self.open(frame, folder)
            except BadImage as error:
                raise BadImage(f"frame {number}: {error}") from None

    def _resized(self, image: Image.Image, grid: Grid) -> Image.Image:
        _, height, width = grid
        return image.resize((width * self.vision.patch_size, height * self.vision.patch_size), self._resample)

    def _cut(self, frames: Sequence[Image.Image], grid: Grid) -> np.ndarray:
        """Return normalised patches of resized frames, float32 (patches, width). Those of a token are in sequence."""
        (time, height, width), merge, patch = grid, self.vision.merge_size, self.vision.patch_size
        pixels = np.stack([np.asarray(frame) for frame in frames])
        split = pixels.reshape(
            time, self._num_frames, height // merge, merge, patch, width // merge, merge, patch, pixels.shape[-1]
        )
        values = split.transpose(0, 2, 5, 3, 6, 8, 1, 4, 7).reshape(time * height * width, pixels.shape[-1], -1)
        patches = np.empty(values.shape, np.float32)
        for channel, table in enumerate(self._table):
            patches[:, channel] = table[values[:, channel]]
        return patches.reshape(len(patches), -1)


def fitted(height: int, width: int, factor: int, limits: Limits) -> tuple[int, int]:
    """Return the nearest height and width that are multiples of `factor`, with pixels within `limits` and the aspect
    ratio about kept: smart_resize of Qwen2-VL's image processor."""
    heights, widths = (round(side / factor) * factor for side in (height, width))
    if heights * widths > limits.max_pixels:
        scale = math.sqrt(height * width / limits.max_pixels)
        heights, widths = (max(factor, math.floor(side / scale / factor) * factor) for side in (height, width))
    elif heights * widths < limits.min_pixels:
        scale = math.sqrt(limits.min_pixels / (height * width))
        heights, widths = (math.ceil(side * scale / factor) * factor for side in (height, width))
    return heights, widths


def _by_channel(patches: np.ndarray) -> np.ndarray:
    """Patches (N, width) as (3, N, width / 3)."""
    return patches.reshape(len(patches), 3, -1).transpose(1, 0, 2)


def _digest(image: Image.Image) -> bytes:
    pixels = hashlib.blake2b(str(image.size).encode(), digest_size=16)
    pixels.update(image.tobytes())
    return pixels.digest()


def _load(folder: str) -> Any:
    """The directory's Qwen2VLImageProcessor, without torchvision, without the network."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read when transformers is imported
    where = f"{folder}/{FILE}"
    if not os.path.isfile(where):
        raise InputError(f"{where}: no such file; expected the image processor of a model with a vision tower")
    try:
        import transformers

        option = {"backend": "pil"} if int(transformers.__version__.split(".")[0]) >= 5 else {"use_fast": False}
        check_folder(folder)
        processor = transformers.AutoImageProcessor.from_pretrained(folder, trust_remote_code=False, **option)
    except Exception as error:  # transformers raises OSError, ValueError, ImportError and others alike
        if code := own_code(folder, "AutoImageProcessor"):
            raise InputError(f"{folder}: {code}; convert it to the preprocessor_config.json of Qwen2-VL") from None
        why = " ".join(str(error).split())[:200]
        raise InputError(
            f"{where}: {type(error).__name__}: {why}; expected an image processor; install Pillow if it is missing"
        ) from None
    if type(processor).__name__ not in ("Qwen2VLImageProcessor", "Qwen2VLImageProcessorPil"):
        raise InputError(f"{where}: {type(processor).__name__}; expected Qwen2VLImageProcessor")
    return processor


def _limits_of_file(where: str, processor: Any) -> Limits:
    """Pixels of a resized picture. The processor of transformers 4.57 ignores `size`, which Qwen3-VL's file has."""
    content = read_json(where)
    pixels = []
    for key, name in (("min_pixels", "shortest_edge"), ("max_pixels", "longest_edge")):
        in_size = content["size"].get(name) if isinstance(content.get("size"), dict) else None
        number = next(it for it in (content.get(key), in_size, processor.size[name]) if it is not None)
        if isinstance(number, bool) or not isinstance(number, int) or number < 1:
            raise InputError(f"{where}: {key}, or size.{name}, is {number!r}; expected a number of pixels")
        pixels.append(number)
    return Limits(*pixels)
