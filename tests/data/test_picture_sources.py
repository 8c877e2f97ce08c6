"""Drawn pictures: the answer of a row is what its pixels show, no picture is drawn twice, and a seed makes one file."""

from __future__ import annotations

import io
import random
import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet
import pytest
from PIL import Image

from hpcrl import cli
from hpcrl.data.drawn import COLOURS, SIDE
from hpcrl.data.prepare import draw_rows
from hpcrl.data.source import all_sources
from hpcrl.rewards.registry import scorer_for

TASKS = ("count_squares", "left_of", "two_digits", "maze")
NAMES = {colour: name for name, colour in COLOURS.items()}
GLYPHS = {  # as people write them; a digit in a picture is these cells, enlarged
    "0": ("###", "# #", "# #", "# #", "###"),
    "1": ("  #", "  #", "  #", "  #", "  #"),
    "2": ("###", "  #", "###", "#  ", "###"),
    "3": ("###", "  #", "###", "  #", "###"),
    "4": ("# #", "# #", "###", "  #", "  #"),
    "5": ("###", "#  ", "###", "  #", "###"),
    "6": ("###", "#  ", "###", "# #", "###"),
    "7": ("###", "  #", "  #", "  #", "  #"),
    "8": ("###", "# #", "###", "# #", "###"),
    "9": ("###", "# #", "###", "  #", "###"),
}
CELL_ROWS, CELL_COLUMNS = (2, 3, 2, 4, 2), (2, 6, 2)  # pixels of a glyph's cells


def pixels(row: dict[str, Any]) -> np.ndarray:
    """The picture of a row, as names of colours or ""; (SIDE, SIDE)."""
    with Image.open(io.BytesIO(row["images"][0]["bytes"])) as image:
        assert image.format == "PNG" and image.mode == "RGB" and image.size == (SIDE, SIDE)
        colours = np.asarray(image).reshape(-1, 3).tolist()
    return np.array([NAMES.get(tuple(colour), "") for colour in colours]).reshape(SIDE, SIDE)


def areas(picture: np.ndarray) -> list[tuple[str, list[tuple[int, int]]]]:
    """Colour and pixels of each connected area of one colour."""
    seen: set[tuple[int, int]] = set()
    found = []
    for start in zip(*np.nonzero(picture), strict=True):
        if start in seen:
            continue
        area = [start]
        seen.add(start)
        for row, column in area:
            for place in ((row - 1, column), (row + 1, column), (row, column - 1), (row, column + 1)):
                inside = min(place) >= 0 and max(place) < SIDE
                if inside and place not in seen and picture[place] == picture[start]:
                    seen.add(place)
                    area.append(place)
        found.append((str(picture[start]), area))
    return found


def count_squares(picture: np.ndarray, question: str) -> str:
    assert question == "How many squares?"
    squares = areas(picture)
    for _, area in squares:
        height, width = np.ptp(np.array(area), axis=0) + 1
        assert height == width and len(area) == height * width
    return str(len(squares))


def left_of(picture: np.ndarray, question: str) -> str:
    squares = areas(picture)
    named = re.fullmatch(r"Which is left, (\w+) or (\w+)\?", question)
    assert named and sorted(named.groups()) == sorted(colour for colour, _ in squares)
    assert {len(area) for _, area in squares} == {7 * 7}
    return min(squares, key=lambda square: min(column for _, column in square[1]))[0]


def two_digits(picture: np.ndarray, question: str) -> str:
    assert question == "What number is it?"
    digits = ""
    for half in np.split(picture != "", 2, axis=1):
        top = int(np.nonzero(half.any(1))[0][0])
        right = int(np.nonzero(half.any(0))[0][-1])
        glyph = half[top : top + 13, max(right - 9, 0) : right + 1]
        glyph = np.pad(glyph, ((0, 0), (10 - glyph.shape[1], 0)))
        digits += next(digit for digit, cells in GLYPHS.items() if np.array_equal(glyph, enlarged(cells)))
        assert half.sum() == glyph.sum()
    return digits


def enlarged(cells: tuple[str, ...]) -> np.ndarray:
    lit = np.array([[cell == "#" for cell in line] for line in cells])
    return np.repeat(np.repeat(lit, CELL_ROWS, axis=0), CELL_COLUMNS, axis=1)


