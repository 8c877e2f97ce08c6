"""The files of a dataset below a folder: found by their names, read row by row, hashed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from hpcrl.data.row_file import PARQUET_SUFFIXES, read_jsonl, read_parquet
from hpcrl.runtime.exits import InputError

LFS_POINTER = b"version https://git-lfs"


def find_files(
    name: str, patterns: Sequence[tuple[str, str]], folder: Path, without: Path
) -> tuple[list[Path], list[Path]]:
    """Training and validation files anywhere below `folder` but not below `without`, by the first pair of patterns
    that finds both, or else by the first that finds training files; sorted.

    Raises InputError, with all patterns, if there are no training files.
    """
    if not folder.is_dir():
        found = "a file" if folder.exists() else "no such folder"
        raise InputError(f"--from {folder}: {found}; expected a folder with the files of {name}")
    pairs = [(below(folder, train, without), below(folder, val, without)) for train, val in patterns]
    for train, val in sorted(pairs, key=lambda pair: not pair[1]):
        if train:
            return train, val
    looked_for = ", ".join(dict.fromkeys(f"{train} (and {val})" for train, val in patterns))
    raise InputError(f"--from {folder}: no files of {name}; looked below it for {looked_for}")


def below(folder: Path, pattern: str, without: Path) -> list[Path]:
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
        found = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: not JSON ({error}); expected one JSON object") from None
    if not isinstance(found, dict):
        raise InputError(f"{path}: found a JSON {type(found).__name__}; expected one JSON object")
    return found


def sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def summary(paths: Sequence[Path], folder: Path) -> dict[str, Any]:
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
