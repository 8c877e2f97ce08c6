"""Rows of the tasks of reasoning-gym (https://github.com/open-thought/reasoning-gym), drawn by the package (extra
`reasoning-gym`)."""

from __future__ import annotations

import argparse
import json
import random
import re
from collections.abc import Iterator
from importlib.metadata import version
from itertools import count
from typing import Any, NamedTuple

from hpcrl.data.duplicates import prompt_text
from hpcrl.data.source import ConfigurableSource, Dropped, Row, SyntheticSource, rule_row
from hpcrl.rewards.scorers.reasoning_gym import PREFIX
from hpcrl.runtime.exits import InputError, folded

TEMPLATE = "{question}\n\nWrite the final answer inside <answer> </answer> tags."
MIXED = re.compile(r"(?P<name>\w+)(?::(?P<weight>\d+(?:\.\d+)?))?(?:@(?P<low>\d+)(?:-(?P<high>\d+))?)?")
SIZE = 1 << 20  # entries of one dataset; a dataset makes an entry when it is asked for it


class Task(NamedTuple):
    """A task of a mixture. levels: of its curriculum; None: the package's default difficulty."""

    name: str
    weight: float
    levels: range | None


def add_options(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--tasks",
        nargs="+",
        required=True,
        type=task_of,
        metavar="TASK[:WEIGHT][@LEVEL[-LEVEL]]",
        help="tasks, their shares of the rows (1) and levels of their curricula, as chain_sum:2@0-3",
    )


def task_of(text: str) -> Task:
    match = MIXED.fullmatch(text)
    name, weight, low, high = match.group("name", "weight", "low", "high") if match else [None] * 4
    levels = None if low is None else range(int(low), int(high or low) + 1)
    if name is None or levels == range(0):
        raise argparse.ArgumentTypeError(f"found {text!r}; expected TASK[:WEIGHT][@LEVEL[-LEVEL]]")
    return Task(name, float(weight or 1), levels)


def mixture(parsed: argparse.Namespace) -> SyntheticSource:
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
        return row_of(task.name, level, next(entries[task.name, level]))

    return SyntheticSource(
        draw,
        TEMPLATE,
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
    options = {"seed": random.Random(f"{seed} {name} {level}").randrange(1 << 31), "size": SIZE}
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


def row_of(name: str, level: int | None, entry: dict[str, Any]) -> Row:
    question, answer = entry["question"], entry["answer"]
    try:
        metadata = json.dumps(entry["metadata"])
    except TypeError:
        raise Dropped("metadata that is not JSON") from None
    own = None if answer is None else f"<answer>{answer}</answer>"
    prompt, level = TEMPLATE.format(question=question), -1 if level is None else level
    row = rule_row(PREFIX + name, prompt, answer or "", task=name, level=level, metadata=metadata)
    return row | {"ability": "reasoning", "answer": own}


SOURCES: dict[str, tuple[ConfigurableSource, str]] = {
    "reasoning_gym": (
        ConfigurableSource(add_options, mixture),
        "Tasks of reasoning-gym, mixed, drawn by the package (extra reasoning-gym); needs no download.",
    ),
}
