"""Pictures of three squares of different colours: which one is left of another, drawn; needs no download."""

import random

from hpcrl.data.drawing import COLOURS, IMAGE, SIDE, blank, fill, picture_row, same_picture
from hpcrl.data.source import Row, SyntheticSource

TEMPLATE = "What is left of {colour}?"
COUNT, SQUARE = 3, 7
COLUMN = 8  # pixels; no two squares share one


def draw(rng: random.Random) -> Row:
    colours = rng.sample(list(COLOURS), COUNT)
    picture = blank()
    for column, colour in zip(sorted(rng.sample(range(SIDE // COLUMN), COUNT)), colours, strict=True):
        top, left = rng.randrange(SIDE - SQUARE + 1), COLUMN * column + rng.randrange(COLUMN - SQUARE + 1)
        fill(picture, top, left, SQUARE, SQUARE, colour)
    place = rng.randrange(1, COUNT)
    return picture_row("left_of", picture, TEMPLATE.format(colour=colours[place]), colours[place - 1])


SOURCE = SyntheticSource(draw=draw, template=f"{IMAGE}{TEMPLATE}", problem=same_picture)
