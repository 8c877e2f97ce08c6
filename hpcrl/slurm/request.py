"""Arguments of `hpcrl submit`: options, stages with their overrides, arrays and chains."""

from __future__ import annotations

import itertools
import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hpcrl.config.loader import quoted
from hpcrl.runtime.exits import InputError


def array_elements(arrays: Sequence[str], run_dir: str, run_name: str) -> list[list[str]]:
    """Return the overrides of every element: all combinations of the values, as runs
    `<run_dir>/<run_name>/<key=value>`, joined with '+'."""
    choices = list(itertools.product(*map(_axis, arrays)))
    folder = f"run.dir={quoted(f'{run_dir}/{run_name}')}"
    return [
        [*choice, folder, f"run.name={quoted(name)}"] for choice, name in zip(choices, _names(choices), strict=True)
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


USAGE = (
    "hpcrl submit [COMMAND:]CONFIG [key=value ...] [--chain [COMMAND:]CONFIG [key=value ...]] [--array key=a,b,c] "
    "[--nodes N] [--ntasks-per-node N] [--time D-HH:MM:SS] [--partition P] [--site FILE] [--dry-run]"
)
JOB_OPTIONS = {
    "--nodes": "job.nodes",
    "--ntasks-per-node": "job.ntasks_per_node",
    "--time": "job.time",
    "--partition": "job.partition",
}
VALUED = (*JOB_OPTIONS, "--site", "--chain", "--array")


@dataclass
class Stage:
    """One job of a chain."""

    command: str  # train, sft, ...
    config: str  # YAML file
    overrides: list[str] = field(default_factory=list)
    arrays: list[str] = field(default_factory=list)


@dataclass
class Request:
    stages: list[Stage] = field(default_factory=list)
    job_overrides: list[str] = field(default_factory=list)  # of all stages
    site: str | None = None
    dry_run: bool = False
    commands: Sequence[str] = ()


def parse(arguments: Sequence[str], commands: Sequence[str]) -> Request:
    """Parse the arguments of `hpcrl submit`; `commands` are the jobs that can be submitted.

    Overrides and --array belong to the stage before them, --nodes and the like to all stages.
    """
    request, rest = Request(commands=commands), list(arguments)
    while rest:
        word = rest.pop(0)
        if word == "--dry-run":
            request.dry_run = True
        elif word.startswith("-"):
            name, equals, value = word.partition("=")
            if name not in VALUED:
                raise InputError(f"unknown option {word!r}; {USAGE}")
            if not equals:
                if not rest:
                    raise InputError(f"{name} has no value; {USAGE}")
                value = rest.pop(0)
            _set_option(request, name, value)
        elif "=" in word:
            _last_stage(request, word).overrides.append(word)
        elif request.stages:
            raise InputError(f"found {word!r} after {request.stages[-1].config}; a further stage is --chain {word}")
        else:
            request.stages.append(_stage(word, request.commands))
    if not request.stages:
        raise InputError(f"submit needs a YAML file: {USAGE}")
    return request


def _set_option(request: Request, name: str, value: str) -> None:
    if name in JOB_OPTIONS:
        request.job_overrides.append(f"{JOB_OPTIONS[name]}={value}")
    elif name == "--site":
        request.site = value
    elif name == "--array":
        _last_stage(request, f"--array {value}").arrays.append(value)
    else:
        _last_stage(request, f"--chain {value}")
        request.stages.append(_stage(value, request.commands))


def _last_stage(request: Request, found: str) -> Stage:
    if not request.stages:
        raise InputError(f"found {found!r} before a YAML file: {USAGE}")
    return request.stages[-1]


def _stage(word: str, commands: Sequence[str]) -> Stage:
    command, colon, config = word.partition(":")
    if not colon:
        return Stage("train", word)
    if command not in commands:
        raise InputError(f"{word}: unknown command {command!r}; expected one of {', '.join(commands)}, then ':CONFIG'")
    return Stage(command, config)
