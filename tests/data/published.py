"""Small files of each dataset of `hpcrl data`, in the format in which it is published."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.geometry import picture

Rows = list[dict[str, Any]]

SHOPS = [
    ("Ada sells 48 clips in April and half as many in May. How many clips does she sell?", 72),
    ("A train with 1,250 seats runs four times a day. How many people can it carry in one day?", 5000),
    ("Ben walks 3 km to school and back on each of 5 days. How far does he walk in a week?", 30),
    ("There are 12 eggs in a box and Cleo breaks 5 of them. How many eggs are whole?", 7),
]
PROBLEMS = [
    ("Compute $2^5$.", "We multiply: $2^5 = \\boxed{32}$.", "Level 1", "Prealgebra"),
    ("Find the sum of the roots of $x^2 - 5x + 6 = 0$.", "By Vieta it is $\\boxed{5}$.", "Level 2", "Algebra"),
    ("What is half of one third?", "It is $\\boxed{\\frac{1}{6}}$.", "Level 1", "Prealgebra"),
    ("A proof without an answer.", "This is clear.", "Level 5", "Geometry"),
]


def write_parquet(path: Path, rows: Rows) -> None:
    import pyarrow
    import pyarrow.parquet

    path.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)


def write_jsonl(path: Path, rows: Rows) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def shop_rows(shops: list[tuple[str, int]]) -> Rows:
    return [{"question": text, "answer": f"We count <<1+1=2>> it.\n#### {number:,}"} for text, number in shops]


def problem_rows(problems: list[tuple[str, str, str, str]]) -> Rows:
    return [dict(zip(("problem", "solution", "level", "type"), problem, strict=True)) for problem in problems]


def gsm8k_parquet(folder: Path) -> None:
    write_parquet(folder / "main" / "train-00000-of-00001.parquet", shop_rows(SHOPS[:3]))
    write_parquet(folder / "main" / "test-00000-of-00001.parquet", shop_rows(SHOPS[3:]))
    write_parquet(folder / "socratic" / "train-00000-of-00001.parquet", shop_rows(SHOPS))


def gsm8k_jsonl(folder: Path) -> None:
    write_jsonl(folder / "grade_school_math" / "data" / "train.jsonl", shop_rows(SHOPS[:3]))
    write_jsonl(folder / "grade_school_math" / "data" / "test.jsonl", shop_rows(SHOPS[3:]))


def math_folders(folder: Path) -> None:
    for split, rows in (("train", problem_rows(PROBLEMS[1:])), ("test", problem_rows(PROBLEMS[:1]))):
        for number, row in enumerate(rows):
            path = folder / "MATH" / split / row["type"].lower() / f"{number}.json"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(row), encoding="utf-8")


def math_parquet(folder: Path) -> None:
    write_parquet(folder / "data" / "train-00000-of-00001.parquet", problem_rows(PROBLEMS[1:]))
    write_parquet(folder / "data" / "test-00000-of-00001.parquet", problem_rows(PROBLEMS[:1]))
    write_parquet(folder / "algebra" / "train-00000-of-00001.parquet", problem_rows(PROBLEMS[1:2]))


def dapo_row(question: str, answer: str, index: Any) -> dict[str, Any]:
    text = f"Solve the problem. The last line is Answer: $Answer.\n\n{question}\n\nRemember the last line."
    return {
        "data_source": "math_dapo",
        "prompt": [{"content": text, "role": "user"}],
        "ability": "MATH",
        "reward_model": {"ground_truth": answer, "style": "rule-lighteval/MATH_v2"},
        "extra_info": {"index": index},
    }


def dapo_math(folder: Path) -> None:
    rows = [dapo_row(f"How many primes are below {n}?", answer, f"id-{n}") for n, answer in ((10, "4"), (30, "10"))]
    contradicts = dapo_row("How many primes are below 30?", "11", "id-x")
    write_parquet(folder / "data" / "dapo-math-17k.parquet", [*rows, *rows, *rows, contradicts])
    aime = dapo_row("Find the number of lattice points inside the circle with radius 3.", "25", 7)
    write_parquet(folder / "data" / "aime-2024.parquet", [aime, aime])


def countdown(folder: Path) -> None:
    rows = [{"target": n + 3, "nums": [n, 2, 1]} for n in range(4, 44)]
    rows += [{"target": n - 1, "nums": [2, 1, n]} for n in range(4, 44)]  # the same numbers
    write_parquet(folder / "data" / "train-00000-of-00001.parquet", rows)


def preference_row(question: str, chosen: str | None, rejected: str | None) -> dict[str, Any]:
    def conversation(answer: str | None) -> Any:
        user = {"content": question, "role": "user"}
        return None if answer is None else [user, {"content": answer, "role": "assistant"}]

    sides = {"chosen": conversation(chosen), "rejected": conversation(rejected)}
    return {"prompt": question, "prompt_id": "0", **sides, "score_chosen": 8.0, "score_rejected": 5.0}


def preferences(folder: Path) -> None:
    questions = ["Which planet has rings?", "Name a river in France.", "What melts?", "Who wrote Faust?", "How far?"]
    answers = [("Saturn.", "Mars."), ("The Loire.", "The Rhine, maybe."), ("Ice.", "Ice."), ("Goethe.", None)]
    rows = [preference_row(question, *pair) for question, pair in zip(questions, answers, strict=False)]
    write_parquet(folder / "data" / "train_prefs-00000-of-00001.parquet", rows)
    write_parquet(
        folder / "data" / "test_prefs-00000-of-00001.parquet", [preference_row(questions[-1], "2 km.", "No.")]
    )
    write_parquet(folder / "data" / "train_sft-00000-of-00001.parquet", rows)  # of another use


def chat_row(*texts: str) -> dict[str, Any]:
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)], "prompt_id": "0"}


def chat(folder: Path) -> None:
    rows = [chat_row("Hello", "Good day.", "What is a fjord?", "A long bay."), chat_row("Say one.", "One.")]
    unusable = [chat_row("Is it?", "Yes.", "Why?"), chat_row("Half of", "a pair: \ud83d"), rows[1]]
    write_jsonl(folder / "train.jsonl", [*rows, *unusable])
    write_jsonl(folder / "test.jsonl", [chat_row("Name three colours of the flag of Italy.", "Green, white, red.")])


def geometry3k(folder: Path) -> None:
    problems = [
        ("<image>Find x.", "17", 1),
        ("<image>Find the area.", "18 \\sqrt { 3 }", 1),
        ("<image>Find y.", "4", 2),
    ]
    rows = [
        {"images": [picture(seed + n) for n in range(count)], "problem": problem, "answer": answer}
        for seed, (problem, answer, count) in enumerate(problems)
    ]
    write_parquet(folder / "data" / "train-00000-of-00001.parquet", rows)
    test = [{"images": [picture(9)], "problem": "<image>Find x.", "answer": "5"}]  # another figure
    write_parquet(folder / "data" / "test-00000-of-00001.parquet", test)
    write_parquet(folder / "data" / "validation-00000-of-00001.parquet", rows)


# name of the dataset, files, rows of (train, val), what is dropped from train
PUBLISHED: dict[str, tuple[str, Callable[[Path], None], tuple[int, int], dict[str, int]]] = {
    "gsm8k_parquet": ("gsm8k", gsm8k_parquet, (3, 1), {}),
    "gsm8k_jsonl": ("gsm8k", gsm8k_jsonl, (3, 1), {}),
    "math_folders": ("math", math_folders, (2, 1), {"no \\boxed answer in solution": 1}),
    "math_parquet": ("math", math_parquet, (2, 1), {"no \\boxed answer in solution": 1}),
    "dapo_math": (
        "dapo_math",
        dapo_math,
        (2, 1),
        {"repeats a row": 4, "repeats a prompt with another ground truth": 1},
    ),
    "geometry3k": ("geometry3k", geometry3k, (2, 1), {"another number of <image> than pictures": 1}),
    "countdown": ("countdown", countdown, (76, 4), {}),
    "preferences": (
        "preferences",
        preferences,
        (2, 1),
        {"chosen and rejected are equal": 1, "no rejected answer": 1},
    ),
    "chat": (
        "chat",
        chat,
        (2, 1),
        {"messages do not end with the assistant's message": 1, "repeats a row": 1, "text that is not Unicode": 1},
    ),
}
