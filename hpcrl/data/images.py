"""Pictures and videos as patches, by the model directory's own image processor. transformers is imported on use."""

from __future__ import annotations

import hashlib
import io
import json
import math
import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from hpcrl.data.pictures import BadImage, limits_of, open_picture
from hpcrl.data.video import Video, frame_limits, video_of
from hpcrl.model.vision import Vision
from hpcrl.runtime.exits import InputError

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
    """Opens, resizes and normalises pictures, and cuts them into patches.

    processor: Qwen2VLImageProcessor of transformers, which reads pixels through Pillow.
    """

    def __init__(self, processor: Any, vision: Vision, cfg: DataConfig) -> None:
        size = processor.size
        self.vision = vision
        self.limits = Limits(cfg.min_pixels or size["shortest_edge"], cfg.max_pixels or size["longest_edge"])
        self._processor, self._max_source = processor, cfg.max_image_pixels
        self._factor = vision.patch_size * vision.merge_size
        self._num_frames = int(vision.tower["temporal_patch_size"])  # of a patch
        self._settings = json.dumps(processor.to_dict(), sort_keys=True, default=str).encode()

    @classmethod
    def of_model(cls, folder: str, vision: Vision, cfg: DataConfig) -> ImageProcessor:
        """Read preprocessor_config.json of a model's folder. Raises InputError if it differs from the vision tower."""
        processor = _load(folder)
        for key, expected in (
            ("patch_size", vision.patch_size),
            ("merge_size", vision.merge_size),
            ("temporal_patch_size", vision.tower["temporal_patch_size"]),
        ):
            if getattr(processor, key) != expected:
                raise InputError(
                    f"{folder}/{FILE}: {key}={getattr(processor, key)}; expected {expected}, as in vision_config of "
                    "config.json; use the files of one model"
                )
        images = cls(processor, vision, cfg)
        if images.limits.min_pixels > images.limits.max_pixels:
            raise InputError(
                f"data.min_pixels={images.limits.min_pixels} is above data.max_pixels={images.limits.max_pixels}; "
                f"null is the value in {folder}/{FILE}; set both"
            )
        images._probe(f"{folder}/{FILE}")
        return images

    def open(self, value: Any, folder: str = "") -> Image.Image:
        """Return a picture of a data file in RGB. folder: of relative paths. Raises BadImage."""
        return open_picture(value, folder, self._max_source)

    def grid(self, width: int, height: int, limits: Limits | None = None) -> Grid:
        """Patches in time, height and width of a picture of this size."""
        return self._grid(1, fitted(height, width, self._factor, limits or self.limits))

    def patches(self, image: Image.Image, limits: Limits | None = None) -> tuple[np.ndarray, Grid]:
        """Return the patches of an RGB picture, float32 (patches, vision.patch_width), and its grid."""
        low, high = limits or self.limits
        size = {"shortest_edge": low, "longest_edge": high}
        found = self._processor(image, size=size, return_tensors="np")
        time, height, width = map(int, found["image_grid_thw"][0])
        return np.asarray(found["pixel_values"], np.float32), (time, height, width)

    def thumbnail(self, patches: np.ndarray, grid: Grid) -> bytes:
        """Return the first frame as a PNG of at most `THUMBNAIL` pixels a side. patches: as `patches` returns them."""
        from PIL import Image

        _, height, width = grid
        size, merge = self.vision.patch_size, self.vision.merge_size
        first = patches[: height * width].reshape(
            height // merge, width // merge, merge, merge, -1, self._num_frames, size, size
        )
        pixels = first[:, :, :, :, :, 0].transpose(0, 2, 5, 1, 3, 6, 4).reshape(height * size, width * size, -1)
        restored = pixels * self._processor.image_std + np.asarray(self._processor.image_mean)
        image = Image.fromarray((restored.clip(0, 1) * 255).round().astype(np.uint8))
        image.thumbnail((THUMBNAIL, THUMBNAIL))
        stream = io.BytesIO()
        image.save(stream, "PNG")
        return stream.getvalue()

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

    def patches_of(self, source: Source, folder: str, index: int, grid: Grid) -> np.ndarray:
        """Return the patches of the source's entry `index`, float32 (patches, vision.patch_width).

        Raises BadImage, also if its grid differs from `grid`: the file has changed since.
        """
        if source.kind == "video":
            video = video_of(source.value)
            frames = [video.frames[frame] for frame in self._groups(video)[index]]
            return self._frame_patches(frames, folder, grid)
        patches, found = self.patches(self.open(source.value, folder), self._limits_of(source.value))
        if found != grid:
            raise BadImage(f"found a picture of {found} patches; expected {grid}, as when the job read it first")
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

    def _probe(self, where: str) -> None:
        """Process one picture, because the file is untrusted."""
        from PIL import Image

        size = (self._factor + 3, 2 * self._factor)
        try:
            patches, grid = self.patches(Image.new("RGB", size))
            found = f"patches of {patches.shape[1]} numbers and a grid of {grid}"
        except Exception as error:  # of NumPy and transformers
            found = f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
        expected = f"patches of {self.vision.patch_width} numbers and a grid of {self.grid(*size)}"
        if found != expected:
            raise InputError(f"{where}: a picture of {size[0]} x {size[1]} pixels gives {found}; expected {expected}")

    def _limits_of(self, value: Any) -> Limits:
        return self.limits.within(*limits_of(value))

    def _grid(self, time: int, size: tuple[int, int]) -> Grid:
        height, width = size
        return time, height // self.vision.patch_size, width // self.vision.patch_size

    def _key(self, grid: Grid, digests: Sequence[bytes]) -> int:
        whole = hashlib.blake2b(self._settings, digest_size=8)
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

    def _frame_patches(self, frames: Sequence[Any], folder: str, grid: Grid) -> np.ndarray:
        """Patches over these frames. The processor repeats a picture in time; here the next frame takes its place."""
        from PIL import Image

        time, height, width = grid
        size = (width * self.vision.patch_size, height * self.vision.patch_size)
        resized = [frame.resize(size, Image.Resampling.BICUBIC) for frame in self._open_frames(frames, folder)]
        found = self._processor(resized, do_resize=False, return_tensors="np")["pixel_values"]
        in_channels, pixels = int(self.vision.tower["in_channels"]), self.vision.patch_size**2
        by_frame = found.reshape(time, self._num_frames, height * width, in_channels, self._num_frames, pixels)
        return np.ascontiguousarray(by_frame[:, :, :, :, 0].transpose(0, 2, 3, 1, 4), np.float32).reshape(
            -1, self.vision.patch_width
        )


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
        processor = transformers.AutoImageProcessor.from_pretrained(folder, **option)
    except Exception as error:  # transformers raises OSError, ValueError, ImportError and others alike
        why = " ".join(str(error).split())[:200]
        raise InputError(
            f"{where}: {type(error).__name__}: {why}; expected an image processor; install Pillow if it is missing"
        ) from None
    if type(processor).__name__ not in ("Qwen2VLImageProcessor", "Qwen2VLImageProcessorPil"):
        raise InputError(f"{where}: {type(processor).__name__}; expected Qwen2VLImageProcessor")
    for key in ("shortest_edge", "longest_edge"):
        if not isinstance(processor.size[key], int) or processor.size[key] < 1:
            raise InputError(f"{where}: size.{key}={processor.size[key]!r}; expected a number of pixels")
    return processor
