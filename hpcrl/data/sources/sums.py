"""Sums of two numbers from 1 to 99, drawn; needs no download."""

import random

from hpcrl.data.source import Row, SyntheticSource, rule_row

INSTRUCTION, TEMPLATE = "Answer with the number only.", "What is {left} + {right}?"
NUMBERS = range(1, 100)


def draw(rng: random.Random) -> Row:
    left, right = rng.choice(NUMBERS), rng.choice(NUMBERS)
    question, total = TEMPLATE.format(left=left, right=right), str(left + right)
    prompt = [{"role": "system", "content": INSTRUCTION}, {"role": "user", "content": question}]
    return rule_row("sums", prompt, total, total, operands=[left, right])


def sorted_numbers(row: Row) -> str:
    return repr(sorted(row["extra_info"]["operands"]))


SOURCE = SyntheticSource(draw=draw, template=f"{INSTRUCTION} {TEMPLATE}", problem=sorted_numbers)
