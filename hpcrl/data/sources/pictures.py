"""Rows of count_squares, left_of, two_digits and maze, mixed; needs no download."""

import random

from hpcrl.data.drawing import IMAGE, same_picture
from hpcrl.data.source import Row, SyntheticSource
from hpcrl.data.sources import count_squares, left_of, maze, two_digits

TASKS = (count_squares, left_of, two_digits, maze)


def draw(rng: random.Random) -> Row:
    return rng.choice(TASKS).draw(rng)


SOURCE = SyntheticSource(draw=draw, template=f"{IMAGE}{{question}}", problem=same_picture)
