"""tools/mutation: where mutants may be, which tests are chosen for one, and what a session's end means."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).parents[1] / "tools" / "mutation"
SOURCE = """\
import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    KIND = 1 | 2
SIZE = 2 * 3


class Thing:
    size: int = 4

    def area(self, scale: int | None = 1) -> int:
        if scale is None:
            raise ValueError("no scale", 1 + 1)
        return (
            self.size
            * 2
        )
"""


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(TOOL))
    import mutants
    import suites

    yield mutants, suites
    for name in ("mutants", "suites"):
        sys.modules.pop(name)


def test_shares_add_up_and_leave_no_package_out(tool) -> None:
    shares = tool[0].shared_out(20, {"large": 900, "middle": 99, "small": 1})
    assert sum(shares.values()) == 20
    assert shares["large"] > shares["middle"] >= shares["small"] == tool[0].LEAST


def test_hints_messages_and_what_type_checkers_read_are_not_mutated(tool) -> None:
    excluded = tool[0].not_mutated(SOURCE)

    def is_mutated(line: int, text: str) -> bool:
        at = (line, SOURCE.splitlines()[line - 1].index(text))
        return not any(first <= at < last for first, last in excluded)

    assert not is_mutated(5, "1 | 2")
    assert is_mutated(6, "2 * 3")
    assert not is_mutated(12, "int | None")
    assert is_mutated(12, "1)")
    assert not is_mutated(14, "1 + 1")


def test_a_statement_that_runs_at_import_has_scopes_around_it(tool) -> None:
    statements, end = tool[0].Statements(SOURCE), tool[0].END
    assert statements.around(17) == (15, 18) and statements.wider(17) == []
    assert statements.around(13) == (13, 13)  # the head alone
    assert statements.wider(12) == [(12, 18), (9, 18), (1, end)]
    assert statements.wider(10) == [(9, 18), (1, end)]
    assert statements.wider(6) == [(1, end)]
    assert statements.in_functions == sum(1 << line for line in range(13, 19))


def a_part(startup: float, tests: list[tuple[str, float, str]], lines: dict[int, list[int]]) -> dict:
    masks = {str(test): f"{sum(1 << line for line in of):x}" for test, of in lines.items()}
    return {
        "startup": startup,
        "tests": [{"test": test, "seconds": seconds, "outcome": outcome} for test, seconds, outcome in tests],
        "lines": {"hpcrl/thing.py": masks},
    }


@pytest.fixture
def covering(tool, tmp_path: Path):
    (tmp_path / "hpcrl").mkdir()
    (tmp_path / "hpcrl" / "thing.py").write_text(SOURCE)
    alone = [("a.py::slow", 50.0, "passed"), ("a.py::fails", 0.1, "failed"), ("b.py::quick", 1.0, "passed")]
    together = [("c.py::mpi", 2.0, "passed"), ("c.py::imports", 0.1, "passed")]
    parts = {
        "without MPI": a_part(1.0, alone, {0: [13, 15], 1: [13, 15], 2: [13, 15]}),
        "2 ranks": a_part(20.0, together, {0: [13, 14], 1: [6, 9, 10, 12]}),
    }
    return tool[1].Covering(parts, tmp_path)


def test_the_tests_of_a_statement_are_those_that_execute_it_and_pass_fastest_first(covering) -> None:
    quick, slow, mpi = ("without MPI", "b.py::quick"), ("without MPI", "a.py::slow"), ("2 ranks", "c.py::mpi")
    assert covering.of("hpcrl/thing.py", 17) == [quick, slow]
    assert covering.of("hpcrl/thing.py", 14) == [mpi]
    # a default runs at import: tests that only import it, as jobs do, are not those of it
    assert covering.of("hpcrl/thing.py", 12) == [quick, mpi, slow]


def test_as_many_tests_as_the_time_allows(covering) -> None:
    tests = covering.of("hpcrl/thing.py", 12)
    assert covering.within(tests, 120) == {
        "2 ranks": ["c.py::mpi"],
        "without MPI": ["b.py::quick", "a.py::slow"],
    }
    assert covering.within(tests, 60) == {"without MPI": ["b.py::quick"], "2 ranks": ["c.py::mpi"]}
    assert covering.within(tests, 1) == {"without MPI": ["b.py::quick"]}  # one always


@pytest.mark.parametrize(
    "code, seconds, ended, result",
    [
        (0, 5.0, "passed", None),
        (1, 5.0, "failed", "killed"),
        (None, 5.0, "failed", "killed"),  # stopped as soon as it was told
        (139, 5.0, None, "killed"),  # the process died inside the test
        (None, 100.0, None, "timeout"),
        (None, 12.0, None, "survived"),  # the time was up while it ran no longer than usual
    ],
)
def test_what_a_session_says_of_a_mutant(tool, covering, code, seconds, ended, result) -> None:
    said = tool[1].Session(code, seconds, {"b.py::quick": 1.0})
    if ended:
        said.ended["b.py::quick"] = (2.0, ended, "AssertionError")

    class Quiet:
        def last_line(self) -> str:
            return ""

    found = tool[1].verdict(said, covering, "without MPI", Quiet())
    assert (found and found["result"]) == result
