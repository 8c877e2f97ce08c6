"""Countdown as a chat: Jiayi-Pan/Countdown-Tasks-3to4, or other files with target and nums."""

from collections.abc import Sequence
from typing import Any

from hpcrl.data.source import USUAL_FILES, Dropped, FileSource, Row, rule_row, value

LARGEST = 1 << 62  # Parquet has 64 bits
TEMPLATE = (
    "Use the numbers {numbers} to make {target}. Use each number exactly once, with the operations + - * / and "
    "parentheses. Think inside <think> </think> tags, then write the expression inside <answer> </answer> tags, for "
    "example <answer>(1 + 2) / 3</answer>."
)


def countdown_row(numbers: Sequence[int], target: int, answer: str | None = None) -> Row:
    """The problem as a chat, which the rule `countdown` scores."""
    *most, last = map(str, numbers)
    prompt = TEMPLATE.format(numbers=f"{', '.join(most)} and {last}", target=target)
    return rule_row("countdown", prompt, {"target": target, "numbers": list(numbers)}, answer)


def sorted_numbers(row: Row) -> str:
    """The same numbers in another order, or with another target, are no new problem."""
    return repr(sorted(row["reward_model"]["ground_truth"]["numbers"]))


def convert(row: Row) -> Row:
    numbers, target = value(row, "nums"), value(row, "target")
    if not isinstance(numbers, list) or not all(is_whole(number) for number in [*numbers, target]):
        raise Dropped("nums or target are not whole numbers")
    if len(numbers) < 2:
        raise Dropped("fewer than two numbers")
    return countdown_row(numbers, target)


def is_whole(number: Any) -> bool:
    return type(number) is int and abs(number) < LARGEST


SOURCE = FileSource(files=USUAL_FILES, convert=convert, template=TEMPLATE, problem=sorted_numbers)
