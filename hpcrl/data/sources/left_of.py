"""Pictures of two squares of different colours in a row: which one is left, drawn; needs no download."""

import random

from hpcrl.data.drawing import COLOURS, IMAGE, SIDE, blank, fill, picture_row, same_picture
from hpcrl.data.source import Row, SyntheticSource

TEMPLATE = "Which is left, {first} or {second}?"
SQUARE = 7
CELL = 8  # pixels; a square has one to itself


def draw(rng: random.Random) -> Row:
    colours = rng.sample(list(COLOURS), 2)
    picture = blank()
    places = range(SIDE // CELL)
    row = rng.choice(places)
    for column, colour in zip(sorted(rng.sample(places, 2)), colours, strict=True):
        top, left = (CELL * place + rng.randrange(CELL - SQUARE + 1) for place in (row, column))
        fill(picture, top, left, SQUARE, SQUARE, colour)
    first, second = rng.sample(colours, 2)
    return picture_row("left_of", picture, TEMPLATE.format(first=first, second=second), colours[0])


SOURCE = SyntheticSource(draw=draw, template=f"{IMAGE}{TEMPLATE}", problem=same_picture)
