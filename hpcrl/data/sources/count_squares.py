"""Pictures of one to eight squares, which are to be counted, drawn; needs no download."""

import random

from hpcrl.data.drawing import COLOURS, IMAGE, SIDE, blank, fill, picture_row, same_picture
from hpcrl.data.source import Row, SyntheticSource

QUESTION = "How many squares?"
COUNTS = range(1, 9)
CELL = 8  # pixels; a square has one to itself
SIDES = range(4, 8)


def draw(rng: random.Random) -> Row:
    count = rng.choice(COUNTS)
    picture, per_line = blank(), SIDE // CELL
    for cell in rng.sample(range(per_line**2), count):
        row, column = divmod(cell, per_line)
        side = rng.choice(SIDES)
        top, left = (CELL * place + rng.randrange(CELL - side) for place in (row, column))
        fill(picture, top, left, side, side, rng.choice(list(COLOURS)))
    return picture_row("count_squares", picture, QUESTION, str(count))


SOURCE = SyntheticSource(draw=draw, template=f"{IMAGE}{QUESTION}", problem=same_picture)
