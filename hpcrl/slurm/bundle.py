"""The bundle of a job: one folder with everything it needs and its hashes, `<run>/bundle_<hash>/`.

Queued jobs refer to their bundle by that name, so bundles are never changed; the link `<run>/bundle` is the last
submitted one.

    code/            hpcrl, kernels and slurm, so that edits while the job is queued have no effect
    config.yaml      the template with its overrides; paths are those of the bundle
    inputs/          data, tokenizer, start weights, user code; large files are links
    origin.json      the source of all that
    manifest.json    every file above with its size and hash, links followed
"""

from __future__ import annotations

import itertools
import json
import os
import shlex
import shutil
import subprocess
from collections.abc import Callable, Collection, Iterator
from operator import attrgetter
from pathlib import Path
from typing import Any

import xxhash

from hpcrl.config import yaml_core
from hpcrl.config.paths import IS_INSTALLED, TEMPLATES, file_of, inputs, literal
from hpcrl.config.schema import Config
from hpcrl.engine.checkpoint.manifest import MANIFEST, FileEntry, write_manifest
from hpcrl.engine.checkpoint.store import load_path
from hpcrl.runtime.exits import InputError
from hpcrl.runtime.job import run_directory
from hpcrl.runtime.run_folder import close_to_others, make_directory
from hpcrl.sandbox.foreign_files import open_file, read_text

BUNDLE = "bundle"
MAX_COPIED = 64 << 20  # bytes; larger files are links, hashed in place
CODE = ("hpcrl", "kernels", "slurm")
DESCRIPTION = ("config.yaml", "origin.json")
MAX_MODULES = 2000  # Python files next to user code; more are not a small package, and copying them takes minutes


def code_root() -> Path:
    """Return the folder that contains hpcrl/: a checkout, which contains kernels/ and slurm/ too, or site-packages."""
    return Path(__file__).resolve().parents[2]


def stage(config: Config, root: Path, created_later: Collection[Path], report: Callable[[str], None]) -> Path:
    """Make the bundle of a run in its folder; return the bundle.

    `created_later` are folders of runs that an earlier job of a chain creates: paths in them are not staged. An equal
    bundle of an earlier submission is reused.
    """
    run_dir = run_directory(config)
    make_directory(run_dir, is_shared=config.run.group_readable)
    link, staging = run_dir / BUNDLE, run_dir / f"{BUNDLE}.tmp"
    shutil.rmtree(staging, ignore_errors=True)
    _copy_code(root, staging / "code")
    places = _stage_inputs(config, staging, created_later, report)
    # The config's paths contain the bundle's name, so the hash is taken with the link's name in its place.
    _describe(staging, config, places, link, root)
    manifest = write_manifest(staging).read_text(encoding="utf-8")
    final = run_dir / f"{BUNDLE}_{xxhash.xxh3_128_hexdigest(manifest.encode())[:8]}"
    _describe(staging, config, places, final, root)
    entries = [FileEntry(**entry) for entry in json.loads(manifest)["files"] if entry["path"] not in DESCRIPTION]
    write_manifest(staging, entries)
    close_to_others(staging, is_shared=config.run.group_readable)
    _commit_draft(staging, final)
    _replace_link(link, final)
    return final


def _describe(staging: Path, config: Config, places: dict[str, Path], final: Path, root: Path) -> None:
    """Write the files that contain paths, for the bundle's name `final`."""
    staged = {path: str(final / place) for path, place in places.items()}
    origin = {"commit": _commit(root), "inputs": staged}
    texts = (yaml_core.dump(with_paths(config, staged)), json.dumps(origin, indent=1) + "\n")
    for name, text in zip(DESCRIPTION, texts, strict=True):
        (staging / name).write_text(text, encoding="utf-8")


def _commit_draft(staging: Path, final: Path) -> None:
    """Rename the staged folder to `final`, unless an equal bundle exists."""
    if not final.exists():
        staging.rename(final)
        return
    equal = _manifest(final) == _manifest(staging)
    shutil.rmtree(staging)
    if not equal:
        raise InputError(f"{final} differs from what was staged under this name; remove it when no queued job needs it")


def _replace_link(link: Path, final: Path) -> None:
    """Point `link` to `final`, atomically."""
    fresh = link.with_name(f"{link.name}.link")
    fresh.unlink(missing_ok=True)
    fresh.symlink_to(final.name)
    fresh.replace(link)


def with_paths(config: Config, staged: dict[str, str]) -> dict[str, Any]:
    """Return the template with absolute folders and staged paths. Absent keys stay absent, because presets set only
    those."""
    tree = config.model_dump(exclude_unset=True)
    tree.setdefault("run", {})["dir"] = literal(str(run_directory(config).parent))
    for key in {given.key for given in inputs(config)}:
        *sections, name = key.split(".")
        section = tree
        for part in sections:
            section = section[part]
        value = attrgetter(key)(config)
        several = [value] if isinstance(value, str) else value
        moved = [literal(_replace_path(key, path, staged)) for path in several]
        section[name] = moved[0] if isinstance(value, str) else moved
    if config.job.on_event:
        tree.setdefault("job", {})["on_event"] = [_with_absolute_program(command) for command in config.job.on_event]
    return tree


