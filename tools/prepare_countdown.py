"""Writes the countdown task as Parquet: `python tools/prepare_countdown.py --out data/countdown`.

A problem is 4 numbers from 1 to 9 (repeats allowed) and a target from 1 to 36 that + and - reach with each number used
once. All 2,717 problems are enumerated and split by a hash of the problem, so that no problem is in two files:

    train.parquet  every training problem once (2,186 rows), for RL
    val.parquet    every held-out problem once (531 rows)
    sft.parquet    fresh draws of training problems with the drawn expression as `answer`, for the warm start
    sft_tool.parquet
                   fresh draws of training problems, for the warm start of a policy with a calculator: the answer tries
                   expressions until one gives the target, at most three, with the calculator's answers in between
    preference.parquet, preference_val.parquet
                   fresh draws of training and held-out problems, for a reward model: the drawn expression is `chosen`,
                   the same with one mistake is `rejected`
    judge.parquet, judge_val.parquet
                   the same for a judge, whose prompt is a problem, an answer and `=`: it says 1 if the answer is right,
                   and 0 if it has a mistake
    labelled.parquet, labelled_val.parquet
                   the same problems, for KTO: in turn the right and the wrong one as `completion`, and a `label`

The answers of the warm start have their numbers in a random order: this leaves the policy the entropy that RL needs.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Collection, Iterator
from itertools import combinations_with_replacement, permutations, product
from pathlib import Path
from typing import Any
from zlib import crc32

DIGITS = range(1, 10)
NUM_NUMBERS = 4
TARGETS = range(1, 37)
WRONG_TRIES = (0, 0, 0, 0, 0, 0, 0, 1, 1, 2)  # drawn from; with many of them SFT would learn the task late
EOS = "<|eos|>"  # ends a turn; as configs/tool_tokenizer has it
FILES = (
    *("train", "val", "sft", "sft_tool", "preference", "preference_val", "labelled", "labelled_val"),
    *("judge", "judge_val"),
)
MISTAKES = ("operator", "number", "term", "form")
HELD_OUT_SHARE = 5  # one problem in this many is for validation

Problem = tuple[tuple[int, ...], int]  # sorted numbers, target


def all_problems() -> list[Problem]:
    """Every solvable problem, in order."""
    found = set()
    for numbers in combinations_with_replacement(DIGITS, NUM_NUMBERS):
        for order in set(permutations(numbers)):
            for signs in product((1, -1), repeat=NUM_NUMBERS - 1):
                target = order[0] + sum(sign * number for sign, number in zip(signs, order[1:], strict=True))
                if target in TARGETS:
                    found.add((numbers, target))
    return sorted(found)


def is_held_out(problem: Problem) -> bool:
    """Membership is a property of the problem alone: no seed, no order of enumeration."""
    numbers, target = problem
    return crc32(repr((list(numbers), target)).encode()) % HELD_OUT_SHARE == 0


def draw(rng: random.Random) -> tuple[Problem, str]:
    """A problem and the expression it was made from."""
    while True:
        numbers = [rng.choice(DIGITS) for _ in range(NUM_NUMBERS)]
        operators = [rng.choice("+-") for _ in range(NUM_NUMBERS - 1)]
        signed = [
            number if operator == "+" else -number for operator, number in zip(["+", *operators], numbers, strict=True)
        ]
        if sum(signed) in TARGETS:
            expression = str(numbers[0]) + "".join(o + str(n) for o, n in zip(operators, numbers[1:], strict=True))
            return (tuple(sorted(numbers)), sum(signed)), expression


def draws(count: int, rng: random.Random, *, held_out: bool = False) -> Iterator[tuple[Problem, str]]:
    """Draws of problems that are all held out, or all not."""
    while count:
        problem, expression = draw(rng)
        if is_held_out(problem) == held_out:
            count -= 1
            yield problem, expression


def value_of(expression: str) -> int:
    """Of single digits with + and - between them."""
    signs = [1, *(1 if operator == "+" else -1 for operator in expression[1::2])]
    return sum(sign * int(number) for sign, number in zip(signs, expression[::2], strict=True))


def wrong_try(problem: Problem, rng: random.Random) -> str:
    """An expression of the problem's numbers that misses its target."""
    numbers, target = problem
    while True:
        parts = [str(number) for number in rng.sample(numbers, len(numbers))]
        expression = parts[0] + "".join(rng.choice("+-") + part for part in parts[1:])
        if value_of(expression) != target:
            return expression


def with_calculator(problem: Problem, expression: str, rng: random.Random) -> str:
    """A response in turns: calls of the calculator in hermes format, what it answers, and the answer."""
    tries = [*(wrong_try(problem, rng) for _ in range(rng.choice(WRONG_TRIES))), expression]
    calls = "".join(
        f'<tool_call>{{"name": "calculate", "arguments": {{"expression": "{tried}"}}}}</tool_call>{EOS}'
        f"<tool_response>{value_of(tried)}</tool_response>"
        for tried in tries
    )
    return f"{calls}<a>{expression}</a>"


