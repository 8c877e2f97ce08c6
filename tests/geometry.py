"""Problems with random pictures, in the layouts in which geometry3k is published and verl prepares it."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
from PIL import Image

SIDE = 24  # pixels


def picture(seed: int, width: int = SIDE, height: int = SIDE) -> dict[str, Any]:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, "PNG")
    return {"bytes": stream.getvalue(), "path": None}


def write_geometry(path: Path, num: int) -> None:
    """Rows in verl's layout, with one picture, two, or none; some pictures are in several rows."""
    rows = []
    for number in range(num):
        images = [picture(number // 2), picture(100 + number, 2 * SIDE, SIDE)][: (1, 2, 0)[number % 3]]
        rows.append(
            {
                "data_source": "hiyouga/geometry3k",
                "prompt": [{"role": "user", "content": "<image>" * len(images) + f"What is {number}?"}],
                "images": images,
                "ability": "math",
                "reward_model": {"style": "rule", "ground_truth": str(number)},
                "extra_info": {"split": "train", "index": number, "answer": str(number), "question": "What?"},
                "answer": str(number),
                "wrong": str(number + 1),
            }
        )
    pyarrow.parquet.write_table(pa.Table.from_pylist(rows), path)
