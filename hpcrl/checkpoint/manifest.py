"""`manifest.json`: what a checkpoint folder must hold, so that a damaged one is noticed before it is loaded."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import TypeVar

import xxhash

MANIFEST = "manifest.json"
T = TypeVar("T")
R = TypeVar("R")
_CHUNK = 4 << 20  # bytes read at once


def write_manifest(folder: str | os.PathLike[str]) -> Path:
    """List every file below `folder` as {path, bytes, xxh3_128}. The list carries a hash of its own."""
    root = Path(folder)
    paths = sorted(path for path in root.rglob("*") if path.is_file() and path != root / MANIFEST)
    names = [path.relative_to(root).as_posix() for path in paths]
    files = [
        {"path": name, "bytes": size, "xxh3_128": digest}
        for name, (size, digest) in zip(names, _in_parallel(_size_and_hash, paths), strict=True)
    ]
    manifest = root / MANIFEST
    manifest.write_text(json.dumps({"files": files, "xxh3_128": _hash_of_list(files)}, indent=1), encoding="utf-8")
    return manifest


def verify(folder: str | os.PathLike[str]) -> list[str]:
    """What is wrong with the folder, one line per file, each beginning with the file's name. Extra files are fine."""
    root = Path(folder)
    try:
        entries = _read(root / MANIFEST)
    except FileNotFoundError:
        return [f"{MANIFEST} is missing"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        return [f"{MANIFEST} is damaged ({error})"]
    # Sizes first: they are free, and hashing reads every byte of what may be terabytes.
    problems = [problem for entry in entries if (problem := _wrong_size(root, *entry[:2]))]
    return problems or [
        problem for problem in _in_parallel(lambda entry: _wrong_content(root, entry), entries) if problem
    ]


def _read(manifest: Path) -> list[tuple[str, int, str]]:
    content = json.loads(manifest.read_text(encoding="utf-8"))
    files = content["files"]
    if _hash_of_list(files) != content["xxh3_128"]:
        raise ValueError("its list of files does not have the hash that it states")
    entries = [(entry["path"], entry["bytes"], entry["xxh3_128"]) for entry in files]
    for name, _, _ in entries:
        if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
            raise ValueError(f"it lists {name}, which is outside the folder")
    return entries


def _wrong_size(root: Path, name: str, size: int) -> str | None:
    path = root / name
    if not path.is_file():
        return f"{name} is missing"
    found = path.stat().st_size
    return None if found == size else f"{name} has {found} bytes, expected {size}"


def _wrong_content(root: Path, entry: tuple[str, int, str]) -> str | None:
    name, _, expected = entry
    try:
        _, found = _size_and_hash(root / name)
    except OSError as error:
        return f"{name} cannot be read ({error.strerror})"
    return None if found == expected else f"{name} has other content than was saved (xxh3_128 {found}, not {expected})"


def _in_parallel(function: Callable[[T], R], items: Iterable[T]) -> list[R]:
    """Several files at once: a parallel file system is slow one file at a time."""
    with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as pool:
        return list(pool.map(function, items))


def _size_and_hash(path: Path) -> tuple[int, str]:
    digest, size = xxhash.xxh3_128(), 0
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
            size += len(chunk)
    return size, digest.hexdigest()


def _hash_of_list(files: list[dict[str, object]]) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(files, sort_keys=True).encode())
