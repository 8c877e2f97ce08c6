"""What a dataset of `hpcrl data` declares, the rows of verl's schema that it makes, and its files below a folder."""

from __future__ import annotations

import argparse
import hashlib
import json
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, TypeAlias

from hpcrl.data.rendering import missing_part
from hpcrl.data.row_file import PARQUET_SUFFIXES, read_jsonl, read_parquet
from hpcrl.runtime.exits import InputError

Row: TypeAlias = dict[str, Any]
Message: TypeAlias = dict[str, str]

FOLDER = Path(__file__).parent
BUILT_IN = ("downloaded.py", "drawn.py")  # in the folder
OWN = "sources/[!_]*.py"  # files of users, in a folder that they make
IMAGE = "<image>"  # where a prompt's text has the picture, as in verl's files
# names of the files (train, val) of most datasets on Hugging Face
USUAL_FILES = (
    ("train-*.parquet", "test-*.parquet"),
    ("train-*.parquet", "validation-*.parquet"),
    ("train.parquet", "test.parquet"),
    ("train.jsonl", "test.jsonl"),
    ("train.jsonl", "validation.jsonl"),
)


class Dropped(Exception):
    """The row cannot be used. The message is the reason, under which `hpcrl data` counts the row."""


@dataclass(frozen=True)
class FileSource:
    """A dataset from files that a person has downloaded.

    files: patterns (train, val) of files anywhere below --from; the first pair that matches is taken, pairs without
        validation files last.
    convert: row of a file -> columns of verl's schema without `extra_info.split` and `extra_info.index`; all rows have
        the same columns and types. Raises Dropped for a row, InputError for a file of something else.
    template: the prompt, with the columns of the file in braces.
    stage: (row, folder of the file, folder of the dataset) copies what the row names below the dataset's folder.
    problem: what identifies the problem of a row whose prompt is a template with numbers in it, which are near
        duplicates as texts; None: the prompt. Rows of one problem are duplicates, and are held out together.
    """

    files: Sequence[tuple[str, str]]
    convert: Callable[[Row], Row]
    template: str
    problem: Callable[[Row], str] | None = None
    stage: Callable[[Row, Path, Path], None] | None = None


@dataclass(frozen=True)
class SyntheticSource:
    """A dataset that is drawn: `draw` returns one row, and no two rows of the dataset have the same problem.

    drawn_from: what else the rows depend on, for dataset.json.
    """

    draw: Callable[[random.Random], Row]
    template: str
    problem: Callable[[Row], str]
    drawn_from: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ConfigurableSource:
    """A dataset that is drawn as options of its own say. configured: from the parsed options; raises InputError."""

    add_options: Callable[[argparse.ArgumentParser], None]
    configured: Callable[[argparse.Namespace], SyntheticSource]


Source: TypeAlias = FileSource | SyntheticSource


def all_sources() -> dict[str, tuple[Source | ConfigurableSource, str]]:
    """Name -> the dataset, and one line about it: SOURCES of the files BUILT_IN and OWN, sorted by name.

    Raises ValueError if two of them have the same name.
    """
    by_name: dict[str, tuple[Source | ConfigurableSource, str]] = {}
    for path in [*(FOLDER / name for name in BUILT_IN), *sorted(FOLDER.glob(OWN))]:
        module = ".".join(path.relative_to(FOLDER).with_suffix("").parts)
        sources = import_module(f"hpcrl.data.{module}").SOURCES
        if twice := sorted(by_name.keys() & sources.keys()):
            raise ValueError(f"{path}: another file has the datasets {', '.join(twice)}, too; rename them in one file")
        by_name |= sources
    return dict(sorted(by_name.items()))


def rule_row(
    data_source: str, prompt: str | list[Message], ground_truth: Any, answer: str | None = None, **extra_info: Any
) -> Row:
    """A row that the rule for `data_source` scores. A prompt as text is one message of the user."""
    row: Row = {
        "data_source": data_source,
        "prompt": as_conversation(prompt),
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": ground_truth},
        "extra_info": extra_info,
    }
    return row if answer is None else row | {"answer": answer}


def answered_row(data_source: str, prompt: str | list[Message], **answers: str | list[Message]) -> Row:
    """A row that no rule scores, with columns of answers."""
    judged = {"ability": "chat", "reward_model": {"style": "model", "ground_truth": ""}}
    return rule_row(data_source, prompt, "") | judged | answers


def as_conversation(prompt: str | list[Message]) -> list[Message]:
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt


