"""The command line of `hpcrl submit`: options, and stages with their overrides."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from hpcrl.runtime.exits import InputError

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
    """One job of a chain, as asked for."""

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
            _take(request, name, value)
        elif "=" in word:
            _last(request, word).overrides.append(word)
        elif request.stages:
            raise InputError(f"found {word!r} after {request.stages[-1].config}; a further stage is --chain {word}")
        else:
            request.stages.append(_stage(word, request.commands))
    if not request.stages:
        raise InputError(f"submit needs a YAML file: {USAGE}")
    return request


def _take(request: Request, name: str, value: str) -> None:
    if name in JOB_OPTIONS:
        request.job_overrides.append(f"{JOB_OPTIONS[name]}={value}")
    elif name == "--site":
        request.site = value
    elif name == "--array":
        _last(request, f"--array {value}").arrays.append(value)
    else:
        _last(request, f"--chain {value}")
        request.stages.append(_stage(value, request.commands))


def _last(request: Request, found: str) -> Stage:
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
