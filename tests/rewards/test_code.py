"""Programs of every ill will score as they deserve; whatever they do stays in the sandbox (tests/sandbox)."""

from __future__ import annotations

import pytest

from hpcrl.rewards.scorers.code import compute_score, same_output, same_value

SUM = {"inputs": ["1 2\n", "3 4\n"], "outputs": ["3\n", "7\n"]}
DOUBLE = {"inputs": ["1", "2"], "outputs": ["2", "4"], "fn_name": "double"}


def _score(program: str, tests: dict, **kwargs: float) -> float:
    return compute_score("apps", f"```python\n{program}\n```", tests, sandbox="best_effort", **kwargs)


def test_a_program_runs_as_a_program() -> None:
    """Where verl, which makes it the body of a function, fails right ones."""
    program = "total = 0\ndef add(n):\n    global total\n    total += n\n" + (
        "for word in sys.stdin.buffer.read().split():\n    add(int(word))\n"
        "try:\n    input()\nexcept EOFError:\n    print(total)\n    exit()\n"
    )
    assert _score(program, SUM) == 1.0


@pytest.mark.parametrize("tests", [SUM, DOUBLE])
@pytest.mark.parametrize(
    "program",
    [
        "while True: pass",
        "import os\nos._exit(0)",
        "raise SystemExit",
        "\ud800",
        "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)",
        "double = lambda n: [0] * 10**12\ndouble(1)",
        "def double(n): return double(n)\ndouble(1)",
        "def double(n): return float('nan')\nprint(double(1))",
        "class Everything(int):\n    __eq__ = lambda *_: True\ndef double(n): return Everything()",
        "print('3' * 10**7)",
    ],
)
def test_what_goes_wrong_scores_zero(program: str, tests: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hpcrl.rewards.scorers.code.FUNCTION_SECONDS", 0.5)
    assert _score(program, tests, seconds_per_test=0.5) == 0.0


def test_a_program_that_fails_one_test_passes_the_others() -> None:
    assert _score("a, b = map(int, input().split())\nwhile a > 2: pass\nprint(a + b)", SUM, seconds_per_test=0.5) == 0.5


def test_a_long_output_has_room() -> None:
    digits = 3 * 2**20
    assert _score(f"print('1' * {digits})", {"inputs": [""], "outputs": ["1" * digits]}) == 1.0


def test_printing_results_is_not_returning_them() -> None:
    assert _score("def double(n):\n    print(2 * n)", DOUBLE) == 0.0
    assert _score("def double(n):\n    print('noise')\n    return 2 * n", DOUBLE) == 1.0


@pytest.mark.parametrize("broken", ["", "[]", "{", '{"inputs": ["1"], "outputs": []}', '{"inputs": [], "outputs": []}'])
def test_a_broken_row_is_an_error(broken: str) -> None:
    with pytest.raises(ValueError):
        compute_score("apps", "print(1)", broken)


@pytest.mark.parametrize(
    ("output", "expected", "same"),
    [
        ("3\n", "3", True),
        ("a \n\nb\n", "a\nb\n", False),
        ("3\n\n4\n", "3\n\n\n4", True),
        ("1e-9\n2.00001", "0\n2", True),
        ("2.1", "2", False),
        ("02", "2", False),  # whole numbers are compared as text
        ("-02", "-2", True),
        ("inf", "inf", True),
        ("nan", "nan", True),
        ("nan\n", "NaN", False),
        ("1", "inf", False),
        ("1 2", "2 1", False),
    ],
)
def test_outputs(output: str, expected: str, same: bool) -> None:
    assert same_output(output, expected) is same


@pytest.mark.parametrize(
    ("found", "expected", "same"),
    [
        ([1], [1], True),
        ([1], [[1]], True),
        ((1, 2), [1, 2], True),
        ([(1, 2)], [[[1, 2]]], True),
        ([(1, 2)], [[1, 2]], False),  # as in verl
        ({1: 2}, {"1": 2}, True),
        ({"a": 2}, {"a": 2}, True),
        (None, [], False),
        ([], [[]], True),
        (True, 1, True),
    ],
)
def test_values(found: object, expected: object, same: bool) -> None:
    assert same_value(found, expected) is same
