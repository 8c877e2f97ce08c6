"""Pictures and videos in prompts and conversations, and the one line that a bad one gets."""

from __future__ import annotations

import base64
import functools
import io
import json
import logging
import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from PIL import Image

from hpcrl.config.schema import DataConfig
from hpcrl.data.answers import AnswerDataset
from hpcrl.data.conversations import Conversations
from hpcrl.data.image_loader import Dataset, ImageLoader
from hpcrl.data.images import ImageProcessor, Limits
from hpcrl.data.pictures import BadImage
from hpcrl.data.prompts import PromptDataset
from hpcrl.data.row_file import RowFile
from hpcrl.data.supervision import SftDataset
from hpcrl.data.tokenizer import load_tokenizer
from hpcrl.model.vision import Vision
from hpcrl.runtime.exits import InputError

PILLOW = {"backend": "pil"} if int(metadata.version("transformers").split(".")[0]) >= 5 else {"use_fast": False}
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


def patches_of(data: Dataset, images: ImageProcessor, row: int, index: int) -> np.ndarray:
    return ImageLoader(data, images, 0).take_patches(row, index)


@pytest.fixture(scope="module")
def theirs(folders: dict[bool, str]) -> dict[bool, Any]:
    """transformers' processors on Pillow."""
    from transformers import AutoImageProcessor

    return {is_qwen3: AutoImageProcessor.from_pretrained(folder, **PILLOW) for is_qwen3, folder in folders.items()}


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
    limits = {"shortest_edge": images.limits.min_pixels, "longest_edge": images.limits.max_pixels}
    expected = theirs[is_qwen3](image, size=limits, input_data_format="channels_last", return_tensors="np")
    assert patches.dtype == np.float32
    assert np.array_equal(patches, expected["pixel_values"])
    assert grid == tuple(expected["image_grid_thw"][0]) == images.grid(*size)
    assert patches.shape == (np.prod(grid), images.vision.patch_width)


def test_limits_of_the_file(processor: Any) -> None:
    assert processor().limits == Limits(3136, 12845056)
    assert processor(True).limits == Limits(65536, 16777216)  # transformers 4.57 would take others


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
        ({"image_processor_type": "CLIPImageProcessor"}, r"CLIPImageProcessor(Pil)?; expected Qwen2VLImageProcessor"),
        (
            {"image_mean": [0.5]},
            r"ValueError: mean must have 3 elements .*; expected the file of Qwen2.5-VL or Qwen3-VL",
        ),
        ({"do_resize": False}, r".*; expected the file of Qwen2.5-VL or Qwen3-VL"),
        ({"size": {"shortest_edge": 0, "longest_edge": 9}}, r"min_pixels, or size.shortest_edge, is 0; expected a"),
    ):
        (tmp_path / "preprocessor_config.json").write_text(json.dumps(FILES[True] | change))
        with pytest.raises(InputError, match=line):
            ImageProcessor.of_model(str(tmp_path), tower, DataConfig())
    with pytest.raises(InputError, match=r"data.min_pixels=65536 is above data.max_pixels=4096; .*; set both"):
        processor(True, max_pixels=4096)


def row(content: Any, images: Any = None, **more: Any) -> dict[str, Any]:
    """A row in the layout of verl's geometry3k."""
    return {
        "data_source": "hiyouga/geometry3k",
        "prompt": [{"role": "user", "content": content}] if isinstance(content, (str, list)) else content,
        "images": images,
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "3"},
        "extra_info": {"index": 0},
        **more,
    }


def write(path: Path, rows: Sequence[dict[str, Any]]) -> str:
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(rows)), path)
    else:
        path.write_text("".join(json.dumps(it) + "\n" for it in rows))
    return str(path)


def ids_of(tokenizer: Any, text: str) -> list[int]:
    """Token ids of a text in which `[image 6]` stands for six placeholder tokens between their marks."""

    def pads(match: re.Match[str]) -> str:
        return f"<|vision_start|>{f'<|{match[1]}_pad|>' * int(match[2])}<|vision_end|>"

    return tokenizer(re.sub(r"\[(\w+) (\d+)\]", pads, text), add_special_tokens=False)["input_ids"]


def chat(text: str) -> str:
    return f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize("is_qwen3", [False, True])