def _with_absolute_program(command: str) -> str:
    """Make the path of a command's program absolute: the job runs in another folder. A name stays, as PATH has it."""
    program, *arguments = shlex.split(command)
    return shlex.join([os.path.abspath(program) if "/" in program else program, *arguments])


def _replace_path(key: str, value: str, staged: dict[str, str]) -> str:
    """Replace the path in `value`; a function's name after the path is kept."""
    path = file_of(key, value)
    return staged.get(path, os.path.abspath(path)) + value[len(path) :]


def _copy_code(root: Path, target: Path) -> None:
    for name in code_files(root):
        inside = f"hpcrl/{name}" if name.startswith("kernels/") else name  # the place of setup.py's link
        destination = target / inside
        destination.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(root / name, destination)
    if IS_INSTALLED:
        shutil.copytree(TEMPLATES / "slurm", target / "slurm")


def code_files(root: Path) -> list[str]:
    """Return git's files of CODE, relative to `root`; without git all files except caches. site-packages has only
    hpcrl/, and may be inside a repository of something else."""
    listed = None if IS_INSTALLED else _git(root, "ls-files", "--cached", "--others", "--exclude-standard", "--", *CODE)
    if listed:
        return [name for name in listed.splitlines() if (root / name).is_file()]
    folders = CODE[:1] if IS_INSTALLED else CODE
    found = (path for folder in folders for path in (root / folder).rglob("*") if path.is_file())
    return [str(path.relative_to(root)) for path in sorted(found) if "__pycache__" not in path.parts]


def _commit(root: Path) -> str | None:
    commit = None if IS_INSTALLED else _git(root, "rev-parse", "HEAD")
    changed = _git(root, "status", "--porcelain", "--", *CODE)
    return f"{commit.strip()}{' with changes' if changed else ''}" if commit else None


def _git(root: Path, *arguments: str) -> str | None:
    try:
        return subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return None


def _stage_inputs(
    config: Config, staging: Path, created_later: Collection[Path], report: Callable[[str], None]
) -> dict[str, Path]:
    """Return path in the config -> place in the bundle."""
    places: dict[str, Path] = {}
    for key, path in inputs(config):
        if path in places or is_created_later(path, created_later):
            continue
        # Of a run only the newest complete checkpoint is staged.
        source = load_path(path, report) if key.endswith("init_from") else Path(path)
        places[path] = Path("inputs", _relative(source))
        _stage(source, staging / places[path])
    return places


def is_created_later(path: str, created_later: Collection[Path]) -> bool:
    absolute = Path(os.path.abspath(path))
    return any(absolute == run or run in absolute.parents for run in created_later)


def _relative(path: Path) -> Path:
    """Return a path's place below inputs/: relative to the working directory, else to the root. Folder names are kept,
    because prompt uids contain as many as needed to distinguish the files."""
    absolute = Path(os.path.abspath(path))
    return absolute.relative_to(Path.cwd() if absolute.is_relative_to(Path.cwd()) else absolute.anchor)


def _stage(source: Path, target: Path) -> None:
    start, end = (source, target) if source.is_dir() else (source.parent, target.parent)
    for path in _files(source):
        if source.is_dir():
            open_file(path, source).close()  # a link in a model of others could lead to a private file
        destination = end / path.relative_to(start)
        destination.parent.mkdir(parents=True, exist_ok=True)
        if destination.exists():
            continue
        if _is_large(path):
            destination.symlink_to(path.resolve())
        else:
            shutil.copy2(path, destination)


def linked_folders(source: Path) -> set[Path]:
    """Return the folders of the files that links of the bundle lead to, with all links resolved."""
    return {path.resolve().parent for path in _files(source) if _is_large(path)}


def _is_large(path: Path) -> bool:
    return path.stat().st_size > MAX_COPIED


def _files(source: Path) -> list[Path]:
    """Return the files to stage for an input: those of a folder, or the file, and for code what it may import."""
    if source.is_dir():
        return [path for path in sorted(source.rglob("*")) if path.is_file()]
    if source.suffix != ".py":
        return [source]
    modules = list(itertools.islice(_modules(source.parent), MAX_MODULES + 1))
    if len(modules) > MAX_MODULES:
        where = f"at and below {source.parent}"
        raise InputError(
            f"more than {MAX_MODULES} files *.py {where} would be staged; move {source.name} to another folder"
        )
    return modules


def _modules(folder: Path) -> Iterator[Path]:
    """Yield the Python files of a folder and of the packages in it: only folders that directly contain such files, to
    skip data and runs, and no virtual environments."""
    for path in sorted(folder.iterdir()):
        if path.suffix == ".py" and path.is_file():
            yield path
        elif path.is_dir() and not path.is_symlink() and not path.name.startswith((".", "__pycache__")):
            if any(path.glob("*.py")) and not (path / "pyvenv.cfg").exists():
                yield from _modules(path)


def _manifest(bundle: Path) -> str | None:
    try:
        return read_text(bundle / MANIFEST)
    except OSError:
        return None
