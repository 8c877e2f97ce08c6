"""Datasets of `hpcrl data` from downloaded files: SOURCES has them by name."""

from __future__ import annotations

import json
import shutil
import tarfile
from collections.abc import Sequence
from functools import cache
from hashlib import blake2b
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hpcrl.data.source import (
    IMAGE,
    USUAL_FILES,
    Dropped,
    FileSource,
    Message,
    Row,
    Source,
    answered_row,
    as_conversation,
    messages,
    rule_row,
    split_answer,
    text,
    value,
)
from hpcrl.rewards.scorers.math_answers import boxed_answer
from hpcrl.runtime.exits import InputError
from hpcrl.sandbox.task_archive import unpack


def convert_chat(row: Row) -> Row:
    """The whole conversation, and as the prompt what is before its last message."""
    conversation = messages(value(row, "messages"), "messages")
    prompt, _ = split_answer(conversation, "messages")
    if not prompt:
        raise Dropped("no message before the answer")
    return answered_row("chat", prompt, messages=conversation)


LARGEST = 1 << 62  # Parquet has 64 bits
COUNTDOWN_TEMPLATE = (
    "Use the numbers {numbers} to make {target}. Use each number exactly once, with the operations + - * / and "
    "parentheses. Think inside <think> </think> tags, then write the expression inside <answer> </answer> tags, for "
    "example <answer>(1 + 2) / 3</answer>."
)


def countdown_row(numbers: Sequence[int], target: int, answer: str | None = None) -> Row:
    """The problem as a chat, which the rule `countdown` scores."""
    *most, last = map(str, numbers)
    prompt = COUNTDOWN_TEMPLATE.format(numbers=f"{', '.join(most)} and {last}", target=target)
    return rule_row("countdown", prompt, {"target": target, "numbers": list(numbers)}, answer)


def sorted_numbers(row: Row) -> str:
    """The same numbers in another order, or with another target, are no new problem."""
    return repr(sorted(row["reward_model"]["ground_truth"]["numbers"]))


def convert_countdown(row: Row) -> Row:
    numbers, target = value(row, "nums"), value(row, "target")
    if not isinstance(numbers, list) or not all(is_whole(number) for number in [*numbers, target]):
        raise Dropped("nums or target are not whole numbers")
    if len(numbers) < 2:
        raise Dropped("fewer than two numbers")
    return countdown_row(numbers, target)


def is_whole(number: Any) -> bool:
    return type(number) is int and abs(number) < LARGEST


def convert_dapo_math(row: Row) -> Row:
    """The prompt has its instruction already; DAPO-Math-17k-Processed keeps it in `source_prompt`."""
    prompt = messages(row.get("source_prompt") or value(row, "prompt"), "prompt")
    reward_model = value(row, "reward_model")
    if not isinstance(reward_model, dict):
        raise InputError(f"column 'reward_model' holds {reward_model!r}; expected a mapping with ground_truth")
    truth = reward_model.get("ground_truth")
    if not isinstance(truth, str) or not truth.strip():
        raise Dropped("no ground_truth")
    identifier = (row.get("extra_info") or {}).get("index")
    return rule_row(text(row, "data_source"), prompt, truth, id=str("" if identifier is None else identifier))


GEOMETRY3K_INSTRUCTION = (
    "You FIRST think about the reasoning process as an internal monologue and then provide the final answer. The "
    "reasoning process MUST BE enclosed within <think> </think> tags. The final answer MUST BE put in \\boxed{}."
)


def convert_geometry3k(row: Row) -> Row:
    problem, answer, images = text(row, "problem"), text(row, "answer"), value(row, "images")
    if not images or problem.count(IMAGE) != len(images):
        raise Dropped(f"another number of {IMAGE} than pictures")
    problem_row = rule_row("hiyouga/geometry3k", f"{problem} {GEOMETRY3K_INSTRUCTION}", answer, question=problem)
    problem_row["extra_info"]["answer"] = answer
    return problem_row | {"images": [{"bytes": image["bytes"], "path": image["path"]} for image in images]}


GSM8K_MARK = "####"
GSM8K_INSTRUCTION = f'Let\'s think step by step and output the final answer after "{GSM8K_MARK}".'


def convert_gsm8k(row: Row) -> Row:
    question, answer = text(row, "question"), text(row, "answer")
    _, marked, final = answer.rpartition(GSM8K_MARK)
    if not marked:
        raise Dropped(f"no {GSM8K_MARK} in answer")
    return rule_row("openai/gsm8k", f"{question} {GSM8K_INSTRUCTION}", final.strip().replace(",", ""), answer)


MATH_INSTRUCTION = "Let's think step by step and output the final answer within \\boxed{}."


def convert_math(row: Row) -> Row:
    problem, solution = text(row, "problem"), text(row, "solution")
    answer = boxed_answer(solution)
    if not answer:
        raise Dropped("no \\boxed answer in solution")
    level, kind = str(row.get("level") or ""), str(row.get("type") or row.get("subject") or "")
    prompt = f"{problem} {MATH_INSTRUCTION}"
    return rule_row("DigitalLearningGmbH/MATH-lighteval", prompt, answer, solution, level=level, type=kind)


def convert_preferences(row: Row) -> Row:
    sides = {name: preferences_side(value(row, name), name) for name in ("chosen", "rejected")}
    (before, chosen), (other, rejected) = sides.values()
    if before != other:
        raise Dropped("chosen and rejected answer different prompts")
    if chosen == rejected:
        raise Dropped("chosen and rejected are equal")
    return answered_row("preferences", before or preferences_prompt(row), chosen=chosen, rejected=rejected)