def test_geometry3k(tmp_path: Path, tokenizer: Any, processor: Any, theirs: Any, is_qwen3: bool) -> None:
    """The tokens of transformers' Qwen processors: their rule, with the grids of their image processor."""
    pictures = [picture(90, 60), picture(300, 200, 1), picture(200, 300, 2)]
    values = [{"bytes": encoded(image), "path": None} for image in pictures]
    rows = [
        row("<image>Find x.", values[:1]),
        row("No picture."),
        row("Of <image> and <image>, <image>?", [values[0], values[2], values[1]]),
    ]
    path = write(tmp_path / "train.parquet", rows)
    images = processor(is_qwen3)
    data = PromptDataset([path], tokenizer, DataConfig(max_prompt_length=1000), images=images)
    size = {"shortest_edge": images.limits.min_pixels, "longest_edge": images.limits.max_pixels}
    expected = [theirs[is_qwen3](image, size=size, return_tensors="np") for image in pictures]
    grids = [tuple(it["image_grid_thw"][0].tolist()) for it in expected]
    nums = [int(np.prod(grid)) // 4 for grid in grids]
    texts = [
        chat(f"[image {nums[0]}]Find x."),
        chat("No picture."),
        chat(f"Of [image {nums[0]}] and [image {nums[2]}], [image {nums[1]}]?"),
    ]
    pad = tokenizer.convert_tokens_to_ids("<|image_pad|>")
    for number, (text, order) in enumerate(zip(texts, ([0], [], [0, 2, 1]), strict=True)):
        ids = data.prompt_ids(number)
        assert ids.tolist() == ids_of(tokenizer, text)
        items = data.media(number)
        assert [item.grid for item in items] == [grids[place] for place in order]
        for item, place in zip(items, order, strict=True):
            run = slice(item.start, item.start + nums[place])
            assert (ids[run] == pad).all() and ids[item.start - 1] != pad and ids[run.stop] != pad
        for index, place in enumerate(order):
            assert np.array_equal(patches_of(data, images, number, index), expected[place]["pixel_values"])
        assert data.prompt_text(number) == re.sub(r"(<\|image_pad\|>)+", r"\1", tokenizer.decode(ids))
    assert data.media(0)[0].key == data.media(2)[0].key  # the engine encodes equal pictures once
    assert len({item.key for item in data.media(2)}) == 3
    assert data.record(0)["prompt"] == [{"role": "user", "content": "<image>Find x."}]


def test_transformers_processor_gives_the_same_tokens(
    tokenizer: Any, processor: Any, theirs: Any, tmp_path: Path
) -> None:
    """Its constructor needs torchvision for videos, so that its parts are put together here."""
    from transformers.models.qwen2_5_vl.processing_qwen2_5_vl import Qwen2_5_VLProcessor

    if not hasattr(Qwen2_5_VLProcessor, "replace_image_token"):
        pytest.skip("transformers before 5.12 has no separate step from pictures to text")
    whole = object.__new__(Qwen2_5_VLProcessor)
    whole.image_processor, whole.image_token, whole.video_token = theirs[False], "<|image_pad|>", "<|video_pad|>"
    pictures = [picture(90, 60), picture(300, 200, 1)]
    inputs = theirs[False](pictures, return_tensors="np")
    replaced = [whole.replace_image_token(inputs, image_idx=index) for index in range(2)]
    content = [{"type": "image"}, {"type": "text", "text": " or "}, {"type": "image"}]
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
    )
    ids = tokenizer(whole.get_text_with_replacements([text], replaced)[0], add_special_tokens=False)["input_ids"][0]
    path = write(tmp_path / "a.parquet", [row("<image> or <image>", [encoded(image) for image in pictures])])
    data = PromptDataset([path], tokenizer, DataConfig(max_prompt_length=1000), images=processor())
    assert data.prompt_ids(0).tolist() == ids
    assert np.array_equal(
        np.concatenate([patches_of(data, processor(), 0, 0), patches_of(data, processor(), 0, 1)]),
        inputs["pixel_values"],
    )


def test_where_a_picture_may_be(tmp_path: Path, tokenizer: Any, processor: Any) -> None:
    image = picture(56, 56)
    (tmp_path / "files").mkdir()
    image.save(tmp_path / "files" / "a.png")
    absolute = str(tmp_path / "files" / "a.png")
    uri = f"data:image/png;base64,{base64.b64encode(encoded(image)).decode()}"
    paths = ["files/a.png", absolute, f"file://{absolute}", uri]
    values = [
        *paths,
        *({"path": path} for path in paths),
        *({"image": path} for path in paths),
        {"image": {"path": paths[0]}},
    ]
    rows = [row("<image>", [value]) for value in values]
    rows += [row("<image>", values[0])]  # without a list
    rows += [row([{"type": "image"}, {"type": "text", "text": ""}], [absolute])]  # parts
    rows += [row([{"type": "image", "image": absolute}])]  # a part that has the picture
    data = PromptDataset([write(tmp_path / "a.jsonl", rows)], tokenizer, DataConfig(), images=processor())
    expected = ids_of(tokenizer, chat("[image 4]"))
    assert all(data.prompt_ids(number).tolist() == expected for number in range(len(rows)))
    assert len({item.key for number in range(len(rows)) for item in data.media(number)}) == 1
    patches = processor().patches(image)[0]
    assert all(np.array_equal(patches_of(data, processor(), number, 0), patches) for number in range(len(rows)))


def test_pictures_in_prompts_without_a_template(tmp_path: Path, tokenizer: Any, processor: Any) -> None:
    value = [{"bytes": encoded(picture(56, 56))}]
    rows = [
        {"prompt": "a <image>b", "images": value},
        {"prompt": "<|vision_start|><|image_pad|><|vision_end|>", "images": value},
        {"prompt": "none", "images": []},
    ]
    data = PromptDataset([write(tmp_path / "a.parquet", rows)], tokenizer, DataConfig(), images=processor())
    for number, text in enumerate(("a [image 4]b", "[image 4]", "none")):
        assert data.prompt_ids(number).tolist() == [tokenizer.bos_token_id, *ids_of(tokenizer, text)]
    assert [len(data.media(number)) for number in range(3)] == [1, 1, 0]


