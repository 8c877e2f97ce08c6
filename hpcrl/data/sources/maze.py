"""Pictures of a maze: the length of the path from green to red, drawn; needs no download."""

import random

from hpcrl.data.drawing import IMAGE, SIDE, blank, fill, picture_row, same_picture
from hpcrl.data.source import Row, SyntheticSource

QUESTION = "How many steps to red?"
CELL = 4  # pixels
PLACES = range(SIDE // CELL)
STEPS = range(1, 10)
DEAD_ENDS = (0, 0, 1, 2)  # drawn from

Cell = tuple[int, int]


def draw(rng: random.Random) -> Row:
    steps = rng.choice(STEPS)
    path: list[Cell] = []
    while len(path) <= steps:
        path = [(rng.choice(PLACES), rng.choice(PLACES))]
        while len(path) <= steps and (nexts := walls_to_open(path[-1], path)):
            path.append(rng.choice(nexts))
    cells = list(path)
    for _ in range(rng.choice(DEAD_ENDS)):
        if nexts := walls_to_open(rng.choice(path[:-1]), cells):
            cells.append(rng.choice(nexts))
    picture = blank()
    for colour, part in (("white", cells), ("green", path[:1]), ("red", path[-1:])):
        for row, column in part:
            fill(picture, CELL * row, CELL * column, CELL, CELL, colour)
    return picture_row("maze", picture, QUESTION, str(steps))


def walls_to_open(cell: Cell, opened: list[Cell]) -> list[Cell]:
    """Neighbours of an open cell that have no other open neighbour, so that one path leads to each cell."""
    return [near for near in neighbours(cell) if near not in opened and sum(n in opened for n in neighbours(near)) == 1]


def neighbours(cell: Cell) -> list[Cell]:
    row, column = cell
    around = ((row - 1, column), (row + 1, column), (row, column - 1), (row, column + 1))
    return [(row, column) for row, column in around if row in PLACES and column in PLACES]


SOURCE = SyntheticSource(draw=draw, template=f"{IMAGE}{QUESTION}", problem=same_picture)
