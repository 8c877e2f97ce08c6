"""Countdown as a chat, drawn, with a solution for SFT; needs no download."""

import random

from hpcrl.data.source import Row, SyntheticSource
from hpcrl.data.sources.countdown import TEMPLATE, countdown_row, sorted_numbers

NUMBERS = range(1, 51)
TARGETS = range(1, 101)
WRONG_TRIES = (0, 0, 1, 2)  # drawn from


def draw(rng: random.Random) -> Row:
    numbers = [rng.choice(NUMBERS) for _ in range(rng.choice((3, 4)))]
    while True:
        steps, expression, target = attempt(numbers, rng)
        if target in TARGETS:
            break
    tries = []
    for _ in range(rng.choice(WRONG_TRIES)):
        other_steps, _, found = attempt(numbers, rng)
        if found != target:
            tries.append(f"I try {other_steps}. This is not {target}.")
    thought = " ".join([*tries, f"I try {steps}. This is {target}."])
    answer = f"<think>{thought}</think> <answer>{expression}</answer>"
    return countdown_row(rng.sample(numbers, len(numbers)), target, answer)


def attempt(numbers: list[int], rng: random.Random) -> tuple[str, str, int]:
    """Numbers in random order, combined from left to right: the steps, the expression, its value."""
    first, *rest = rng.sample(numbers, len(numbers))
    expression, value, steps, is_sum = str(first), first, [], False
    for number in rest:
        operator = rng.choice("+-*") if value * number in TARGETS else rng.choice("+-")
        result = value + number if operator == "+" else value - number if operator == "-" else value * number
        steps.append(f"{value} {operator} {number} = {result}")
        left = f"({expression})" if operator == "*" and is_sum else expression
        expression, value, is_sum = f"{left} {operator} {number}", result, operator != "*"
    return ", ".join(steps), expression, value


SOURCE = SyntheticSource(draw=draw, template=TEMPLATE, problem=sorted_numbers)
