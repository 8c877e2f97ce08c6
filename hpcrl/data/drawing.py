"""Small pictures of coloured rectangles, as PNG, and rows that ask about them."""

from __future__ import annotations

import io
from collections.abc import Mapping

import numpy as np

from hpcrl.data.duplicates import picture_key
from hpcrl.data.source import Row, rule_row

SIDE = 32  # pixels
COLOURS: Mapping[str, tuple[int, int, int]] = {
    "red": (230, 30, 30),
    "green": (20, 200, 60),
    "blue": (50, 90, 255),
    "yellow": (250, 220, 40),
    "pink": (250, 120, 210),
    "white": (255, 255, 255),
}
IMAGE = "<image>"  # where a prompt's text has the picture, as in verl's files


def blank() -> np.ndarray:
    """A black picture, uint8 (SIDE, SIDE, 3): row, column, channel."""
    return np.zeros((SIDE, SIDE, 3), dtype=np.uint8)


def fill(picture: np.ndarray, top: int, left: int, height: int, width: int, colour: str) -> None:
    """Draw a rectangle."""
    picture[top : top + height, left : left + width] = COLOURS[colour]


def png(picture: np.ndarray) -> bytes:
    """The bytes of a PNG file; the same pixels and version of Pillow make the same bytes."""
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(picture).save(file, format="PNG")
    return file.getvalue()


def picture_row(data_source: str, picture: np.ndarray, question: str, answer: str) -> Row:
    """A row with one picture, whose answer the rule for `data_source` compares exactly."""
    row = rule_row(data_source, f"{IMAGE}{question}", answer, answer)
    return row | {"ability": "vision", "images": [{"bytes": png(picture)}]}


def same_picture(row: Row) -> str:
    """Questions about the same picture are one problem."""
    return picture_key(row["images"])
