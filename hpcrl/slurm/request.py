"""Arguments of `hpcrl submit`: options, stages with their overrides, arrays and chains; and what it submitted.

`chain.json` in the folder of each run of a chain says what was submitted, for `hpcrl status`.
"""

from __future__ import annotations

import itertools
import re
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from hpcrl.config.loader import quoted_path
from hpcrl.runtime.exits import ArgumentParser, InputError
from hpcrl.sandbox.new_files import read_json_or, replace_json


def array_elements(arrays: Sequence[str], run_dir: str, run_name: str) -> list[list[str]]:
    """Return the overrides of every element: all combinations of the values, as runs
    `<run_dir>/<run_name>/<key=value>`, joined with '+'."""
    choices = list(itertools.product(*map(_axis, arrays)))
    folder = f"run.dir={quoted_path(f'{run_dir}/{run_name}')}"
    return [
        [*choice, folder, f"run.name={quoted_path(name)}"]
        for choice, name in zip(choices, _names(choices), strict=True)
    ]


def _names(choices: Sequence[Sequence[str]]) -> list[str]:
    """Return a folder name for each choice, without ',' and ':', which separate containers' mounts."""
    names: list[str] = []
    for choice in choices:
        plain = re.sub("[/,:]", "_", "+".join(choice))
        numbered = (f"{plain}_{number}" for number in itertools.count(2))
        names.append(next(name for name in itertools.chain([plain], numbered) if name not in names))
    return names


def _axis(array: str) -> list[str]:
    key, equals, values = array.partition("=")
    chosen = values.split(",")
    if not (key and equals and all(chosen)):
        raise InputError(f"found --array {array!r}; expected key=a,b,c, such as actor.optim.lr=1e-6,2e-6")
    if len(set(chosen)) < len(chosen):
        raise InputError(f"--array {array} has a value twice; each value is one run")
    return [f"{key}={value}" for value in chosen]


def sbatch_command(script: Path, after: str | None) -> list[str]:
    """Return the sbatch command. A requeued job has not ended; a failed one removes those after it from the queue."""
    dependency = [f"--dependency=afterok:{after}", "--kill-on-invalid-dep=yes"] if after else []
    return ["sbatch", "--parsable", *dependency, str(script)]


def submit_chain(scripts: Sequence[Path]) -> list[str]:
    """Submit each script from its folder; return job ids. If one is rejected, those before it are cancelled."""
    ids: list[str] = []
    for script in scripts:
        line = sbatch_command(script, ids[-1] if ids else None)
        try:
            answer = subprocess.run(line, cwd=script.parent, capture_output=True, text=True)
        except FileNotFoundError:
            raise InputError("sbatch not found; run submit on a login node, or use --dry-run") from None
        if answer.returncode:
            if ids:
                subprocess.run(["scancel", *ids], capture_output=True)
            reason = " ".join(answer.stderr.split())
            raise InputError(f"sbatch rejected {script}: {reason}{'; earlier jobs were cancelled' if ids else ''}")
        ids.append(answer.stdout.strip().split(";")[0])
    return ids


JOB_OPTIONS = {
    "nodes": "job.nodes",
    "ntasks_per_node": "job.ntasks_per_node",
    "time": "job.time",
    "partition": "job.partition",
}


@dataclass
class Stage:
    """One job of a chain."""

    command: str  # train, sft, ..., or the Python file of a user's job
    config: str  # YAML file
    overrides: list[str]
    arrays: list[str]


@dataclass
class Request:
    stages: list[Stage] = field(default_factory=list)
    job_overrides: list[str] = field(default_factory=list)  # of all stages; a stage's own override counts more
    site: str | None = None
    response_lengths: str | None = None  # MEAN,SIGMA
    dry_run: bool = False


