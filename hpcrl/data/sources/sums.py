"""Sums of two numbers from 1 to 99, drawn; needs no download."""

import random

from hpcrl.data.source import Row, SyntheticSource, rule_row

TEMPLATE = "What is {left} + {right}? Write #### and the number."
NUMBERS = range(1, 100)


def draw(rng: random.Random) -> Row:
    left, right = rng.choice(NUMBERS), rng.choice(NUMBERS)
    prompt, total = TEMPLATE.format(left=left, right=right), str(left + right)
    return rule_row("sums", prompt, total, f"#### {total}", operands=[left, right])


def sorted_numbers(row: Row) -> str:
    return repr(sorted(row["extra_info"]["operands"]))


SOURCE = SyntheticSource(draw=draw, template=TEMPLATE, problem=sorted_numbers)
