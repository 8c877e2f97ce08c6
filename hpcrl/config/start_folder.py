"""`hpcrl init`: a folder to start from, copied from the templates that the package has."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from hpcrl.config.paths import TEMPLATES
from hpcrl.runtime import exits
from hpcrl.runtime.exits import ArgumentParser, InputError
from hpcrl.sandbox.new_files import draft_of


@dataclass(frozen=True)
class StartFolder:
    """What a kind of machine starts with. copies: file or folder below TEMPLATES -> its place in the new folder.

    edit: what to change first. commands: what to run in the folder, with a comment each.
    """

    about: str
    copies: Mapping[str, str]
    edit: str
    commands: tuple[str, ...]


ONE_GPU = "configs/one_gpu"
REWARD = {"configs/start/reward.py": "reward.py"}
COUNTDOWN = "tools/prepare_countdown.py"
KINDS = {
    "laptop": StartFolder(
        "a model of 0.35 M parameters on two cores, without a network: SFT, then GRPO, in a few minutes",
        {**REWARD, "configs/start/laptop": ".", "configs/tokenizer": "tokenizer", COUNTDOWN: "prepare_countdown.py"},
        "grpo.yaml, at the marks (1) to (5), and reward.py",
        (
            "python prepare_countdown.py --files train val sft",
            "mpiexec -n 2 hpcrl sft sft.yaml",
            "mpiexec -n 2 hpcrl train grpo.yaml",
        ),
    ),
    "one-gpu": StartFolder(
        "models of 0.5B to 3B on one GPU of 24 to 80 GB: SFT, DPO, GRPO, LoRA",
        {ONE_GPU: ONE_GPU},
        f"{ONE_GPU}/base.yaml: the GPU's memory, and data; copy the model into models/Qwen2.5-0.5B-Instruct",
        (
            "hpcrl data gsm8k --from DOWNLOADED --out data/gsm8k",
            f"hpcrl plan {ONE_GPU}/grpo_0_5b.yaml",
            f"hpcrl train {ONE_GPU}/grpo_0_5b.yaml",
        ),
    ),
    "slurm": StartFolder(
        "a 7B model on two nodes of a cluster with Slurm",
        {**REWARD, "configs/start/slurm": "."}
        | {"slurm/site.yaml": "site.yaml", "slurm/job.sbatch": "job.sbatch"}
        | {name: name for name in ("slurm/common.sh", "slurm/relaunch.sh")},
        "site.yaml, and grpo.yaml at the marks (1) to (5)",
        (
            "hpcrl data gsm8k --from DOWNLOADED --out data/gsm8k",
            "hpcrl submit grpo.yaml --site site.yaml --dry-run",
            "hpcrl submit grpo.yaml --site site.yaml",
        ),
    ),
}


def main(arguments: list[str], about: str) -> NoReturn:
    parser = ArgumentParser(prog="hpcrl init", description=about)
    parser.add_argument("folder", metavar="DIR", type=Path, nargs="?", default=Path(), help="folder to write (.)")
    choice = parser.add_mutually_exclusive_group(required=True)
    for name, kind in KINDS.items():
        choice.add_argument(f"--{name}", dest="kind", action="store_const", const=kind, help=kind.about)
    parsed: argparse.Namespace = parser.parse_args(arguments)
    with exits.one_line_for_user_errors():
        write(parsed.kind, parsed.folder)
    print("\n".join(next_steps(parsed.kind, parsed.folder)))
    sys.exit(exits.DONE)


def write(kind: StartFolder, folder: Path) -> None:
    """Copy the files. Raises InputError, before the first one is written, if one exists."""
    copies = {folder / place: source for source, place in files(kind)}
    if existing := next((place for place in copies if place.exists()), None):
        raise InputError(f"{existing} exists, and init replaces no file; name another folder")
    for place, source in copies.items():
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            with draft_of(place) as draft:
                draft.write_bytes(source.read_bytes())
        except OSError as error:
            raise InputError(f"{place} cannot be written: {error.strerror or error}; name another folder") from None


def files(kind: StartFolder) -> Iterator[tuple[Path, Path]]:
    """Each file of a kind, and its place in the new folder."""
    for source, place in kind.copies.items():
        path = TEMPLATES / source
        if path.is_file():
            yield path, Path(place)
        else:
            inside = sorted(each for each in path.rglob("*") if each.is_file() and "__pycache__" not in each.parts)
            yield from ((each, place / each.relative_to(path)) for each in inside)


def next_steps(kind: StartFolder, folder: Path) -> Iterator[str]:
    yield f"{folder}: {', '.join(sorted(str(place) for _, place in files(kind)))}"
    yield f"edit {kind.edit}; then:"
    yield from (f"  {command}" for command in (f"cd {shlex.quote(str(folder))}", *kind.commands))