def test_tags_are_text_in_files_without_pictures(tmp_path: Path, tokenizer: Any, processor: Any) -> None:
    path = write(tmp_path / "a.jsonl", [{"prompt": [{"role": "user", "content": "What is <image> in HTML?"}]}])
    data = PromptDataset([path], tokenizer, DataConfig(), images=processor())
    assert data.prompt_text(0) == chat("What is <image> in HTML?")


def test_pictures_of_one_row_have_own_limits(tmp_path: Path, tokenizer: Any, processor: Any) -> None:
    value = encoded(picture(300, 300))
    values = [{"bytes": value, "max_pixels": 28 * 28 * 9}, {"bytes": value, "max_pixels": None}]
    path = write(tmp_path / "a.parquet", [row("<image><image>", values)])
    data = PromptDataset([path], tokenizer, DataConfig(), images=processor())
    assert [item.grid for item in data.media(0)] == [(1, 6, 6), (1, 22, 22)]
    assert [len(patches_of(data, processor(), 0, index)) for index in range(2)] == [36, 484]


def test_expanded_tokens_count(tmp_path: Path, tokenizer: Any, processor: Any) -> None:
    value = [{"bytes": encoded(picture(140, 140))}]  # 25 tokens
    path = write(tmp_path / "a.parquet", [row("<image>", value), row("1", []), row("<image>1", value)])
    length = len(ids_of(tokenizer, chat("[image 25]")))

    def read(**options: Any) -> PromptDataset:
        return PromptDataset([path], tokenizer, DataConfig(**options), images=processor(**options))

    line = f"row 2: the prompt has {length + 1} tokens with those of its pictures, more than data.max_prompt_length="
    for truncation in ("error", "left"):
        with pytest.raises(InputError, match=f"{line}.* cannot be truncated"):
            read(max_prompt_length=length, truncation=truncation)
    kept = read(max_prompt_length=length, filter_overlong_prompts=True)
    assert (len(kept), kept.num_filtered, kept.num_bad) == (2, 1, 0)
    assert read(max_prompt_length=length, max_pixels=14 * 14 * 16).prompt_lengths.max() == length - 21 + 1


def test_a_model_without_a_tower(tmp_path: Path, tokenizer: Any) -> None:
    value = [{"bytes": encoded(picture(56, 56))}]
    path = write(tmp_path / "a.parquet", [row("1", []), row("<image>", value)])
    with pytest.raises(InputError, match=r"row 1: pictures in 'images', but the model has no vision tower; use a"):
        PromptDataset([path], tokenizer, DataConfig())
    path = write(tmp_path / "b.jsonl", [row("<image>", []), row("1", None)])
    assert PromptDataset([path], tokenizer, DataConfig()).prompt_text(0) == chat("<image>")


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGBA", "CMYK", "YCbCr", "I;16", "EXIF", "JPEG", "MPO"])
def test_pixels_of_every_kind(processor: Any, mode: str) -> None:
    base = picture(8, 6)
    gray = base.convert("L")
    white = Image.new("RGB", base.size, (255, 255, 255))
    if mode == "EXIF":
        exif = Image.Exif()
        exif[274] = 6  # to be turned clockwise
        data, expected = encoded(base, exif=exif), base.transpose(Image.Transpose.ROTATE_270)
    elif mode in ("LA", "RGBA"):
        made = base.convert(mode)
        made.putalpha(picture(8, 6, 1, "L"))
        data = encoded(made)
        white.paste(made.convert("RGBA"), mask=made.getchannel("A"))
        expected = white
    elif mode == "I;16":
        data = encoded(Image.fromarray(np.asarray(gray).astype(np.uint16) * 257))
        expected = gray.convert("RGB")
    elif mode == "P":
        made = base.quantize(7)
        data, expected = encoded(made, transparency=3), made.convert("RGB")
        at = np.asarray(made) == 3
        expected = Image.fromarray(np.where(at[..., None], 255, np.asarray(expected)).astype(np.uint8))
    elif mode in ("JPEG", "MPO"):
        data = encoded(base, mode, **({"save_all": True, "append_images": [gray]} if mode == "MPO" else {}))
        assert Image.open(io.BytesIO(data)).format == mode
        expected = Image.open(io.BytesIO(data)).convert("RGB")
    else:
        made = base.convert(mode)
        kind = "PNG" if mode in ("1", "L") else "TIFF"
        data, expected = encoded(made, kind), made.convert("RGB")
    found = processor().open(data)
    assert found.mode == "RGB"
    assert np.array_equal(np.asarray(found), np.asarray(expected))


def truncated() -> bytes:
    return encoded(picture(64, 64))[:5000]


def animation() -> bytes:
    return encoded(picture(8, 8), "GIF", save_all=True, append_images=[picture(8, 8, 1)])


def no_pixels() -> bytes:
    data = bytearray(encoded(picture(8, 8), "BMP"))
    data[18:22] = bytes(4)
    return bytes(data)