def value(row: Row, name: str) -> Any:
    """A column of a row. Raises InputError if the row has no such column."""
    if name not in row:
        raise InputError(f"no column {name!r}; it has {', '.join(row) or 'none'}")
    return row[name]


def text(row: Row, name: str) -> str:
    """A column of a row, as text. Raises InputError if the row has no such column, Dropped if it is empty."""
    content = value(row, name)
    if not isinstance(content, str) or not content.strip():
        raise Dropped(f"no text in {name}")
    return content


def messages(given: Any, name: str) -> list[Message]:
    """Role and content of each message; other fields, which some datasets have, are left out.

    Raises Dropped if this is not a conversation in text, or if a message has thoughts or tool calls besides its text.
    """
    if not isinstance(given, list) or not all(isinstance(message, dict) for message in given):
        raise Dropped(f"no messages in {name}")
    pairs = [{key: message.get(key) for key in ("role", "content")} for message in given]
    if not pairs or not all(isinstance(part, str) for pair in pairs for part in pair.values()):
        raise Dropped(f"a message without role or text in {name}")
    if any(missing_part(message, message["content"]) for message in given):
        raise Dropped(f"thoughts or tool calls beside the text in {name}")
    return pairs  # type: ignore[return-value]  # checked in the line above


def split_answer(conversation: list[Message], name: str) -> tuple[list[Message], str]:
    """The messages before the last one, and its text. Raises Dropped if it is not the assistant's, or is empty."""
    *before, last = conversation
    if last["role"] != "assistant":
        raise Dropped(f"{name} do not end with the assistant's message")
    if not last["content"].strip():
        raise Dropped(f"the last message of {name} is empty")
    return before, last["content"]


LFS_POINTER = b"version https://git-lfs"


def find_files(
    name: str, patterns: Sequence[tuple[str, str]], folder: Path, without: Path
) -> tuple[list[Path], list[Path]]:
    """Training and validation files anywhere below `folder` but not below `without`, by the first pair of patterns
    that finds both, or else by the first that finds training files; sorted.

    Raises InputError, with all patterns, if there are no training files.
    """
    if not folder.is_dir():
        kind = "a file" if folder.exists() else "no such folder"
        raise InputError(f"--from {folder}: {kind}; expected a folder with the files of {name}")
    pairs = [(files_below(folder, train, without), files_below(folder, val, without)) for train, val in patterns]
    for train, val in sorted(pairs, key=lambda pair: not pair[1]):
        if train:
            return train, val
    looked_for = ", ".join(dict.fromkeys(f"{train} (and {val})" for train, val in patterns))
    raise InputError(f"--from {folder}: no files of {name}; looked below it for {looked_for}")


def files_below(folder: Path, pattern: str, without: Path) -> list[Path]:
    without = without.resolve()
    paths = (path for path in folder.rglob(pattern) if path.is_file())
    return sorted(path for path in paths if without not in path.resolve().parents)


def read_rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """(place for error messages, row) of each row of a Parquet, JSON-lines or JSON file."""
    with open(path, "rb") as file:
        if file.read(len(LFS_POINTER)) == LFS_POINTER:
            raise InputError(f"{path}: found a pointer of Git LFS; expected the file itself; run git lfs pull there")
    if path.suffix in PARQUET_SUFFIXES:
        for number, row in read_parquet(str(path)):
            yield f"{path}: row {number}", row
    elif path.suffix == ".json":
        yield str(path), read_object(path)
    else:
        for number, row in read_jsonl(str(path)):
            yield f"{path}:{number}", row


def read_object(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: not JSON ({error}); expected one JSON object") from None
    if not isinstance(content, dict):
        raise InputError(f"{path}: found a JSON {type(content).__name__}; expected one JSON object")
    return content


def sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def files_summary(paths: Sequence[Path], folder: Path) -> dict[str, Any]:
    """Names below `folder`, bytes, and the SHA-256 of a file; of several, that of the lines that sha256sum prints."""
    names = [path.relative_to(folder).as_posix() for path in paths]
    hashes = [sha256(path) for path in paths]
    lines = "".join(f"{digest}  {name}\n" for digest, name in zip(hashes, names, strict=True))
    return {
        "num_files": len(paths),
        "first_file": names[0],
        "bytes": sum(path.stat().st_size for path in paths),
        "sha256": hashes[0] if len(paths) == 1 else hashlib.sha256(lines.encode()).hexdigest(),
    }