def make_parser(description: str = "") -> ArgumentParser:
    """A parser of the arguments of one stage of `hpcrl submit`, and of those of all stages."""
    parser = ArgumentParser(
        prog="hpcrl submit",
        usage="hpcrl submit [COMMAND:]CONFIG [key=value ...] [--array key=a,b,c] [--chain [COMMAND:]CONFIG ...] "
        "[--nodes N] [--ntasks-per-node N] [--time D-HH:MM:SS] [--partition P] [--site SITE] "
        "[--response-lengths MEAN,SIGMA] [--dry-run]",
        description=description,
        allow_abbrev=False,
        epilog="--chain begins a further job, which starts once the one before it has ended well, from the weights of "
        "the policy that was trained last, unless its model.init_from names others.",
    )
    parser.add_argument("config", metavar="[COMMAND:]CONFIG", help="YAML file; COMMAND is train, sft, ... or a JOB.py")
    parser.add_argument("overrides", metavar="key=value", nargs="*", default=[], help="override a key")
    parser.add_argument("--array", action="append", default=[], metavar="key=a,b,c", help="one run for each value")
    for option, key in JOB_OPTIONS.items():
        parser.add_argument(f"--{option.replace('_', '-')}", help=f"{key} of all jobs that do not override it")
    parser.add_argument("--site", metavar="SITE", help="site file, or the name of one in configs/sites, such as alps")
    parser.add_argument(
        "--response-lengths",
        metavar="MEAN,SIGMA",
        help="with job.machine: lengths of responses, as `hpcrl plan` takes them",
    )
    parser.add_argument("--dry-run", action="store_true", help="print the batch scripts and submit nothing")
    return parser


def parse(arguments: Sequence[str], commands: Sequence[str], description: str = "") -> Request:
    """Parse the arguments of `hpcrl submit`; `commands` are the built-in jobs that can be submitted.

    Overrides and --array belong to the stage before them, --nodes and the like to all stages without such an override.
    """
    stages: list[list[str]] = [[]]
    for word in arguments:
        if word == "--chain" or word.startswith("--chain="):
            stages.append([word.removeprefix("--chain=")] if "=" in word else [])
        else:
            stages[-1].append(word)
    request, parser = Request(), make_parser(description)
    for words in stages:
        parsed = parser.parse_intermixed_args(words)
        command, colon, config = parsed.config.rpartition(":")
        if "=" in parsed.config:
            parser.error(f"found the override {parsed.config!r} in place of a YAML file")
        odd = next((word for word in parsed.overrides if "=" not in word), None)
        if odd is not None:
            parser.error(f"found {odd!r} after {parsed.config}; a further job is --chain {odd}")
        if colon and command not in commands and not command.endswith(".py"):
            parser.error(f"unknown command {command!r}; expected one of {', '.join(commands)} or a JOB.py")
        request.stages.append(Stage(command if colon else "train", config, parsed.overrides, parsed.array))
        given = {key: getattr(parsed, option) for option, key in JOB_OPTIONS.items()}
        request.job_overrides += [f"{key}={value}" for key, value in given.items() if value is not None]
        request.response_lengths = parsed.response_lengths or request.response_lengths
        request.site, request.dry_run = parsed.site or request.site, parsed.dry_run or request.dry_run
    return request


CHAIN_FILE = "chain.json"


@dataclass(frozen=True)
class Link:
    """One job of a chain. runs: folders of its runs, one for each element of an array. folder: of its script."""

    command: str
    nodes: int
    ntasks_per_node: int
    job: str  # Slurm's id
    runs: tuple[str, ...]
    folder: str

    def job_of(self, number: int) -> str:
        """Slurm's id of a run, by its place in `runs`: in an array, that of its element."""
        is_array = len(self.runs) > 1 or self.runs[0] != self.folder
        return f"{self.job}_{number}" if is_array else self.job


def write_chain(links: Sequence[Link]) -> None:
    """Write the chain into the folders of all its runs; an earlier chain of these runs is replaced."""
    for folder in {Path(folder) for link in links for folder in (*link.runs, link.folder)}:
        replace_json(folder / CHAIN_FILE, {"links": [asdict(link) for link in links]})


def read_chain(folder: Path) -> list[Link] | None:
    """The chain that the run was submitted in; None if it was not submitted, or the file is damaged."""
    try:
        links = read_json_or(folder / CHAIN_FILE, {})["links"]
        found = [Link(**{**link, "runs": tuple(link["runs"])}) for link in links]
    except (KeyError, TypeError):
        return None
    texts = [text for link in found for text in (link.command, link.job, link.folder, *link.runs)]
    return found if all(isinstance(text, str) and "\0" not in text for text in texts) else None