def preferences_side(given: Any, name: str) -> tuple[list[Message], str]:
    """The messages before an answer, none for an answer as text, and the answer."""
    if isinstance(given, str) and given.strip():
        return [], given
    if not given or isinstance(given, str):
        raise Dropped(f"no {name} answer")
    return split_answer(messages(given, name), name)


def preferences_prompt(row: Row) -> list[Message]:
    prompt = value(row, "prompt")
    return messages(prompt, "prompt") if isinstance(prompt, list) else as_conversation(text(row, "prompt"))


STAGED_TASKS = "tasks"  # below the dataset's folder


def convert_task(row: Row) -> Row:
    files = row.get("test_files") or {}
    if not isinstance(files, dict) or not all(isinstance(it, str) for it in files.values()):
        raise InputError(f"column 'test_files' holds {str(files)[:80]}; expected {{path: text}}")
    if not isinstance(value(row, "task"), str | None):
        raise InputError(
            f"column 'task' holds {row['task']!r}; expected the path of a folder or a tar archive, or null"
        )
    pairs = [[path, content] for path, content in files.items()]
    task = rule_row("shell_task", text(row, "prompt"), "", task=row["task"], test=text(row, "test"), test_files=pairs)
    return task | {"ability": "shell"}


def stage_task(row: Row, folder: Path, out: Path) -> None:
    """Put the row's task in a folder below `out`. Raises InputError if it is not below `folder`."""
    if not (task := row["extra_info"]["task"]):
        return
    path = (folder / task).resolve()
    if not path.exists() or not path.is_relative_to(folder.resolve()):
        raise InputError(f"column 'task': {task!r} is not in {folder}; expected a folder or a tar archive below it")
    name = f"{path.name.partition('.')[0]}_{blake2b(str(path).encode(), digest_size=16).hexdigest()}"
    row["extra_info"]["task"] = str(unpacked_task(path, out.resolve() / STAGED_TASKS / name))


def task_identity(row: Row) -> str:
    return json.dumps([row["prompt"], *(row["extra_info"][name] for name in ("task", "test", "test_files"))])


@cache
def unpacked_task(path: Path, staged: Path) -> Path:
    """Unpack a task, so that each trajectory has it without a copy. Raises ForeignFileError for what may not be in it:
    a device, a link that leads out and others."""
    shutil.rmtree(staged, ignore_errors=True)
    staged.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=staged.parent) as scratch:
        archive = path
        if path.is_dir():
            archive = Path(scratch, path.name)
            with tarfile.open(archive, "w") as packed:
                packed.add(path, ".")
        unpack(archive, staged)
    return staged


SOURCES: dict[str, tuple[Source, str]] = {
    "chat": (
        FileSource((("train_sft-*.parquet", "test_sft-*.parquet"), *USUAL_FILES), convert_chat, "{messages}"),
        "Chats for SFT: conversations in a column messages.",
    ),
    "countdown": (
        FileSource(USUAL_FILES, convert_countdown, COUNTDOWN_TEMPLATE, problem=sorted_numbers),
        "Countdown as a chat: Jiayi-Pan/Countdown-Tasks-3to4, or other files with target and nums.",
    ),
    "dapo_math": (
        FileSource((("dapo-math-17k.parquet", "aime-2024.parquet"), *USUAL_FILES), convert_dapo_math, "{prompt}"),
        "DAPO-Math-17k without its repetitions, for validation AIME 2024: Parquet in verl's layout.",
    ),
    "geometry3k": (
        FileSource(USUAL_FILES, convert_geometry3k, f"{{problem}} {GEOMETRY3K_INSTRUCTION}"),
        "Geometry3K, problems with a figure: hiyouga/geometry3k as Parquet.",
    ),
    "gsm8k": (
        FileSource(
            # the dataset's folder has two versions of the answers, main and socratic
            (("main/train-*.parquet", "main/test-*.parquet"), *USUAL_FILES),
            convert_gsm8k,
            f"{{question}} {GSM8K_INSTRUCTION}",
        ),
        "GSM8K, grade-school word problems: openai/gsm8k as Parquet, or the original train.jsonl and test.jsonl.",
    ),
    "math": (
        FileSource(
            # data/ first: some copies on Hugging Face have each problem there and in the folder of its subject
            (("train/*/*.json", "test/*/*.json"), ("data/train-*.parquet", "data/test-*.parquet"), *USUAL_FILES),
            convert_math,
            f"{{problem}} {MATH_INSTRUCTION}",
        ),
        "MATH, competition problems: the original folders of JSON files, or Parquet or JSONL with problem and "
        "solution.",
    ),
    "preferences": (
        FileSource((("train_prefs-*.parquet", "test_prefs-*.parquet"), *USUAL_FILES), convert_preferences, "{prompt}"),
        "Preferences, as UltraFeedback has them: prompt, chosen and rejected, as messages or text.",
    ),
    "shell_tasks": (
        FileSource(
            (("tasks.jsonl", "val_tasks.jsonl"), *USUAL_FILES), convert_task, "{prompt}", task_identity, stage_task
        ),
        "Tasks for hpcrl.api.ShellTask: tasks.jsonl with prompt, task (a folder or tar), test and test_files.",
    ),
}
