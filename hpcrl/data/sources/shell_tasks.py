"""Tasks in a shell (`hpcrl.api.ShellTask`): a file of tasks, and a folder or a tar archive for each."""

from __future__ import annotations

import json
import shutil
import tarfile
from functools import cache
from hashlib import blake2b
from pathlib import Path
from tempfile import TemporaryDirectory

from hpcrl.data.source import USUAL_FILES, FileSource, Row, Source, rule_row, text, value
from hpcrl.runtime.exits import InputError
from hpcrl.sandbox.task_archive import unpack

STAGED = "tasks"  # below the dataset's folder


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
    row["extra_info"]["task"] = str(unpacked(path, out.resolve() / STAGED / name))


@cache
def unpacked(path: Path, staged: Path) -> Path:
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
    "shell_tasks": (
        FileSource(
            files=(("tasks.jsonl", "val_tasks.jsonl"), *USUAL_FILES),
            convert=convert_task,
            stage=stage_task,
            template="{prompt}",
            problem=lambda row: json.dumps(
                [row["prompt"], *(row["extra_info"][it] for it in ("task", "test", "test_files"))]
            ),
        ),
        "Tasks for hpcrl.api.ShellTask: tasks.jsonl with prompt, task (a folder or tar), test and test_files.",
    ),
}
