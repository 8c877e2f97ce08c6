"""Pictures and videos of data files as RGB pixels. Pillow is imported when the first one is opened."""

from __future__ import annotations

import base64
import contextlib
import io
import math
import os
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from PIL import Image

# Only formats of still pictures, decoded by Pillow itself: others run programs (EPS) or contain pictures (ICO).
FORMATS = ("AVIF", "BMP", "GIF", "JPEG", "JPEG2000", "PNG", "PPM", "TIFF", "WEBP")
MAX_ASPECT_RATIO = 200  # of Qwen's image processors
_EXPECTED = "the bytes or the path of a picture, or a mapping with one of them in 'bytes', 'path' or 'image'"


class BadImage(ValueError):
    """What is wrong with the pictures of a row: "<found>; expected <what>"."""


def open_picture(value: Any, folder: str, max_pixels: int) -> Image.Image:
    """Return the picture upright and in RGB.

    The orientation of EXIF is applied, as Hugging Face's datasets and transformers do. Transparent pixels are blended
    with white, as qwen_vl_utils does. Raises BadImage.

    Args:
        value: bytes, a path, a `data:` URI, or a mapping that has one of these under `bytes`, `path` or `image`.
        folder: where relative paths begin.
        max_pixels: pixels that the file may have, compared before it is decoded.
    """
    from PIL import Image, ImageOps

    source = _source(value, folder)
    with warnings.catch_warnings(), contextlib.ExitStack() as stack:
        warnings.simplefilter("ignore")  # Pillow warns of odd metadata
        with _decoding():
            image = stack.enter_context(_open(Image, source))
        _check_header(image, max_pixels)
        with _decoding():
            image.load()
        upright: Image.Image = image
        with contextlib.suppress(Exception):  # damaged metadata
            upright = ImageOps.exif_transpose(image)
        with _decoding():
            return _rgb(upright)


def as_png(image: Image.Image) -> bytes:
    stream = io.BytesIO()
    image.save(stream, "PNG")
    return stream.getvalue()


def limits_of(value: Any) -> tuple[int | None, int | None]:
    """The picture's own `min_pixels` and `max_pixels`, as in qwen_vl_utils. Raises BadImage."""
    if not isinstance(value, dict):
        return None, None
    for key in ("resized_height", "resized_width"):
        if value.get(key) is not None:
            raise BadImage(f"found {key}={value[key]!r}; expected min_pixels and max_pixels instead")
    pixels = [value.get(key) for key in ("min_pixels", "max_pixels")]
    for number in pixels:
        if number is not None and (isinstance(number, bool) or not isinstance(number, int) or number < 1):
            raise BadImage(f"found min_pixels, max_pixels = {pixels}; expected positive whole numbers")
    low, high = pixels
    if low is not None and high is not None and low > high:
        raise BadImage(f"found min_pixels={low} above max_pixels={high}; expected at most that")
    return low, high


def _source(value: Any, folder: str) -> str | bytes:
    """The bytes, or the path, that the value names."""
    if isinstance(value, dict):
        named = next((value[key] for key in ("bytes", "image", "path") if value.get(key) is not None), None)
        if named is None:
            keys = ", ".join(map(str, value)) or "none"
            raise BadImage(f"found a mapping with the keys {keys[:60]}; expected {_EXPECTED}")
        return _source(named, folder)
    if isinstance(value, bytes):
        if not value:
            raise BadImage("found no bytes; expected those of a picture")
        return value
    if not isinstance(value, str):
        raise BadImage(f"found {type(value).__name__} {str(value)[:60]!r}; expected {_EXPECTED}")
    if value.startswith("data:"):
        try:
            return _source(base64.b64decode(value.partition("base64,")[2], validate=True), folder)
        except ValueError:
            raise BadImage(f"found {value[:60]!r}; expected data:image/...;base64,... with a picture") from None
    path = value.removeprefix("file://")
    if "://" in path:
        raise BadImage(f"found the address {path[:160]!r}; expected a local file: download it first")
    path = os.path.join(folder, path)
    if not os.path.isfile(path):
        raise BadImage(f"found no file {path!r}; expected a picture")
    return path


@contextlib.contextmanager
def _decoding() -> Iterator[None]:
    """Raise BadImage for whatever a decoder raises: Pillow's raise errors of all types for damaged files."""
    try:
        yield
    except (MemoryError, BadImage):
        raise
    except Exception as error:
        why = f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
        raise BadImage(f"found a file that cannot be decoded ({why}); expected a whole picture") from None


