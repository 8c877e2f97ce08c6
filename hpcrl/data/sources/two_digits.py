"""Pictures of a number from 10 to 99, which is to be read, drawn; needs no download."""

import random

from hpcrl.data.drawing import COLOURS, IMAGE, SIDE, blank, fill, picture_row, same_picture
from hpcrl.data.source import Row, SyntheticSource

QUESTION = "What number is it?"
NUMBERS = range(10, 100)
HALF = SIDE // 2  # a digit's width and height, with the space around it
HEIGHT, WIDTH, STROKE = 13, 10, 2
LOWER, MIDDLE = 11, 6  # top of the lower horizontal stroke and of the middle one; a vertical stroke is 7 long
# top, left, height and width of the seven segments, clockwise from the top one; the last one is in the middle
SEGMENTS = (
    (0, 0, STROKE, WIDTH),
    (0, WIDTH - STROKE, MIDDLE + 1, STROKE),
    (MIDDLE, WIDTH - STROKE, MIDDLE + 1, STROKE),
    (LOWER, 0, STROKE, WIDTH),
    (MIDDLE, 0, MIDDLE + 1, STROKE),
    (0, 0, MIDDLE + 1, STROKE),
    (MIDDLE - 1, 0, STROKE, WIDTH),
)
LIT = ("012345", "12", "01346", "01236", "1256", "02356", "023456", "012", "0123456", "012356")  # of digits 0 to 9


def draw(rng: random.Random) -> Row:
    number = rng.choice(NUMBERS)
    picture = blank()
    line = rng.randrange(2)
    for place, digit in enumerate(divmod(number, 10)):
        top = HALF * line + rng.randrange(HALF - HEIGHT + 1)
        left = HALF * place + rng.randrange(HALF - WIDTH + 1)
        colour = rng.choice(list(COLOURS))
        for segment in map(int, LIT[digit]):
            down, right, height, width = SEGMENTS[segment]
            fill(picture, top + down, left + right, height, width, colour)
    return picture_row("two_digits", picture, QUESTION, str(number))


SOURCE = SyntheticSource(draw=draw, template=f"{IMAGE}{QUESTION}", problem=same_picture)
