"""Datasets of `hpcrl data` that are drawn: small pictures of coloured rectangles with a question, sums, countdown, and
tasks of reasoning-gym (extra `reasoning-gym`). SOURCES has them by name."""

from __future__ import annotations

import argparse
import io
import json
import random
import re
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from itertools import count
from typing import Any, NamedTuple

import numpy as np

from hpcrl.data.downloaded import COUNTDOWN_TEMPLATE, countdown_row, sorted_numbers
from hpcrl.data.duplicates import picture_key, prompt_text
from hpcrl.data.source import IMAGE, ConfigurableSource, Dropped, Row, Source, SyntheticSource, rule_row
from hpcrl.rewards.scorers.reasoning_gym import PREFIX
from hpcrl.runtime.exits import InputError, folded

SIDE = 32  # pixels
COLOURS: Mapping[str, tuple[int, int, int]] = {
    "red": (230, 30, 30),
    "green": (20, 200, 60),
    "blue": (50, 90, 255),
    "yellow": (250, 220, 40),
    "pink": (250, 120, 210),
    "white": (255, 255, 255),
}
CELL = 8  # pixels; a square has one to itself


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


COUNT_SQUARES_QUESTION = "How many squares?"
COUNTS = range(1, 9)
SQUARE_SIDES = range(4, 8)


def draw_count_squares(rng: random.Random) -> Row:
    count = rng.choice(COUNTS)
    picture, per_line = blank(), SIDE // CELL
    for cell in rng.sample(range(per_line**2), count):
        row, column = divmod(cell, per_line)
        side = rng.choice(SQUARE_SIDES)
        top, left = (CELL * place + rng.randrange(CELL - side) for place in (row, column))
        fill(picture, top, left, side, side, rng.choice(list(COLOURS)))
    return picture_row("count_squares", picture, COUNT_SQUARES_QUESTION, str(count))


LEFT_OF_TEMPLATE = "Which is left, {first} or {second}?"
LEFT_OF_SIDE = 7


