"""tools/published_steps.py: jobs have the sizes of their names; the stored output and the page have its figures."""

from __future__ import annotations

import re
from functools import cache
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest

from hpcrl.forecast.time.phases import whole_numbers

ROOT = Path(__file__).parents[2]
STORED = ROOT / "tests" / "tools" / "published_steps.md"
PAGE = ROOT / "docs" / "performance.md"
NUMBER = re.compile(r"(?<![\w.])\d+(?:\.\d+)?(?![\w.]*[A-Za-z])")
ROUNDING = 0.02  # of a stored prediction


@cache
def tool() -> Any:
    spec = spec_from_file_location("published_steps", ROOT / "tools" / "published_steps.py")
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@cache
def printed() -> tuple[str, ...]:
    tree = tool().read()
    figures = [figure for row in tree["rows"] for figure in tool().figures_of(row, tree)]
    return (*tool().table(figures, tree), *tool().sources(tree), *tool().summary(figures))


def test_models_have_the_weights_of_their_names() -> None:
    tree = tool().read()
    for name in tree["models"]:
        row = next(
            row for row in tree["rows"] if row["model"] == name and "kv_heads" not in row or row["model"] == name
        )
        numbers = whole_numbers(tool().job_of(row, tree).models["actor"].shape)
        billions = float(re.findall(r"(\d+)b", name)[0])
        assert numbers / 1e9 == pytest.approx(billions, rel=0.09), name


def test_responses_have_the_published_mean() -> None:
    tree = tool().read()
    for row in tree["rows"]:
        lengths, its = tool().lengths_of(row, tree["sigma"]), row["lengths"]
        assert lengths.response == pytest.approx(its["response"], rel=1e-3)
        assert lengths.responses[-1] <= its["longest"] - its["prompt"]


def test_the_stored_output_is_what_it_prints() -> None:
    compare(STORED, printed())


def test_the_page_has_the_summary() -> None:
    figures = [figure for row in tool().read()["rows"] for figure in tool().figures_of(row, tool().read())]
    compare(PAGE, tuple(tool().summary(figures)))


def compare(path: Path, expected: tuple[str, ...]) -> None:
    lines = path.read_text(encoding="utf-8").splitlines()
    section = [line for line in lines[lines.index(expected[0]) :] if line.startswith(("|", "- "))]
    for stored, line in zip(section, expected, strict=False):
        text = NUMBER.sub("#", stored)
        assert text == NUMBER.sub("#", line), f"run tools/published_steps.py, and paste what it prints into {path.name}"
        for mine, its in zip(NUMBER.findall(stored), NUMBER.findall(line), strict=True):
            assert float(mine) == pytest.approx(float(its), rel=ROUNDING, abs=0.011)
    assert len(section) >= len(expected)
