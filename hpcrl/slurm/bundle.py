"""What a job needs, in one folder with hashes: `<run>/bundle_<hash>/`. Jobs in the queue read theirs by that name, so
none is ever changed; the link `<run>/bundle` leads to the one that was submitted last.

code/            hpcrl, kernels and slurm as they were, so that edits while the job waits in the queue change nothing
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
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import xxhash

from hpcrl.checkpoint.manifest import MANIFEST, FileEntry, write_manifest
from hpcrl.checkpoint.store import load_path
from hpcrl.config import yaml_core
from hpcrl.config.inputs import file_of, inputs
from hpcrl.config.schema import Config
from hpcrl.runtime.exits import InputError
from hpcrl.runtime.job import run_directory

BUNDLE = "bundle"
COPIED = 64 << 20  # bytes; larger files are linked to, and hashed where they are
CODE = ("hpcrl", "kernels", "slurm")
DESCRIPTION = ("config.yaml", "origin.json")
MOST_MODULES = 2000  # files of Python beside a user's own; more are no small package, and copying them takes minutes


def checkout() -> Path:
    """The folder that holds hpcrl/ and slurm/."""
    root = Path(__file__).resolve().parents[2]
    if not (root / "slurm" / "common.sh").exists():
        raise InputError(f"{root} has no slurm/common.sh; submit works from a checkout of hpcrl, not from a package")
    return root


def stage(config: Config, root: Path, made_later: Collection[Path], report: Callable[[str], None]) -> Path:
    """Make the bundle of a run in its folder; returns the bundle.

    `made_later` are folders of runs that an earlier job of a chain makes: files in them are not staged. An equal bundle
    of an earlier submission is reused.
    """
    run_dir = run_directory(config)
    run_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    link, draft = run_dir / BUNDLE, run_dir / f"{BUNDLE}.tmp"
    shutil.rmtree(draft, ignore_errors=True)
    _copy_code(root, draft / "code")
    places = _stage_inputs(config, draft, made_later, report)
    # the config has the bundle's name in its paths, so the name is that of what it holds under the link's name
    _describe(draft, config, places, link, root)
    manifest = write_manifest(draft).read_text(encoding="utf-8")
    final = run_dir / f"{BUNDLE}_{xxhash.xxh3_128_hexdigest(manifest.encode())[:8]}"
    _describe(draft, config, places, final, root)
    kept = [FileEntry(**entry) for entry in json.loads(manifest)["files"] if entry["path"] not in DESCRIPTION]
    write_manifest(draft, kept)
    _keep(draft, final)
    _point(link, final)
    return final


def _describe(draft: Path, config: Config, places: dict[str, Path], final: Path, root: Path) -> None:
    """Write config.yaml and origin.json, with the paths that files have once the draft is `final`."""
    staged = {path: str(final / place) for path, place in places.items()}
    origin = {"commit": _commit(root), "inputs": staged}
    texts = (yaml_core.dump(with_paths(config, staged)), json.dumps(origin, indent=1) + "\n")
    for name, text in zip(DESCRIPTION, texts, strict=True):
        (draft / name).write_text(text, encoding="utf-8")


def _keep(draft: Path, final: Path) -> None:
    """Rename the draft to `final`, unless an equal bundle exists."""
    if not final.exists():
        draft.rename(final)
        return
    equal = _manifest(final) == _manifest(draft)
    shutil.rmtree(draft)
    if not equal:
        raise InputError(
            f"{final} differs from what was staged under this name; remove it once no job in the queue needs it"
        )


def _point(link: Path, final: Path) -> None:
    """Make `link` lead to `final`, atomically."""
    fresh = link.with_name(f"{link.name}.link")
    fresh.unlink(missing_ok=True)
    fresh.symlink_to(final.name)
    fresh.replace(link)


def with_paths(config: Config, staged: dict[str, str]) -> dict[str, Any]:
    """The template's tree, with absolute folders and staged paths. Keys that it leaves out stay out, because a preset
    fills in only those."""
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
    """`value` with its path replaced; a function's name after the path stays."""
    path = file_of(key, value)
    return staged.get(path, os.path.abspath(path)) + value[len(path) :]


def _copy_code(root: Path, target: Path) -> None:
    for name in code_files(root):
        inside = f"hpcrl/{name}" if name.startswith("kernels/") else name  # where the link that setup.py makes has them
        destination = target / inside
        destination.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(root / name, destination)


def code_files(root: Path) -> list[str]:
    """Files of hpcrl/, kernels/ and slurm/ that git would keep, relative to `root`; without git, all but caches."""
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
    config: Config, draft: Path, made_later: Collection[Path], report: Callable[[str], None]
) -> dict[str, Path]:
    """Path in the config -> place in the bundle."""
    places: dict[str, Path] = {}
    for key, path in inputs(config):
        if path in places or is_made_later(path, made_later):
            continue
        # a run holds more than its newest checkpoint; only that is needed, and it says whether it is whole
        source = load_path(path, report) if key.endswith("init_from") else Path(path)
        places[path] = Path("inputs", _relative(source))
        _stage(source, draft / places[path])
    return places


def is_made_later(path: str, made_later: Collection[Path]) -> bool:
    absolute = Path(os.path.abspath(path))
    return any(absolute == run or run in absolute.parents for run in made_later)


def _relative(path: Path) -> Path:
    """Path of a file below inputs/: relative to the working directory or else to the root. Folder names are kept,
    because prompts are named after their files and as many folders as make these distinct."""
    absolute = Path(os.path.abspath(path))
    try:
        return absolute.relative_to(Path.cwd())
    except ValueError:
        return absolute.relative_to(absolute.anchor)


def _stage(source: Path, target: Path) -> None:
    start, end = (source, target) if source.is_dir() else (source.parent, target.parent)
    for path in _files(source):
        destination = end / path.relative_to(start)
        destination.parent.mkdir(parents=True, exist_ok=True)
        if destination.exists():
            continue
        if _is_large(path):
            destination.symlink_to(path.resolve())
        else:
            shutil.copy2(path, destination)


def linked_folders(source: Path) -> set[Path]:
    """Folders of the files to which the bundle has links, with links resolved."""
    return {path.resolve().parent for path in _files(source) if _is_large(path)}


def _is_large(path: Path) -> bool:
    return path.stat().st_size > COPIED


def _files(source: Path) -> list[Path]:
    """Files that are staged for an input: those of a folder, or the file; with code, the modules that it may import."""
    if source.is_dir():
        return [path for path in sorted(source.rglob("*")) if path.is_file()]
    if source.suffix != ".py":
        return [source]
    found = list(itertools.islice(_modules(source.parent), MOST_MODULES + 1))
    if len(found) > MOST_MODULES:
        where = f"at and below {source.parent}"
        raise InputError(f"more than {MOST_MODULES} files *.py {where} would be staged; give {source.name} a folder")
    return found


def _modules(folder: Path) -> Iterator[Path]:
    """Python files of a folder and of the packages in it: folders with Python files of their own, so that data and runs
    are not walked. Virtual environments are left out."""
    for path in sorted(folder.iterdir()):
        if path.suffix == ".py" and path.is_file():
            yield path
        elif path.is_dir() and not path.is_symlink() and not path.name.startswith((".", "__pycache__")):
            if any(path.glob("*.py")) and not (path / "pyvenv.cfg").exists():
                yield from _modules(path)


def _manifest(bundle: Path) -> str | None:
    try:
        return (bundle / MANIFEST).read_text(encoding="utf-8")
    except OSError:
        return None