def spoil(expression: str, rng: random.Random) -> str:
    """The answer with one mistake: a wrong operator, a number that was not given, a term too few, or no closing tag.

    Each of the first three changes the value, for every number is above 0.
    """
    parts = list(expression)  # numbers are at even places, operators at odd ones
    mistake = rng.choice(MISTAKES)
    if mistake == "operator":
        place = rng.randrange(1, len(parts), 2)
        parts[place] = "-" if parts[place] == "+" else "+"
    elif mistake == "number":
        place = rng.randrange(0, len(parts), 2)
        parts[place] = rng.choice([str(digit) for digit in DIGITS if str(digit) != parts[place]])
    elif mistake == "term":
        parts = parts[:-2]
    return "<a>" + "".join(parts) + ("" if mistake == "form" else "</a>")


def row(problem: Problem, split: str, index: int, rng: random.Random) -> dict[str, Any]:
    """A row of verl's schema; the prompt shows the numbers in random order and the target last, as `5 8 5 2 6:`."""
    numbers, target = problem
    shown = rng.sample(numbers, len(numbers))
    return {
        "data_source": "countdown",
        "prompt": [{"role": "user", "content": " ".join(map(str, [*shown, target])) + ":"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": {"numbers": list(shown), "target": target}},
        "extra_info": {"index": index, "split": split},
    }


def judgement(problem: dict[str, Any], expression: str, rng: random.Random) -> dict[str, Any]:
    """A row for a judge, of an answer that has a mistake or not."""
    is_right = rng.random() < 0.5
    shown = f"<a>{expression}</a>" if is_right else spoil(expression, rng)
    question = f"{problem['prompt'][0]['content']}{shown}="
    answer = str(int(is_right))
    truth = {"style": "rule", "ground_truth": answer}
    asked = {"data_source": "countdown_judge", "prompt": [{"role": "user", "content": question}]}
    return problem | asked | {"reward_model": truth, "answer": answer}


def with_label(pair: dict[str, Any], *, is_good: bool) -> dict[str, Any]:
    """A row with one answer of the pair."""
    shared = {name: value for name, value in pair.items() if name not in ("chosen", "rejected")}
    return shared | {"completion": pair["chosen" if is_good else "rejected"], "label": is_good}


def make_rows(
    sft_rows: int, preference_rows: int, seed: int, files: Collection[str] = FILES
) -> dict[str, list[dict[str, Any]]]:
    """Rows of each of `files`; the order of a split is drawn from the seed, so that its first N are a fair sample."""
    rng = random.Random(seed)
    splits: dict[str, list[Problem]] = {"train": [], "val": []}
    for problem in all_problems():
        splits["val" if is_held_out(problem) else "train"].append(problem)
    rows: dict[str, list[dict[str, Any]]] = {}
    for split, problems in splits.items():
        rng.shuffle(problems)
        rows[split] = [row(problem, split, i, rng) for i, problem in enumerate(problems)]
    rows["sft"] = [
        row(problem, "sft", i, rng) | {"answer": f"<a>{expression}</a>"}
        for i, (problem, expression) in enumerate(draws(sft_rows, rng))
    ]
    if "sft_tool" in files:
        # Random numbers of its own: the other files are what they were before there was this one.
        calculating = random.Random(f"calculator {seed}")
        rows["sft_tool"] = [
            row(problem, "sft_tool", i, calculating) | {"answer": with_calculator(problem, expression, calculating)}
            for i, (problem, expression) in enumerate(draws(sft_rows, calculating))
        ]
    sizes = {"preference": preference_rows, "preference_val": max(1, preference_rows // 20)}
    labelled = {"preference": "labelled", "preference_val": "labelled_val"}
    for name, count in sizes.items() if not {*labelled, *labelled.values()}.isdisjoint(files) else ():
        drawn = enumerate(draws(count, rng, held_out=name == "preference_val"))
        rows[name] = [
            row(problem, name, i, rng) | {"chosen": f"<a>{expression}</a>", "rejected": spoil(expression, rng)}
            for i, (problem, expression) in drawn
        ]
        rows[labelled[name]] = [with_label(pair, is_good=i % 2 == 0) for i, pair in enumerate(rows[name])]
    judged = {"judge": preference_rows, "judge_val": max(1, preference_rows // 20)}
    for name, count in judged.items():
        if name in files:
            judging = random.Random(f"{name} {seed}")
            rows[name] = [
                judgement(row(problem, name, i, judging), expression, judging)
                for i, (problem, expression) in enumerate(draws(count, judging, held_out=name == "judge_val"))
            ]
    return {name: rows[name] for name in FILES if name in files}


def main(arguments: list[str] | None = None) -> None:
    import pyarrow
    import pyarrow.parquet

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, default=Path("data/countdown"), help="folder to write")
    parser.add_argument("--files", nargs="+", default=FILES, choices=FILES, metavar="NAME", help="all if not given")
    parser.add_argument("--sft-rows", type=int, default=40000, help="rows of sft.parquet, and of sft_tool.parquet")
    parser.add_argument(
        "--preference-rows",
        type=int,
        default=20000,
        help="rows of preference.parquet and of judge.parquet; a twentieth as many held out",
    )
    parser.add_argument("--seed", type=int, default=0, help="order of rows and numbers, and all draws")
    args = parser.parse_args(arguments)
    for option, count in (("--sft-rows", args.sft_rows), ("--preference-rows", args.preference_rows)):
        if count < 1:
            parser.error(f"{option} {count}: expected at least 1")
    args.out.mkdir(parents=True, exist_ok=True)
    for name, rows in make_rows(args.sft_rows, args.preference_rows, args.seed, args.files).items():
        path = args.out / f"{name}.parquet"
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
        print(f"{path}: {len(rows)} rows")


if __name__ == "__main__":
    main()