def draw_left_of(rng: random.Random) -> Row:
    colours = rng.sample(list(COLOURS), 2)
    picture = blank()
    places = range(SIDE // CELL)
    row = rng.choice(places)
    for column, colour in zip(sorted(rng.sample(places, 2)), colours, strict=True):
        top, left = (CELL * place + rng.randrange(CELL - LEFT_OF_SIDE + 1) for place in (row, column))
        fill(picture, top, left, LEFT_OF_SIDE, LEFT_OF_SIDE, colour)
    first, second = rng.sample(colours, 2)
    return picture_row("left_of", picture, LEFT_OF_TEMPLATE.format(first=first, second=second), colours[0])


TWO_DIGITS_QUESTION = "What number is it?"
TWO_DIGITS_NUMBERS = range(10, 100)
HALF = SIDE // 2  # the number is in the upper or the lower half
DIGIT_SPACE = 1  # above and left of a digit
DIGIT_HEIGHT, DIGIT_WIDTH, STROKE = 13, 10, 2  # of a digit
LOWER, MIDDLE = 11, 6  # top of the lower horizontal stroke and of the middle one; a vertical stroke is 7 long
# top, left, height and width of the seven segments, clockwise from the top one; the last one is in the middle
SEGMENTS = (
    (0, 0, STROKE, DIGIT_WIDTH),
    (0, DIGIT_WIDTH - STROKE, MIDDLE + 1, STROKE),
    (MIDDLE, DIGIT_WIDTH - STROKE, MIDDLE + 1, STROKE),
    (LOWER, 0, STROKE, DIGIT_WIDTH),
    (MIDDLE, 0, MIDDLE + 1, STROKE),
    (0, 0, MIDDLE + 1, STROKE),
    (MIDDLE - 1, 0, STROKE, DIGIT_WIDTH),
)
LIT = ("012345", "12", "01346", "01236", "1256", "02356", "023456", "012", "0123456", "012356")  # of digits 0 to 9


def draw_two_digits(rng: random.Random) -> Row:
    number = rng.choice(TWO_DIGITS_NUMBERS)
    picture = blank()
    top = HALF * rng.randrange(2) + DIGIT_SPACE
    for place, digit in enumerate(divmod(number, 10)):
        left = HALF * place + DIGIT_SPACE
        colour = rng.choice(list(COLOURS))
        for segment in map(int, LIT[digit]):
            down, right, height, width = SEGMENTS[segment]
            fill(picture, top + down, left + right, height, width, colour)
    return picture_row("two_digits", picture, TWO_DIGITS_QUESTION, str(number))


MAZE_QUESTION = "How many steps to red?"
MAZE_CELL = 4  # pixels
MAZE_PLACES = range(SIDE // MAZE_CELL)
MAZE_STEPS = range(1, 10)
DEAD_ENDS = (0, 0, 1, 2)  # drawn from

Cell = tuple[int, int]


def draw_maze(rng: random.Random) -> Row:
    steps = rng.choice(MAZE_STEPS)
    path: list[Cell] = []
    while len(path) <= steps:
        path = [(rng.choice(MAZE_PLACES), rng.choice(MAZE_PLACES))]
        while len(path) <= steps and (nexts := walls_to_open(path[-1], path)):
            path.append(rng.choice(nexts))
    cells = list(path)
    for _ in range(rng.choice(DEAD_ENDS)):
        if nexts := walls_to_open(rng.choice(path[:-1]), cells):
            cells.append(rng.choice(nexts))
    picture = blank()
    for colour, part in (("white", cells), ("green", path[:1]), ("red", path[-1:])):
        for row, column in part:
            fill(picture, MAZE_CELL * row, MAZE_CELL * column, MAZE_CELL, MAZE_CELL, colour)
    return picture_row("maze", picture, MAZE_QUESTION, str(steps))


def walls_to_open(cell: Cell, opened: list[Cell]) -> list[Cell]:
    """Neighbours of an open cell that have no other open neighbour, so that one path leads to each cell."""
    return [near for near in neighbours(cell) if near not in opened and sum(n in opened for n in neighbours(near)) == 1]


def neighbours(cell: Cell) -> list[Cell]:
    row, column = cell
    around = ((row - 1, column), (row + 1, column), (row, column - 1), (row, column + 1))
    return [(row, column) for row, column in around if row in MAZE_PLACES and column in MAZE_PLACES]


TASKS = (draw_count_squares, draw_left_of, draw_two_digits, draw_maze)


def draw_pictures(rng: random.Random) -> Row:
    return rng.choice(TASKS)(rng)


SUMS_INSTRUCTION, SUMS_TEMPLATE = "Answer with the number only.", "What is {left} + {right}?"
SUMS_NUMBERS = range(1, 100)


def draw_sums(rng: random.Random) -> Row:
    left, right = rng.choice(SUMS_NUMBERS), rng.choice(SUMS_NUMBERS)
    question, total = SUMS_TEMPLATE.format(left=left, right=right), str(left + right)
    prompt = [{"role": "system", "content": SUMS_INSTRUCTION}, {"role": "user", "content": question}]
    return rule_row("sums", prompt, total, total, operands=[left, right])


def sorted_operands(row: Row) -> str:
    return repr(sorted(row["extra_info"]["operands"]))


COUNTDOWN_NUMBERS = range(1, 51)
COUNTDOWN_TARGETS = range(1, 101)
WRONG_TRIES = (0, 0, 1, 2)  # drawn from


def draw_countdown_words(rng: random.Random) -> Row:
    numbers = [rng.choice(COUNTDOWN_NUMBERS) for _ in range(rng.choice((3, 4)))]
    while True:
        steps, expression, target = attempt(numbers, rng)
        if target in COUNTDOWN_TARGETS:
            break
    tries = []
    for _ in range(rng.choice(WRONG_TRIES)):
        other_steps, _, other_target = attempt(numbers, rng)
        if other_target != target:
            tries.append(f"I try {other_steps}. This is not {target}.")
    thought = " ".join([*tries, f"I try {steps}. This is {target}."])
    answer = f"<think>{thought}</think> <answer>{expression}</answer>"
    return countdown_row(rng.sample(numbers, len(numbers)), target, answer)


def attempt(numbers: list[int], rng: random.Random) -> tuple[str, str, int]:
    """Numbers in random order, combined from left to right: the steps, the expression, its value."""
    first, *rest = rng.sample(numbers, len(numbers))
    expression, value, steps, is_sum = str(first), first, [], False
    for number in rest:
        operator = rng.choice("+-*") if value * number in COUNTDOWN_TARGETS else rng.choice("+-")
        result = value + number if operator == "+" else value - number if operator == "-" else value * number
        steps.append(f"{value} {operator} {number} = {result}")
        left = f"({expression})" if operator == "*" and is_sum else expression
        expression, value, is_sum = f"{left} {operator} {number}", result, operator != "*"
    return ", ".join(steps), expression, value


# Tasks of reasoning-gym (https://github.com/open-thought/reasoning-gym), drawn by the package.
REASONING_GYM_TEMPLATE = "{question}\n\nWrite the final answer inside <answer> </answer> tags."
MIXED_TASK = re.compile(r"(?P<name>\w+)(?::(?P<weight>\d+(?:\.\d+)?))?(?:@(?P<low>\d+)(?:-(?P<high>\d+))?)?")
REASONING_GYM_SIZE = 1 << 20  # entries of one dataset; a dataset makes an entry when it is asked for it


class Task(NamedTuple):
    """A task of a mixture. levels: of its curriculum; None: the package's default difficulty."""

    name: str
    weight: float
    levels: range | None


def add_task_options(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--tasks",
        nargs="+",
        required=True,
        type=task_of,
        metavar="TASK[:WEIGHT][@LEVEL[-LEVEL]]",
        help="tasks, their shares of the rows (1) and levels of their curricula, as chain_sum:2@0-3",
    )


def task_of(text: str) -> Task:
    match = MIXED_TASK.fullmatch(text)
    name, weight, low, high = match.group("name", "weight", "low", "high") if match else [None] * 4
    levels = None if low is None else range(int(low), int(high or low) + 1)
    if name is None or levels == range(0):
        raise argparse.ArgumentTypeError(f"found {text!r}; expected TASK[:WEIGHT][@LEVEL[-LEVEL]]")
    return Task(name, float(weight or 1), levels)


def mixed_tasks(parsed: argparse.Namespace) -> SyntheticSource:
    """Raises InputError for an unknown task or level, and without the package."""
    tasks: list[Task] = parsed.tasks
    entries = {
        (task.name, level): entries_of(task.name, level, parsed.seed)
        for task in tasks
        for level in task.levels or [None]
    }
    if not any(task.weight for task in tasks):
        raise InputError("--tasks: all weights are 0")

    def draw(rng: random.Random) -> Row:
        task = rng.choices(tasks, [task.weight for task in tasks])[0]
        level = rng.choice(task.levels) if task.levels else None
        return reasoning_gym_row(task.name, level, next(entries[task.name, level]))

    return SyntheticSource(
        draw,
        REASONING_GYM_TEMPLATE,
        problem=lambda row: row["data_source"] + prompt_text(row["prompt"]),
        drawn_from={
            "tasks": [task._asdict() | {"levels": task.levels and list(task.levels)} for task in tasks],
            "reasoning_gym": version("reasoning-gym"),
        },
    )


def entries_of(name: str, level: int | None, seed: int) -> Iterator[dict[str, Any]]:
    try:
        from reasoning_gym.factory import DATASETS, create_curriculum, create_dataset
    except ImportError as error:
        raise InputError(f"reasoning_gym cannot be imported ({error}); pip install 'hpcrl[reasoning-gym]'") from None
    if name not in DATASETS or name == "composite":
        raise InputError(f"--tasks {name}: no such task; reasoning-gym has {', '.join(sorted(DATASETS))}")
    options = {"seed": random.Random(f"{seed} {name} {level}").randrange(1 << 31), "size": REASONING_GYM_SIZE}
    try:
        if level is not None:
            curriculum = create_curriculum(name)
            if level >= (most := max(len(it.levels) for it in curriculum.attributes.values())):
                raise ValueError(f"it has levels 0 to {most - 1}")
            curriculum.set_global_level(level)
            options |= vars(curriculum.generate_configuration(options))
        dataset = create_dataset(name, **options)
    except (AssertionError, ValueError) as error:  # some levels of some tasks contradict each other
        raise InputError(f"--tasks {name}@{level}: reasoning-gym rejects it: {folded(error)}") from None
    return (dataset[index] for index in count())


def reasoning_gym_row(name: str, level: int | None, entry: dict[str, Any]) -> Row:
    question, answer = entry["question"], entry["answer"]
    try:
        metadata = json.dumps(entry["metadata"])
    except TypeError:
        raise Dropped("metadata that is not JSON") from None
    own = None if answer is None else f"<answer>{answer}</answer>"
    prompt, level = REASONING_GYM_TEMPLATE.format(question=question), -1 if level is None else level
    row = rule_row(PREFIX + name, prompt, answer or "", task=name, level=level, metadata=metadata)
    return row | {"ability": "reasoning", "answer": own}


SOURCES: dict[str, tuple[Source | ConfigurableSource, str]] = {
    "count_squares": (
        SyntheticSource(draw_count_squares, f"{IMAGE}{COUNT_SQUARES_QUESTION}", same_picture),
        "Pictures of one to eight squares, which are to be counted, drawn; needs no download.",
    ),
    "left_of": (
        SyntheticSource(draw_left_of, f"{IMAGE}{LEFT_OF_TEMPLATE}", same_picture),
        "Pictures of two squares of different colours in a row: which one is left, drawn; needs no download.",
    ),
    "two_digits": (
        SyntheticSource(draw_two_digits, f"{IMAGE}{TWO_DIGITS_QUESTION}", same_picture),
        "Pictures of a number from 10 to 99, which is to be read, drawn; needs no download.",
    ),
    "maze": (
        SyntheticSource(draw_maze, f"{IMAGE}{MAZE_QUESTION}", same_picture),
        "Pictures of a maze: the length of the path from green to red, drawn; needs no download.",
    ),
    "pictures": (
        SyntheticSource(draw_pictures, f"{IMAGE}{{question}}", same_picture),
        "Rows of count_squares, left_of, two_digits and maze, mixed; needs no download.",
    ),
    "sums": (
        SyntheticSource(draw_sums, f"{SUMS_INSTRUCTION} {SUMS_TEMPLATE}", sorted_operands),
        "Sums of two numbers from 1 to 99, drawn; needs no download.",
    ),
    "countdown_words": (
        SyntheticSource(draw_countdown_words, COUNTDOWN_TEMPLATE, sorted_numbers),
        "Countdown as a chat, drawn, with a solution for SFT; needs no download.",
    ),
    "reasoning_gym": (
        ConfigurableSource(add_task_options, mixed_tasks),
        "Tasks of reasoning-gym, mixed, drawn by the package (extra reasoning-gym); needs no download.",
    ),
}
