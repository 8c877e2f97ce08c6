"""Pictures of a maze: the length of the shortest path from green to red, drawn; needs no download."""

import random
from collections.abc import Collection

from hpcrl.data.drawing import IMAGE, SIDE, blank, fill, picture_row, same_picture
from hpcrl.data.source import Row, SyntheticSource

QUESTION = "How many steps to red?"
CELL = 4  # pixels
PLACES = range(SIDE // CELL)
CELLS = [(row, column) for row in PLACES for column in PLACES]
STEPS = range(1, 10)
WALLS = 0.3  # share of cells

Cell = tuple[int, int]


def draw(rng: random.Random) -> Row:
    steps = rng.choice(STEPS)
    ends: list[Cell] = []
    while not ends:
        walls = {cell for cell in CELLS if rng.random() < WALLS}
        start = rng.choice(CELLS)
        ends = [cell for cell, distance in distances(start, walls).items() if distance == steps]
    picture = blank()
    for colour, cells in (("white", walls), ("green", [start]), ("red", [rng.choice(ends)])):
        for row, column in cells:
            fill(picture, CELL * row, CELL * column, CELL, CELL, colour)
    return picture_row("maze", picture, QUESTION, str(steps))


def distances(start: Cell, walls: Collection[Cell]) -> dict[Cell, int]:
    """Steps from the start to each cell that can be reached, to its four neighbours at a time."""
    found, line = {start: 0}, [start]
    for row, column in line:
        for cell in ((row - 1, column), (row + 1, column), (row, column - 1), (row, column + 1)):
            inside = cell[0] in PLACES and cell[1] in PLACES
            if inside and cell not in walls and cell not in found:
                found[cell] = found[row, column] + 1
                line.append(cell)
    return found


SOURCE = SyntheticSource(draw=draw, template=f"{IMAGE}{QUESTION}", problem=same_picture)