def maze(picture: np.ndarray, question: str) -> str:
    assert question == "How many steps to red?"
    cells = picture[::4, ::4]
    assert np.array_equal(np.repeat(np.repeat(cells, 4, axis=0), 4, axis=1), picture)
    reached, exit_ = cells == "green", cells == "red"
    assert reached.sum() == exit_.sum() == 1
    for steps in range(cells.size):
        if (reached & exit_).any():
            return str(steps)
        wider = np.pad(reached, 1)
        around = wider[:-2, 1:-1] | wider[2:, 1:-1] | wider[1:-1, :-2] | wider[1:-1, 2:]
        reached = reached | (around & (cells != ""))
    raise AssertionError("the exit cannot be reached")


READ = {"count_squares": count_squares, "left_of": left_of, "two_digits": two_digits, "maze": maze}


def drawn(name: str, rows: int, val_rows: int, seed: int) -> dict[str, list[dict[str, Any]]]:
    dataset = draw_rows(all_sources()[name][0], rows=rows, val_rows=val_rows, seed=seed)  # type: ignore[arg-type]
    return {split: found.table.to_pylist() for split, found in dataset.splits.items()}


@pytest.mark.parametrize("name", TASKS)
def test_answers_are_what_the_pictures_show(name: str) -> None:
    splits = drawn(name, 150, 50, 1)
    rows = [*splits["train"], *splits["val"]]
    for row in rows:
        content = row["prompt"][0]["content"]
        answer = READ[name](pixels(row), content.removeprefix("<image>"))
        assert content.count("<image>") == 1 and row["data_source"] == name and row["ability"] == "vision"
        assert row["answer"] == row["reward_model"]["ground_truth"] == answer
        assert scorer_for(name)(name, answer, answer) == 1.0 and scorer_for(name)(name, f"{answer}0", answer) == 0.0
    assert len({row["images"][0]["bytes"] for row in rows}) == len(rows) == 200
    answers = Counter(row["answer"] for row in rows)
    assert max(answers.values()) < 0.35 * len(rows)


def test_the_mixture_has_each_task(tmp_path: Path) -> None:
    splits = drawn("pictures", 200, 20, 2)
    counts = Counter(row["data_source"] for row in splits["train"])
    assert set(counts) == set(TASKS) and min(counts.values()) > 25
    for row in splits["val"]:
        question = row["prompt"][0]["content"].removeprefix("<image>")
        assert READ[row["data_source"]](pixels(row), question) == row["answer"]


def test_a_seed_makes_one_sequence_of_pictures() -> None:
    first, second, longer, other = (
        drawn("pictures", rows, 20, seed) for rows, seed in ((30, 5), (30, 5), (60, 5), (30, 6))
    )
    assert first == second
    assert longer["val"] == first["val"] and longer["train"][:30] == first["train"]
    pictures = [{row["images"][0]["bytes"] for row in [*rows["train"], *rows["val"]]} for rows in (first, other)]
    assert len(pictures[0]) == len(pictures[1]) == 50 and not pictures[0] & pictures[1]


def test_equal_pictures_are_drawn_once(monkeypatch: pytest.MonkeyPatch) -> None:
    source = all_sources()["left_of"][0]
    draws = [random.Random(seed) for seed in (1, 1, 2, 2, 3)]
    repeating = type(source)(
        draw=lambda _: source.draw(draws.pop(0)),  # type: ignore[union-attr]
        template=source.template,
        problem=source.problem,  # type: ignore[arg-type]
    )
    dataset = draw_rows(repeating, rows=2, val_rows=1, seed=0)
    assert not draws and {name: len(split) for name, split in dataset.splits.items()} == {"train": 2, "val": 1}


def test_check_compares_pictures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """Prompts are alike in all rows: the same one about another picture is no duplicate."""
    rows = drawn("count_squares", 20, 5, 3)
    paths = {split: tmp_path / f"{split}.parquet" for split in rows}

    def check() -> tuple[int | str | None, str]:
        for split, path in paths.items():
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows[split]), path)
        with pytest.raises(SystemExit) as caught:
            cli.main(["data", "check", "--train", str(paths["train"]), "--val", str(paths["val"])])
        return caught.value.code, capsys.readouterr().out

    code, printed = check()
    assert code == 0 and "exactly: 0, in 0 training rows" in printed and "0.5: 0, in 0 training" in printed
    rows["train"][4:6] = [rows["val"][1]] * 2
    code, printed = check()
    assert code == 1 and "exactly: 1, in 2 training rows" in printed and "0.5: 0, in 0 training" in printed
