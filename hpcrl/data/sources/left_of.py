"""Pictures of three squares of different colours in a row: which one is left of another, drawn; needs no download."""

import random

from hpcrl.data.drawing import COLOURS, IMAGE, SIDE, blank, fill, picture_row, same_picture
from hpcrl.data.source import Row, SyntheticSource

TEMPLATE = "What is left of {colour}?"
COUNT, SQUARE = 3, 7
CELL = 8  # pixels; a square has one to itself


def draw(rng: random.Random) -> Row:
    colours = rng.sample(list(COLOURS), COUNT)
    picture = blank()
    row, first = rng.randrange(SIDE // CELL), rng.randrange(SIDE // CELL - COUNT + 1)
    for column, colour in enumerate(colours, start=first):
        top, left = (CELL * place + rng.randrange(CELL - SQUARE + 1) for place in (row, column))
        fill(picture, top, left, SQUARE, SQUARE, colour)
    place = rng.randrange(1, COUNT)
    return picture_row("left_of", picture, TEMPLATE.format(colour=colours[place]), colours[place - 1])


SOURCE = SyntheticSource(draw=draw, template=f"{IMAGE}{TEMPLATE}", problem=same_picture)
