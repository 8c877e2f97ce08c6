"""Videos of data files: lists of frames, in the form that qwen_vl_utils takes."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from hpcrl.data.pictures import BadImage, limits_of

FPS = 2.0  # of qwen_vl_utils and transformers, for frames without one
MIN_TOKENS, MAX_TOKENS = 128, 768  # of a group of frames, in qwen_vl_utils
TOTAL_TOKENS = 0.9 * 128_000  # of a video, in qwen_vl_utils


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
        found = f"{type(frames).__name__} {str(frames)[:60]!r}" if frames else "no frames"
        raise BadImage(
            f"found {found}; expected a list of frames, or a mapping with one in 'video' and their rate in 'fps': "
            "extract the frames of video files first"
        )
    fps = next((options[key] for key in ("fps", "sample_fps") if options.get(key) is not None), FPS)
    if isinstance(fps, bool) or not isinstance(fps, (int, float)) or not 0 < fps < math.inf:
        raise BadImage(f"found fps={fps!r}; expected frames per second, above 0")
    return Video(frames, float(fps), *limits_of(options))


def frame_limits(video: Video, factor: int, num_frames: int) -> tuple[int, int]:
    """Return pixels of a resized frame, at least and at most, as in qwen_vl_utils. factor: a token's side in pixels.
    num_frames: of a patch in time."""
    low = video.min_pixels or MIN_TOKENS * factor**2
    share = TOTAL_TOKENS * factor**2 / (-(-len(video.frames) // num_frames) * num_frames) * num_frames
    high = int(max(min(MAX_TOKENS * factor**2, share), int(low * 1.05)))
    return low, max(low, min(high, video.max_pixels or high))
