"""Pictures and videos in prompts and conversations, and the one line that a bad one gets."""

from __future__ import annotations

import base64
import functools
import io
import json
import logging
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from PIL import Image

from hpcrl.config.schema import DataConfig
from hpcrl.data.images import ImageProcessor, Limits
from hpcrl.data.pictures import BadImage
from hpcrl.data.prompts import PromptDataset
from hpcrl.data.tokenizer import load_tokenizer
from hpcrl.model.vision import Vision
from hpcrl.runtime.exits import InputError

WORDS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>", "<|im_start|>", "<|im_end|>")
CHARACTERS = "\n" + "".join(map(chr, range(32, 127)))
# The part of Qwen2.5-VL's and Qwen3-VL's templates that renders pictures.
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}"
    "{% else %}{% for part in m.content %}"
    "{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif part.type == 'video' %}<|vision_start|><|video_pad|><|vision_end|>"
    "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory, tool: Any) -> Any:
    made, folder = tool("make_char_tokenizer"), tmp_path_factory.mktemp("tokenizer")
    text = json.loads(made.build(CHARACTERS, WORDS))
    for token in text["added_tokens"]:
        token["special"] = True
    (folder / "tokenizer.json").write_text(json.dumps(text))
    (folder / "tokenizer_config.json").write_text(json.dumps(made.config(TEMPLATE) | {"eos_token": "<|im_end|>"}))
    return load_tokenizer(str(folder))


@functools.cache
def vision(ids: tuple[int, ...], is_qwen3: bool = False) -> Vision:
    start, end, image, video = ids
    tower = {"in_channels": 3, "patch_size": 16 if is_qwen3 else 14, "spatial_merge_size": 2, "temporal_patch_size": 2}
    tower |= {} if is_qwen3 else {"tokens_per_second": 2}
    return Vision(json.dumps(tower), image, video, start, end, (4, 2, 2), is_qwen3)


FILES = {
    False: {
        "min_pixels": 3136,
        "max_pixels": 12845056,
        "patch_size": 14,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "image_mean": [0.48145466, 0.4578275, 0.40821073],
        "image_std": [0.26862954, 0.26130258, 0.27577711],
        "image_processor_type": "Qwen2VLImageProcessor",
        "processor_class": "Qwen2_5_VLProcessor",
    },
    True: {
        "size": {"longest_edge": 16777216, "shortest_edge": 65536},
        "patch_size": 16,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "image_processor_type": "Qwen2VLImageProcessorFast",
        "processor_class": "Qwen3VLProcessor",
    },
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, str]:
    found = {}
    for is_qwen3, content in FILES.items():
        folder = tmp_path_factory.mktemp("qwen3" if is_qwen3 else "qwen2_5")
        (folder / "preprocessor_config.json").write_text(json.dumps(content))
        found[is_qwen3] = str(folder)
    return found


@pytest.fixture(scope="module")
def processor(tokenizer: Any, folders: dict[bool, str]) -> Any:
    ids = tuple(tokenizer.convert_tokens_to_ids(list(WORDS[:4])))

    def make(is_qwen3: bool = False, **data: Any) -> ImageProcessor:
        return ImageProcessor.of_model(folders[is_qwen3], vision(ids, is_qwen3), DataConfig(**data))

    return make


@pytest.fixture(scope="module")
def theirs(folders: dict[bool, str]) -> dict[bool, Any]:
    """transformers' processors on Pillow."""
    from transformers import AutoImageProcessor

    return {is_qwen3: AutoImageProcessor.from_pretrained(folder) for is_qwen3, folder in folders.items()}


def picture(width: int, height: int, seed: int = 0, mode: str = "RGB") -> Image.Image:
    channels = len(Image.new(mode, (1, 1)).getbands())
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, channels), np.uint8)
    return Image.fromarray(pixels.squeeze(2) if channels == 1 else pixels, mode)


def encoded(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


@pytest.mark.parametrize("is_qwen3", [False, True])
@pytest.mark.parametrize(
    "size", [(1, 1), (28, 28), (57, 43), (300, 500), (7, 1300), (1300, 7), (1, 200), (640, 41), (1001, 17)]
)
def test_patches_are_transformers(processor: Any, theirs: Any, size: tuple[int, int], is_qwen3: bool) -> None:
    images, image = processor(is_qwen3), picture(*size)
    patches, grid = images.patches(image)
    expected = theirs[is_qwen3](image, return_tensors="np")
    assert patches.dtype == np.float32
    assert np.array_equal(patches, expected["pixel_values"])
    assert grid == tuple(expected["image_grid_thw"][0]) == images.grid(*size)
    assert patches.shape == (np.prod(grid), images.vision.patch_width)


def test_limits_of_the_config_and_of_a_picture(processor: Any, theirs: Any) -> None:
    image = picture(300, 500)
    small = processor(max_pixels=40_000)
    expected = theirs[False](image, size={"shortest_edge": 3136, "longest_edge": 40_000}, return_tensors="np")
    assert np.array_equal(small.patches(image)[0], expected["pixel_values"])
    assert small.limits.within(None, 10_000) == Limits(3136, 10_000)
    assert small.limits.within(100_000, 10**9) == Limits(40_000, 40_000)
    large = processor(min_pixels=400_000)
    assert np.prod(large.grid(300, 500)) * 14**2 >= 400_000


def test_a_processor_of_another_model(processor: Any, folders: dict[bool, str], tmp_path: Path) -> None:
    tower = processor(True).vision
    with pytest.raises(InputError, match=r"preprocessor_config.json: patch_size=14; expected 16, as in vision_config"):
        ImageProcessor.of_model(folders[False], tower, DataConfig())
    with pytest.raises(InputError, match=r"preprocessor_config.json: no such file; expected the image processor"):
        ImageProcessor.of_model(str(tmp_path), tower, DataConfig())
    for change, line in (
        ({"image_processor_type": "CLIPImageProcessor"}, r"CLIPImageProcessorPil; expected Qwen2VLImageProcessor"),
        ({"image_mean": [0.5]}, r"a picture of 35 x 64 pixels gives .*; expected patches of 1536 numbers"),
        ({"do_resize": False}, r"a picture of 35 x 64 pixels gives .*; expected patches of 1536 numbers"),
        ({"size": {"shortest_edge": 0, "longest_edge": 9}}, r"size.shortest_edge=0; expected a number of pixels"),
    ):
        (tmp_path / "preprocessor_config.json").write_text(json.dumps(FILES[True] | change))
        with pytest.raises(InputError, match=line):
            ImageProcessor.of_model(str(tmp_path), tower, DataConfig())
    with pytest.raises(InputError, match=r"data.min_pixels=65536 is above data.max_pixels=4096; .*; set both"):
        processor(True, max_pixels=4096)