def _open(library: Any, source: str | bytes) -> Image.Image:
    library.init()
    formats = [name for name in FORMATS if name in library.OPEN]
    # Pillow's own limit on pixels is switched off while it reads the header, because it cannot be raised per call.
    limit, library.MAX_IMAGE_PIXELS = library.MAX_IMAGE_PIXELS, None
    try:
        return library.open(io.BytesIO(source) if isinstance(source, bytes) else source, formats=formats)
    except library.UnidentifiedImageError:
        start = source[:16] if isinstance(source, bytes) else f"the file {source}"
        raise BadImage(f"found {start!r}; expected a picture ({', '.join(formats)})") from None
    finally:
        library.MAX_IMAGE_PIXELS = limit


def _check_header(image: Image.Image, max_pixels: int) -> None:
    width, height = image.size
    if not width or not height:
        raise BadImage(f"found {width} x {height} pixels; expected at least one")
    if width * height > max_pixels:
        raise BadImage(f"found {width} x {height} pixels; expected at most data.max_image_pixels={max_pixels}")
    if max(width, height) > MAX_ASPECT_RATIO * min(width, height):
        raise BadImage(f"found {width} x {height} pixels; expected an aspect ratio of at most {MAX_ASPECT_RATIO}")
    with _decoding():
        num_frames = getattr(image, "n_frames", 1)
    if num_frames > 1 and image.format != "MPO":  # a JPEG, and smaller copies of it
        raise BadImage(f"found a {image.format} of {num_frames} frames; expected one; a video is a list of frames")


def _rgb(image: Image.Image) -> Image.Image:
    from PIL import Image

    if image.mode == "F":
        raise BadImage("found pixels that are floating-point numbers; expected 8 or 16 bits")
    if image.mode.startswith("I"):  # Pillow's conversion would clip 16 bits at 255
        pixels = np.asarray(image)
        if pixels.min() < 0 or pixels.max() > 65535:
            raise BadImage("found pixels of 32 bits; expected 8 or 16 bits")
        return Image.fromarray((pixels >> 8).astype(np.uint8)).convert("RGB")
    if image.has_transparency_data:
        image = image.convert("RGBA")
        white = Image.new("RGB", image.size, (255, 255, 255))
        white.paste(image, mask=image.getchannel("A"))
        return white
    return image.convert("RGB")


VIDEO_FPS = 2.0  # of qwen_vl_utils and transformers, for frames without one
MIN_FRAME_TOKENS, MAX_FRAME_TOKENS = 128, 768  # of a group of frames, in qwen_vl_utils
VIDEO_TOKENS = 0.9 * 128_000  # of a video, in qwen_vl_utils


class Video(NamedTuple):
    """frames: each as a picture in a data file. fps: frames per second. Pixels: of a frame after resizing, or None."""

    frames: list[Any]
    fps: float
    min_pixels: int | None
    max_pixels: int | None


def video_of(value: Any) -> Video:
    """Return the video of a list of frames, or of {"video": frames, "fps": ...}. Raises BadImage."""
    options = value if isinstance(value, dict) else {}
    frames = options.get("video") if isinstance(value, dict) else value
    if not isinstance(frames, list) or not frames:
        what = f"{type(frames).__name__} {str(frames)[:60]!r}" if frames else "no frames"
        raise BadImage(
            f"found {what}; expected a list of frames, or a mapping with one in 'video' and their rate in 'fps': "
            "extract the frames of video files first"
        )
    fps = next((options[key] for key in ("fps", "sample_fps") if options.get(key) is not None), VIDEO_FPS)
    if isinstance(fps, bool) or not isinstance(fps, (int, float)) or not 0 < fps < math.inf:
        raise BadImage(f"found fps={fps!r}; expected frames per second, above 0")
    return Video(frames, float(fps), *limits_of(options))


def frame_limits(video: Video, factor: int, num_frames: int) -> tuple[int, int]:
    """Return pixels of a resized frame, at least and at most, as in qwen_vl_utils.

    Args:
        factor: a token's side in pixels.
        num_frames: frames of a patch.
    """
    low = video.min_pixels or MIN_FRAME_TOKENS * factor**2
    share = VIDEO_TOKENS * factor**2 / (-(-len(video.frames) // num_frames) * num_frames) * num_frames
    high = int(max(min(MAX_FRAME_TOKENS * factor**2, share), int(low * 1.05)))
    return low, max(low, min(high, video.max_pixels or high))
