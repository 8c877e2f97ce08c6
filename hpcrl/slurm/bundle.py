"""What a job needs, in one folder with hashes: `<run>/bundle/`.

code/            hpcrl and slurm as they were, so that edits while the job waits in the queue change nothing
config.yaml      the template with its overrides; paths lead into the bundle
inputs/          data, tokenizer, start weights, the user's own code; large files are links to where they are
origin.json      where all that came from
manifest.json    every file above with its size and hash, links followed
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from hpcrl.checkpoint.manifest import MANIFEST, write_manifest
from hpcrl.checkpoint.store import load_path
from hpcrl.config import yaml_core
from hpcrl.config.inputs import file_of, inputs
from hpcrl.config.schema import Config
from hpcrl.launch.exits import InputError
from hpcrl.launch.job import run_directory

BUNDLE = "bundle"
COPIED = 64 << 20  # bytes; larger files are linked to, and hashed where they are
CODE = ("hpcrl", "slurm")


def checkout() -> Path:
    """The folder that holds hpcrl/ and slurm/."""
    root = Path(__file__).resolve().parents[2]
    if not (root / "slurm" / "common.sh").exists():
        raise InputError(f"{root} has no slurm/common.sh; submit works from a checkout of hpcrl, not from a package")
    return root


def stage(config: Config, root: Path, made_later: Collection[Path], report: Callable[[str], None]) -> Path:
    """Make the bundle of a run in its folder; returns the bundle.

    `made_later` are folders of runs that an earlier job of a chain makes: what lies in them is left where it will be.
    An equal bundle of an earlier submission stays; another one is set aside.
    """
    run_dir = run_directory(config)
    run_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    final, draft = run_dir / BUNDLE, run_dir / f"{BUNDLE}.tmp"
    shutil.rmtree(draft, ignore_errors=True)
    _copy_code(root, draft / "code")
    staged = _stage_inputs(config, draft, final, made_later, report)
    (draft / "config.yaml").write_text(yaml_core.dump(with_paths(config, staged)), encoding="utf-8")
    (draft / "origin.json").write_text(json.dumps({"commit": _commit(root), "inputs": staged}, indent=1) + "\n")
    write_manifest(draft)
    if final.exists():
        if _manifest(final) == _manifest(draft):
            shutil.rmtree(draft)
            return final
        number = next(n for n in itertools.count(1) if not (run_dir / f"{BUNDLE}_{n}").exists())
        final.rename(run_dir / f"{BUNDLE}_{number}")
    draft.rename(final)
    return final


def with_paths(config: Config, staged: dict[str, str]) -> dict[str, Any]:
    """What the template says, with absolute folders and staged paths. Keys that it leaves out stay out: a preset
    gives values to those alone."""
    tree = config.model_dump(exclude_unset=True)
    tree.setdefault("run", {})["dir"] = str(run_directory(config).parent)
    for key in {given.key for given in inputs(config)}:
        *sections, name = key.split(".")
        section = tree
        for part in sections:
            section = section[part]
        value = section[name]
        several = [value] if isinstance(value, str) else value
        moved = [_moved(key, path, staged) for path in several]
        section[name] = moved[0] if isinstance(value, str) else moved
    return tree


def _moved(key: str, value: str, staged: dict[str, str]) -> str:
    """`value` with its path replaced; what follows the path, a function's name, stays."""
    path = file_of(key, value)
    return staged.get(path, os.path.abspath(path)) + value[len(path) :]


def _copy_code(root: Path, target: Path) -> None:
    for name in code_files(root):
        destination = target / name
        destination.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(root / name, destination)


def code_files(root: Path) -> list[str]:
    """What git would keep of hpcrl/ and slurm/, relative to `root`; without git all but caches."""
    listed = _git(root, "ls-files", "--cached", "--others", "--exclude-standard", "--", *CODE)
    if listed:
        return [name for name in listed.splitlines() if (root / name).is_file()]
    found = (path for folder in CODE for path in (root / folder).rglob("*") if path.is_file())
    return [str(path.relative_to(root)) for path in sorted(found) if "__pycache__" not in path.parts]


def _commit(root: Path) -> str | None:
    commit = _git(root, "rev-parse", "HEAD")
    changed = _git(root, "status", "--porcelain", "--", *CODE)
    return f"{commit.strip()}{' with changes' if changed else ''}" if commit else None


def _git(root: Path, *arguments: str) -> str | None:
    try:
        return subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return None


def _stage_inputs(
    config: Config, draft: Path, final: Path, made_later: Collection[Path], report: Callable[[str], None]
) -> dict[str, str]:
    """Path in the config -> path in the finished bundle."""
    staged: dict[str, str] = {}
    for key, path in inputs(config):
        if path in staged or is_made_later(path, made_later):
            continue
        # a run holds more than its newest checkpoint; only that is needed, and it says whether it is whole
        source = load_path(path, report) if key.endswith("init_from") else Path(path)
        place = Path("inputs", _relative(source))
        _stage(source, draft / place)
        staged[path] = str(final / place)
    return staged


def is_made_later(path: str, made_later: Collection[Path]) -> bool:
    absolute = Path(os.path.abspath(path))
    return any(absolute == run or run in absolute.parents for run in made_later)


def _relative(path: Path) -> Path:
    """Where a path goes below inputs/: as from the working directory, else as from the root. Folders' names are kept,
    for prompts are named after their files, with as many folders as tell these apart."""
    absolute = Path(os.path.abspath(path))
    try:
        return absolute.relative_to(Path.cwd())
    except ValueError:
        return absolute.relative_to(absolute.anchor)


def _stage(source: Path, target: Path) -> None:
    if source.is_dir():
        files = {path: target / path.relative_to(source) for path in sorted(source.rglob("*")) if path.is_file()}
    elif source.suffix == ".py":  # it may import from its own folder
        files = {path: target.with_name(path.name) for path in source.parent.glob("*.py")}
    else:
        files = {source: target}
    for path, destination in files.items():
        destination.parent.mkdir(parents=True, exist_ok=True)
        if destination.exists():
            continue
        if path.stat().st_size > COPIED:
            destination.symlink_to(path.resolve())
        else:
            shutil.copy2(path, destination)


def _manifest(bundle: Path) -> str | None:
    try:
        return (bundle / MANIFEST).read_text(encoding="utf-8")
    except OSError:
        return None