def of_header(width: int, height: int) -> bytes:
    """A PNG whose header gives this size. Its pixels are too few, and are not decoded."""
    import zlib

    data = bytearray(encoded(picture(8, 8)))
    data[16:24] = width.to_bytes(4, "big") + height.to_bytes(4, "big")
    data[29:33] = zlib.crc32(bytes(data[12:29])).to_bytes(4, "big")
    return bytes(data)


BAD = {
    "truncated": (
        truncated(),
        r"found a file that cannot be decoded \(OSError: .*truncated.*\); expected a whole picture",
    ),
    "text": (b"no picture at all", r"found b'no picture at al'; expected a picture \(AVIF, BMP,"),
    "postscript": (
        b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n",
        r"found b'%!PS-Adobe-3.0 E'; expected a picture",
    ),
    "numbers": ([1, 2, 3], r"found list '\[1, 2, 3\]'; expected the bytes or the path of a picture"),
    "null": (None, r"found NoneType 'None'; expected the bytes or the path of a picture"),
    "empty": (b"", r"found no bytes; expected those of a picture"),
    "no pixels": (no_pixels(), r"(found 0 x 8 pixels; expected at least one|cannot be decoded|found b'BM)"),
    "bomb": (of_header(60_000, 60_000), r"found 60000 x 60000 pixels; expected at most data.max_image_pixels=89478485"),
    "animation": (animation(), r"found a GIF of 2 frames; expected one; a video is a list of frames"),
    "strip": (encoded(picture(402, 2)), r"found 402 x 2 pixels; expected an aspect ratio of at most 200"),
    "missing": ("gone.png", r"found no file '.*gone.png'; expected a picture"),
    "remote": (
        "https://example.org/a.png",
        r"found the address 'https://.*'; expected a local file: download it first",
    ),
    "keys": ({"file": "a.png"}, r"found a mapping with the keys file; expected the bytes or"),
    "base64": ("data:image/png;base64,%", r"found 'data:image/png;base64,%'; expected data:image/...;base64"),
    "limits": ({"path": "x", "min_pixels": "9"}, r"found min_pixels, max_pixels = \['9', None\]; expected positive"),
    "order": ({"path": "x", "min_pixels": 9, "max_pixels": 8}, r"found min_pixels=9 above max_pixels=8; expected"),
    "resized": ({"path": "x", "resized_height": 28}, r"found resized_height=28; expected min_pixels and max_pixels"),
    "floats": (encoded(Image.new("F", (8, 8)), "TIFF"), r"found pixels that are floating-point numbers; expected 8 or"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_picture(processor: Any, tmp_path: Path, name: str) -> None:
    value, line = BAD[name]
    images = processor()
    (tmp_path / "x").write_bytes(encoded(picture(56, 56)))
    with pytest.raises(BadImage, match=line) as error:
        images._limits_of(value)
        images.open(value, str(tmp_path))
    assert "\n" not in str(error.value)


def test_rows_with_bad_pictures(tmp_path: Path, tokenizer: Any, processor: Any, caplog: Any) -> None:
    good = {"bytes": encoded(picture(56, 56)), "path": None}
    names = [name for name, (value, _) in BAD.items() if isinstance(value, bytes)]
    bad = [({"bytes": BAD[name][0], "path": None}, BAD[name][1]) for name in names]
    bad += [({"bytes": None, "path": value}, BAD[name][1]) for name in ("missing", "remote") for value in BAD[name][:1]]
    rows = [row("<image><image>", [good, value]) for value, _ in bad]
    lines = [f"image 1: {line}" for _, line in bad]
    for content, values, line in (
        ("<image>", [], r"found 1 <image> in the messages, and 0 in 'images'; expected equal numbers"),
        ("no tag", [good], r"found 0 <image> in the messages, and 1 in 'images'; expected equal numbers"),
        ("<image><image>", [good], r"found 2 <image> in the messages, and 1 in 'images'"),
        ("<video>", [], r"found 1 <video> in the messages, and 0 in 'videos'"),
        (
            "<|image_pad|><image>",
            [good],
            r"found 2 image and 0 video placeholder tokens after the chat template; expected 1",
        ),
    ):
        rows.append(row(content, values))
        lines.append(line)
    for number, line in enumerate(lines):
        path = write(tmp_path / "bad.parquet", [row("<image>", [good]), rows[number]])
        with pytest.raises(
            InputError, match=rf"bad.parquet: row 1: {line}.*; remove the row, or set data.bad_images=skip"
        ):
            PromptDataset([path], tokenizer, DataConfig(), images=processor())
    mixed = [it for bad_row in rows for it in (bad_row, row("<image>", [good]))]
    path = write(tmp_path / "mixed.parquet", mixed * 2)
    with caplog.at_level(logging.WARNING):
        data = PromptDataset([path], tokenizer, DataConfig(bad_images="skip"), images=processor())
    assert (len(data), data.num_bad, data.num_filtered) == (2 * len(rows), 2 * len(rows), 0)
    assert [data.uid(number, 0) for number in range(2)] == ["mixed.parquet:1:0", "mixed.parquet:3:0"]
    assert len(patches_of(data, processor(), len(data) - 1, 0)) == 16
    written = [record.getMessage() for record in caplog.records]
    assert len(written) == 21
    assert all(
        re.search(rf"dropped .*mixed.parquet: row {2 * number}: {line}", written[number])
        for number, line in enumerate(lines)
    )
    assert written[-1] == f"dropped {2 * len(rows)} rows with bad pictures; the first 20 are above"
    path = write(tmp_path / "all.parquet", rows)
    with pytest.raises(InputError, match=f"empty dataset: {len(rows)} of {len(rows)} rows have bad pictures"):
        PromptDataset([path], tokenizer, DataConfig(bad_images="skip"), images=processor())


# The assistant's turns are marked as in test_conversations.py; without the marks they are found by differences.
MARKED = TEMPLATE.replace(
    "<|im_start|>{{ m.role }}\n",
    "<|im_start|>{{ m.role }}{{ '\n' }}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|im_end|>"
    "{% endgeneration %}{{ '\n' }}{% else %}",
).replace("<|im_end|>\n{% endfor %}", "<|im_end|>{{ '\n' }}{% endif %}{% endfor %}")


@pytest.mark.parametrize("template", [MARKED, TEMPLATE], ids=["marks", "differences"])
def test_conversations_with_pictures(tmp_path: Path, tokenizer: Any, processor: Any, template: str) -> None:
    small, large = encoded(picture(56, 56)), encoded(picture(140, 56, 1))
    turns = ["<image>And <image>?", "A.", "<image>", "B and C."]
    roles = ["user", "assistant"] * 2
    messages = [{"role": role, "content": text} for role, text in zip(roles, turns, strict=True)]
    rows = [
        {"messages": messages, "images": [{"bytes": it} for it in (small, large, small)]},
        {"messages": [{"role": "user", "content": "none"}, messages[1]], "images": []},
    ]
    cfg = DataConfig(chat_template=template, max_prompt_length=200, max_response_length=200)
    data = Conversations(write(tmp_path / "a.parquet", rows), tokenizer, cfg, "messages", "all", images=processor())
    shown = ["[image 4]And [image 10]?", "A.", "[image 4]", "B and C."]
    ids, has_loss = list[int](), list[bool]()
    for role, text in zip(roles, shown, strict=True):
        for piece, loss in ((f"<|im_start|>{role}\n", 0), (f"{text}<|im_end|>", role == "assistant"), ("\n", 0)):
            ids += ids_of(tokenizer, piece)
            has_loss += [bool(loss)] * (len(ids) - len(has_loss))
    prompt, response, mask = data.sequence(0)
    assert [*prompt.tolist(), *response.tolist()] == ids
    assert [0] * len(prompt) + mask.tolist() == [int(loss) for loss in has_loss]
    pads = [place for place, token in enumerate(ids) if token == tokenizer.convert_tokens_to_ids("<|image_pad|>")]
    items = data.media(0)
    assert [item.start for item in items] == [pads[0], pads[4], pads[14]]
    assert items[2].start > len(prompt)  # it is in the response, without loss
    assert (items[0].key, items[0].grid) == (items[2].key, items[2].grid)
    assert [len(patches_of(data, processor(), 0, index)) for index in range(3)] == [16, 40, 16]
    assert data.media(1) == []
    assert tokenizer.decode(data.sequence(1)[1][:3]) == "A.<|im_end|>"


def test_a_picture_in_an_answer_has_no_loss(tmp_path: Path, tokenizer: Any, processor: Any) -> None:
    messages = [{"role": "user", "content": "Draw."}, {"role": "assistant", "content": "Here: <image>"}]
    path = write(tmp_path / "a.parquet", [{"messages": messages, "images": [encoded(picture(56, 56))]}])
    data = Conversations(path, tokenizer, DataConfig(), "messages", "all", images=processor())
    _, response, mask = data.sequence(0)
    shown = tokenizer.decode(response[mask == 1])
    assert shown == "Here: <|vision_start|><|vision_end|><|im_end|>"


def test_bad_conversations(tmp_path: Path, tokenizer: Any, processor: Any, caplog: Any) -> None:
    def talk(text: str) -> list[dict[str, str]]:
        return [{"role": "user", "content": text}, {"role": "assistant", "content": "A."}]

    value = encoded(picture(280, 280))  # 100 tokens
    rows = [
        {"messages": talk("<image>"), "images": [value]},
        {"messages": talk("<image>"), "images": [truncated()]},
        {"messages": talk("<image><image>"), "images": [value]},
    ]
    path = write(tmp_path / "a.parquet", rows)
    with pytest.raises(InputError, match=r"a.parquet: row 1: image 0: found a file that cannot .*data.bad_images=skip"):
        Conversations(path, tokenizer, DataConfig(), "messages", "all", images=processor())
    options: dict[str, Any] = {"messages_key": "messages", "answer_key": "answer", "turns": "all"}
    with caplog.at_level(logging.WARNING):
        data = SftDataset([path, path], tokenizer, DataConfig(bad_images="skip"), **options, images=processor())
    assert (len(data), data.num_bad, data.num_filtered) == (2, 4, 0)
    assert len(caplog.records) == 4
    assert len(data.media(1)) == 1 and patches_of(data, processor(), 1, 0).shape == (400, 1176)
    first = SftDataset(
        [path, path], tokenizer, DataConfig(bad_images="skip"), **options, max_samples=4, images=processor()
    )
    assert first.file_sizes == [1, 1]
    for truncation in ("error", "right"):
        short = DataConfig(max_prompt_length=50, max_response_length=50, truncation=truncation, bad_images="skip")
        with pytest.raises(
            InputError, match=r"row 0: the conversation has .* tokens with those of its pictures, .* cannot"
        ):
            Conversations(path, tokenizer, short, "messages", "all", images=processor())
    with pytest.raises(InputError, match="row 0: pictures in 'images', but the model has no vision tower"):
        Conversations(path, tokenizer, DataConfig(), "messages", "all")


def test_answers_to_pictures(tmp_path: Path, tokenizer: Any, processor: Any) -> None:
    value = [{"bytes": encoded(picture(56, 56))}]
    parts = [{"type": "image"}, {"type": "text", "text": "?"}]
    chosen = [{"role": "user", "content": parts}, {"role": "assistant", "content": "A."}]
    path = write(tmp_path / "a.jsonl", [{"prompt": chosen[:1], "videos": None, "chosen": chosen, "rejected": "B."}])
    columns = {"chosen_key": "chosen", "rejected_key": "rejected"}
    with pytest.raises(InputError, match="row 0: found 1 <image> in the messages, and 0 in 'images'"):
        AnswerDataset([path], tokenizer, DataConfig(), columns, images=processor())
    rows = [row("<image>?", value, answer="A."), row("1", [], answer="2")]
    options: dict[str, Any] = {
        "messages_key": "messages",
        "answer_key": "answer",
        "turns": "all",
        "images": processor(),
    }
    data = SftDataset([write(tmp_path / "a.parquet", rows)], tokenizer, DataConfig(), **options)
    prompt, response, mask = data.sequence(0)
    assert prompt.tolist() == ids_of(tokenizer, chat("[image 4]?"))
    assert tokenizer.decode(response) == "A.<|im_end|>" and mask.all()
    assert (len(data.media(0)), patches_of(data, processor(), 0, 0).shape, data.media(1)) == (1, (16, 1176), [])
    bad = write(tmp_path / "b.parquet", [row("<image>?", value, answer="<|image_pad|>")])
    with pytest.raises(InputError, match="row 0: the answer in 'answer' has the placeholder token of a picture"):
        SftDataset([bad], tokenizer, DataConfig(), **options)


def video_patches(frames: list[Image.Image], size: tuple[int, int], is_qwen3: bool) -> np.ndarray:
    """Patches (time, patches of a group, width) of transformers' video processors, whose resizing needs torchvision."""
    file = FILES[is_qwen3]
    patch = file["patch_size"]
    frames = frames + frames[-1:] * (len(frames) % 2)
    resized = np.stack([np.asarray(frame.resize(size, Image.Resampling.BICUBIC)) for frame in frames])
    pixels = (resized / 255 - np.array(file["image_mean"])) / np.array(file["image_std"])
    time, height, width = len(frames) // 2, size[1] // patch, size[0] // patch
    split = pixels.transpose(0, 3, 1, 2).reshape(time, 2, 3, height // 2, 2, patch, width // 2, 2, patch)
    return split.transpose(0, 3, 6, 4, 7, 2, 1, 5, 8).reshape(time, height * width, -1)


@pytest.mark.parametrize("num", [4, 5])
def test_videos_of_qwen2_5(tmp_path: Path, tokenizer: Any, processor: Any, num: int) -> None:
    """A video is one item; its interval is the seconds between two groups of frames x 2 positions per second."""
    frames = [picture(120, 60, seed) for seed in range(num)]
    values = [{"bytes": encoded(frame)} for frame in frames]
    video = {"video": values, "fps": 4.0, "max_pixels": 140 * 64, "min_pixels": 56 * 56}
    rows = [row("<video>, <image>", values[:1], videos=[video]), row("<video>", [], videos=[{"video": values[:2]}])]
    path = write(tmp_path / "a.parquet", rows)
    data = PromptDataset([path], tokenizer, DataConfig(max_prompt_length=999), images=processor())
    groups = -(-num // 2)
    text = chat(f"[video {groups * 8}], [image 8]")
    assert data.prompt_ids(0).tolist() == ids_of(tokenizer, text)
    whole, still = data.media(0)
    assert (whole.grid, whole.interval, still.grid, still.interval) == ((groups, 4, 8), 1.0, (1, 4, 8), 1.0)
    assert data.prompt_ids(0)[whole.start - 1] == tokenizer.convert_tokens_to_ids("<|vision_start|>")
    expected = video_patches(frames, (112, 56), False)
    assert np.allclose(patches_of(data, processor(), 0, 0), np.concatenate(expected), atol=1e-6)
    assert np.array_equal(patches_of(data, processor(), 0, 1), processor().patches(frames[0])[0])
    (plain,) = data.media(1)  # at least 128 tokens, and two frames per second
    assert (plain.grid, plain.interval) == ((1, 16, 32), 2.0)


@pytest.mark.parametrize("num", [4, 5])
def test_videos_of_qwen3(tmp_path: Path, tokenizer: Any, processor: Any, num: int) -> None:
    """Each two frames are an item, after their mean time as transformers' processor computes it."""
    from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor

    frames = [picture(120, 60, seed) for seed in range(num)]
    values = [encoded(frame) for frame in frames]
    video = {"video": values, "sample_fps": 4.0, "max_pixels": 140 * 64, "min_pixels": 56 * 56}
    times = Qwen3VLProcessor._calculate_timestamps(None, list(range(num)), 4.0, 2)
    shown = "".join(f"<{time:.1f} seconds>[video 8]" for time in times)
    rows = [row("<image><video>.", values[:1], videos=[video]), row("<video>", videos=[video])]
    plain = [it | {"prompt": it["prompt"][0]["content"]} for it in rows]
    talk = [{"role": "assistant", "content": "A."}]
    talks = [{"messages": it["prompt"] + talk, "images": it["images"], "videos": it["videos"]} for it in rows]
    cfg = DataConfig(max_prompt_length=999)
    images = processor(True)
    text = f"[image {np.prod(images.grid(120, 60)) // 4}]{shown}."
    data = PromptDataset([write(tmp_path / "a.parquet", rows)], tokenizer, cfg, images=images)
    assert data.prompt_ids(0).tolist() == ids_of(tokenizer, chat(text))
    strings = PromptDataset([write(tmp_path / "b.parquet", plain)], tokenizer, cfg, images=images)
    assert strings.prompt_ids(0).tolist() == [tokenizer.bos_token_id, *ids_of(tokenizer, text)]
    spoken = Conversations(write(tmp_path / "c.parquet", talks), tokenizer, cfg, "messages", "all", images=images)
    assert spoken.sequence(0)[0].tolist() == data.prompt_ids(0).tolist()
    items = data.media(0)
    assert [item.grid for item in items[1:]] == [(1, 4, 8)] * len(times)
    assert {item.interval for item in items} == {1.0}
    expected = video_patches(frames, (128, 64), True)
    for found in (data, strings, spoken):
        for number, patches in enumerate(expected):
            assert np.allclose(patches_of(found, images, 0, 1 + number), patches, atol=1e-6)
    assert [item.key for item in data.media(1)] == [item.key for item in items[1:]]
    assert len({item.key for item in items}) == len(items)


def test_bad_videos(tmp_path: Path, tokenizer: Any, processor: Any) -> None:
    good = base64.b64encode(encoded(picture(56, 56))).decode()
    frame = f"data:image/png;base64,{good}"
    for number, (videos, line) in enumerate(
        (
            (
                "clip.mp4",
                r"video 0: found str 'clip.mp4'; expected a list of frames, .*: extract the frames of video files",
            ),
            ([{"video": "clip.mp4"}], r"video 0: found str 'clip.mp4'; expected a list of frames"),
            ([[]], r"video 0: found no frames; expected"),
            ([[frame, "gone.png"]], r"video 0: frame 1: found no file '.*gone.png'; expected a picture"),
            ([{"video": [frame], "fps": 0}], r"video 0: found fps=0; expected frames per second, above 0"),
            ([{"video": [frame], "min_pixels": 0}], r"video 0: found min_pixels, max_pixels = \[0, None\]"),
            ([[frame], [frame]], r"found 1 <video> in the messages, and 2 in 'videos'"),
        )
    ):
        path = write(tmp_path / f"{number}.jsonl", [row("<video>", videos=videos)])
        for is_qwen3 in (False, True):
            with pytest.raises(InputError, match=rf"row 0: {line}"):
                PromptDataset([path], tokenizer, DataConfig(max_prompt_length=999), images=processor(is_qwen3))


def test_a_file_that_changes(tmp_path: Path, tokenizer: Any, processor: Any) -> None:
    path = tmp_path / "a.png"
    path.write_bytes(encoded(picture(56, 56)))
    data = PromptDataset(
        [write(tmp_path / "a.jsonl", [row("<image>", ["a.png"])])], tokenizer, DataConfig(), images=processor()
    )
    path.write_bytes(encoded(picture(84, 56)))
    with pytest.raises(
        InputError, match=r"row 0: item 0: found a picture of \(1, 4, 6\) patches; expected \(1, 4, 4\)"
    ):
        patches_of(data, processor(), 0, 0)
    path.unlink()
    with pytest.raises(InputError, match=r"row 0: item 0: found no file .*; it was readable when the job started"):
        patches_of(data, processor(), 0, 0)


@pytest.mark.parametrize("cache", [2**28, 70_000, 1])
def test_pictures_stay_in_the_file(
    tmp_path: Path, tokenizer: Any, processor: Any, monkeypatch: Any, caplog: Any, cache: int
) -> None:
    monkeypatch.setattr("hpcrl.data.row_file.CACHE_BYTES", cache)
    rows = [row("<image>", [encoded(picture(56, 28 * (number + 2), number))]) for number in range(7)]
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=2)
    file = RowFile(str(path), {"images"})
    assert file.columns == list(rows[0]) and "images" not in file[2] and len(file) == 7
    everything = RowFile(str(path)).column("images")
    for start, stop in ((0, 7), (2, 4), (5, 6), (3, 3), (0, 1)):
        assert file.column("images", start, stop) == everything[start:stop]
    data = PromptDataset([str(path)], tokenizer, DataConfig(), images=processor())
    assert [patches_of(data, processor(), number, 0).shape[0] for number in (6, 0, 3)] == [64, 16, 40]
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == (2 if cache == 1 else 0)  # one for each opened file
    assert all("a.parquet: a row group has 0 MiB in 'images', and a row in another one reads" in line for line in lines)


def test_a_job_without_pictures_imports_neither_pillow_nor_image_processors(tmp_path: Path) -> None:
    """transformers' tokenizers import PIL.Image by themselves if it is installed."""
    path = write(tmp_path / "a.parquet", [{"prompt": [{"role": "user", "content": "1"}]}])
    program = f"""
import sys
import hpcrl.data.conversations, hpcrl.data.images, hpcrl.data.prompts
from hpcrl.config.schema import DataConfig
from hpcrl.data.tokenizer import load_tokenizer
print("PIL" in sys.modules, "transformers" in sys.modules)
tokenizer = load_tokenizer("configs/tokenizer")
before = set(sys.modules)
hpcrl.data.prompts.PromptDataset([{path!r}], tokenizer, DataConfig())
print([name for name in sys.modules if "image_processing" in name or name not in before and name.startswith("PIL")])
"""
    root = Path(__file__).parents[2]
    run = subprocess.run([sys.executable, "-c", program], cwd=root, capture_output=True, text=True, check=True)
    assert run.stdout.split("\n")[:2] == ["False False", "[]"]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_loader(tmp_path: Path, tokenizer: Any, processor: Any, num_workers: int) -> None:
    pictures = [picture(56, 28 * (number + 2), number) for number in range(4)]
    rows = [row("<image><image>", [encoded(it), encoded(pictures[0])]) for it in pictures] + [row("none", [])]
    path = write(tmp_path / "a.parquet", rows)
    images = processor()
    data = PromptDataset([path], tokenizer, DataConfig(), images=images)
    loader = ImageLoader(data, images, num_workers)
    try:
        loader.submit(pictures_of(data, [0, 4, 3, 0]))
        loader.submit(pictures_of(data, [3, 1]))
        for number in (1, 0, 3, 2, 3):  # 2 was not submitted, 3 is taken twice
            for index, image in enumerate((pictures[number], pictures[0])):
                assert np.array_equal(loader.take_patches(number, index), images.patches(image)[0])
    finally:
        loader.close()
        loader.close()


def pictures_of(data: PromptDataset, rows: list[int]) -> list[tuple[int, int]]:
    return [(row, index) for row in rows for index in range(len(data.media(row)))]


def test_pictures_are_loaded_ahead(
    tmp_path: Path, tokenizer: Any, processor: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By processes alone; what no step takes is dropped when the next pictures are asked for."""
    images, pictures = processor(), [picture(56, 28 * (number + 2), number) for number in range(4)]
    rows = [row("<image>", [encoded(it)]) for it in pictures]
    data = PromptDataset([write(tmp_path / "a.parquet", rows)], tokenizer, DataConfig(), images=images)
    loader = ImageLoader(data, images, 2)
    monkeypatch.delattr(PromptDataset, "where")
    try:
        for rows_ahead in ([0, 1], [1, 2], [2, 3, 2]):
            loader.load_ahead(rows_ahead)
        column = loader.column([3, 2])
        for number, image in enumerate((pictures[3], pictures[2])):
            assert np.array_equal(column.values.row(number), images.patches(image)[0].ravel())
        with pytest.raises(AttributeError):
            loader.take_patches(1, 0)
    finally:
        loader.close()


def test_a_loader_whose_processes_fail(tmp_path: Path, tokenizer: Any, processor: Any) -> None:
    images, path = processor(), tmp_path / "a.png"
    path.write_bytes(encoded(picture(56, 56)))
    rows = [row("<image>", [str(path)]), row("<image>", ["b.png"])]
    (tmp_path / "b.png").write_bytes(encoded(picture(84, 56)))
    data = PromptDataset([write(tmp_path / "a.jsonl", rows)], tokenizer, DataConfig(), images=images)
    loader = ImageLoader(data, images, 1)
    try:
        path.unlink()
        loader.submit(pictures_of(data, [0, 1]))
        with pytest.raises(InputError, match=r"row 0: item 0: found no file .*; it was readable when the job started"):
            loader.take_patches(0, 0)
        assert loader.take_patches(1, 0).shape == (24, 1176)
        for worker in loader._pool._workers:
            os.kill(worker.pid, signal.SIGKILL)
        loader.submit(pictures_of(data, [1]))
        assert loader.take_patches(1, 0).shape == (24, 1176)
    finally:
        loader.close()
