"""`hpcrl submit`: check a job as far as a login node can, stage what it reads, and hand it to Slurm."""

from __future__ import annotations

import itertools
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NoReturn

from hpcrl.config.derive import JobDescription
from hpcrl.config.inputs import inputs, missing
from hpcrl.config.loader import quoted
from hpcrl.config.schema import Config, JobConfig
from hpcrl.runtime import exits
from hpcrl.runtime.exits import ArgumentParser, InputError
from hpcrl.runtime.job import run_directory
from hpcrl.slurm import bundle
from hpcrl.slurm.site import SiteConfig, find_site, load_site
from hpcrl.slurm.template import Batch, render


def array_elements(arrays: Sequence[str], run_dir: str, run_name: str) -> list[list[str]]:
    """The overrides of every element: all combinations of the values, as runs `<run_dir>/<run_name>/<key=value>`,
    joined with '+'."""
    choices = list(itertools.product(*map(_axis, arrays)))
    folder = f"run.dir={quoted(f'{run_dir}/{run_name}')}"
    return [
        [*choice, folder, f"run.name={quoted(name)}"] for choice, name in zip(choices, _names(choices), strict=True)
    ]


def _names(choices: Sequence[Sequence[str]]) -> list[str]:
    """Folder names of the choices, without ',' and ':', which containers' mounts cannot have."""
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
        raise InputError(f"--array {array} has a value twice; each is a run of its own, so name it once")
    return [f"{key}={value}" for value in chosen]


def sbatch_command(script: Path, after: str | None) -> list[str]:
    """The sbatch command. A requeued job has not ended; a failed one removes those after it from the queue."""
    dependency = [f"--dependency=afterok:{after}", "--kill-on-invalid-dep=yes"] if after else []
    return ["sbatch", "--parsable", *dependency, str(script)]


def submit_chain(scripts: Sequence[Path]) -> list[str]:
    """Submit each script from its own folder; returns the job ids. If sbatch fails, the jobs before are cancelled."""
    ids: list[str] = []
    for script in scripts:
        line = sbatch_command(script, ids[-1] if ids else None)
        try:
            answer = subprocess.run(line, cwd=script.parent, capture_output=True, text=True)
        except FileNotFoundError:
            raise InputError("sbatch not found; run submit where jobs are submitted, or use --dry-run") from None
        if answer.returncode:
            if ids:
                subprocess.run(["scancel", *ids], capture_output=True)
            said = " ".join(answer.stderr.split())
            raise InputError(f"sbatch rejected {script}: {said}{'; the jobs before it are cancelled' if ids else ''}")
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
    """One job of a chain, as asked for."""

    command: str  # train, sft, ..., or the Python file of a user's job
    config: str  # YAML file
    overrides: list[str]
    arrays: list[str]


@dataclass
class Request:
    stages: list[Stage] = field(default_factory=list)
    job_overrides: list[str] = field(default_factory=list)  # of all stages
    site: str | None = None
    dry_run: bool = False


def make_parser(description: str = "") -> ArgumentParser:
    """A parser of the arguments of one stage of `hpcrl submit`, and of those of all stages."""
    parser = ArgumentParser(
        prog="hpcrl submit",
        usage="hpcrl submit [COMMAND:]CONFIG [key=value ...] [--array key=a,b,c] [--chain [COMMAND:]CONFIG ...] "
        "[--nodes N] [--ntasks-per-node N] [--time D-HH:MM:SS] [--partition P] [--site FILE] [--dry-run]",
        description=description,
        allow_abbrev=False,
        epilog="--chain begins a further job, which starts once the one before it has ended well.",
    )
    parser.add_argument("config", metavar="[COMMAND:]CONFIG", help="YAML file; COMMAND is train, sft, ... or a JOB.py")
    parser.add_argument("overrides", metavar="key=value", nargs="*", default=[], help="override a key")
    parser.add_argument("--array", action="append", default=[], metavar="key=a,b,c", help="one run for each value")
    for option, key in JOB_OPTIONS.items():
        parser.add_argument(f"--{option.replace('_', '-')}", help=f"{key} of all jobs")
    parser.add_argument("--site", metavar="FILE", help="site file")
    parser.add_argument("--dry-run", action="store_true", help="print the batch scripts and submit nothing")
    return parser


def parse(arguments: Sequence[str], commands: Sequence[str], description: str = "") -> Request:
    """Parse the arguments of `hpcrl submit`; `commands` are the built-in jobs that can be submitted.

    Overrides and --array belong to the stage before them, --nodes and the like to all stages.
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
        request.site, request.dry_run = parsed.site or request.site, parsed.dry_run or request.dry_run
    return request


MARGIN = 1.2  # nodes differ, and a shared file system has bad hours
TIMES = "times.json"  # as hpcrl.run.time_budget writes it


def check_slice(job: JobConfig, run_dir: Path) -> None:
    """Raise InputError if a slice cannot make progress: it must be longer than set-up, one step and one save.

    The three are known once the run's first slice has measured them.
    """
    length = job.time_seconds
    if length <= job.signal_seconds:
        raise InputError(
            f"job.time={job.time} is {length} s, and job.signal_seconds={job.signal_seconds} ends a slice that long "
            "before its end; use a longer job.time or a smaller job.signal_seconds"
        )
    try:
        measured = json.loads((run_dir / TIMES).read_text(encoding="utf-8"))
        parts = {name: float(measured[f"{name}_s"]) for name in ("setup", "step", "save")}
    except (OSError, ValueError, KeyError, TypeError):
        return
    needed = MARGIN * sum(parts.values())
    if needed > length:
        said = " + ".join(f"{name} {value:.0f} s" for name, value in parts.items())
        raise InputError(
            f"job.time={job.time} is {length} s, and a slice of {run_dir.name} needs {needed:.0f} s to make progress "
            f"({said}, and a fifth more); use a longer job.time"
        )


LoadJob = Callable[[str], JobDescription]
Check = Callable[[JobDescription, Config, int], object]  # (job, config, ranks); raises for a job that cannot run


@dataclass(frozen=True)
class Planned:
    """A stage that has passed all checks."""

    batch: Batch
    configs: tuple[Config, ...]  # one per element
    folder: Path  # the script's and Slurm's output's

    @property
    def script(self) -> Path:
        return self.folder / "job.sbatch"


def main(arguments: list[str], load_job: LoadJob, check: Check, commands: Sequence[str]) -> NoReturn:
    """Run the subcommand. `commands` are the built-in jobs that can be submitted."""
    try:
        run(parse(arguments, commands, (__doc__ or "").split(": ", 1)[1]), load_job, check)
    except Exception as error:
        if exits.is_user_error(error):
            exits.exit_with_error(error)
        raise
    sys.exit(exits.DONE)


def run(request: Request, load_job: LoadJob, check: Check) -> None:
    root = bundle.checkout()
    site = load_site(find_site(request.site, os.environ))
    plans = [plan(stage, load_job(stage.command), request.job_overrides, check) for stage in request.stages]
    made_later = runs_before(plans)
    texts = [render(planned.batch, site, sys.prefix) for planned in plans]
    for planned, later in zip(plans, made_later, strict=True):
        _say(cost(planned.batch, site))
        for line in absent(planned, later):
            if not request.dry_run:
                raise InputError(line)
            _say(f"warning: {line}")
    if request.dry_run:
        for number, (planned, text) in enumerate(zip(plans, texts, strict=True)):
            _say(shlex.join(sbatch_command(planned.script, "JOB_BEFORE" if number else None)))
            print(text, end="")
        return
    for planned, later in zip(plans, made_later, strict=True):
        bundles = [bundle.stage(config, root, later, _say) for config in planned.configs]
        for staged in bundles:
            _say(f"staged {staged}")
        batch = replace(planned.batch, bundles=tuple(staged.name for staged in bundles))
        planned.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        planned.script.write_text(render(batch, site, sys.prefix), encoding="utf-8")
    for planned, job in zip(plans, submit_chain([planned.script for planned in plans]), strict=True):
        print(f"{planned.batch.name}: job {job}, {planned.script}")


def runs_before(plans: Sequence[Planned]) -> list[list[Path]]:
    """Runs of the stages before each stage. Raises InputError if two stages would write to one run."""
    before: list[list[Path]] = [[]]
    for planned in plans:
        twice = set(planned.batch.run_dirs).intersection(before[-1])
        if twice:
            raise InputError(f"two jobs of this chain are the run {twice.pop()}; give one of them another run.name")
        before.append([*before[-1], *planned.batch.run_dirs])
    return before[:-1]


def absent(planned: Planned, made_later: Collection[Path]) -> list[str]:
    """A line for each file that the job would read and that does not exist."""
    found = (given for config in planned.configs for given in missing(config))
    return [
        f"{key}={path} is not here; make it first, or name another"
        for key, path in dict.fromkeys(found)
        if not bundle.is_made_later(path, made_later)
    ]


def plan(stage: Stage, job: JobDescription, job_overrides: Sequence[str], check: Check) -> Planned:
    """Check the stage's job for its ranks and for the length of a slice."""
    overrides = [*stage.overrides, *job_overrides]
    base = job.read_config(stage.config, overrides)
    variants = array_elements(stage.arrays, base.run.dir, base.run.name) if stage.arrays else [[]]
    configs = [job.read_config(stage.config, [*overrides, *variant]) for variant in variants]
    for config in configs:
        check(job, config, config.job.nodes * config.job.ntasks_per_node)
        check_slice(config.job, run_directory(config))
    run_dirs = tuple(run_directory(config) for config in configs)
    command = "run" if job.file is not None else stage.command
    batch = Batch(base.run.name, command, base.job, run_dirs, mounts=_mounts(configs), is_array=bool(stage.arrays))
    return Planned(batch, tuple(configs), run_directory(base))


def cost(batch: Batch, site: SiteConfig) -> str:
    """A line with the largest cost of a slice of the job."""
    job, hours = batch.job, batch.job.node_hours * len(batch.run_dirs)
    elements = f"{len(batch.run_dirs)} x " if batch.is_array else ""
    charged = f", {hours * site.charge_factor:.1f} charged" if site.charge_factor != 1.0 else ""
    again = f"; up to {job.max_restarts} more slices of that" if job.requeue and job.max_restarts else ""
    return f"{batch.name}: {elements}{job.nodes} nodes x {job.time} = {hours:.1f} node-hours{charged}{again}"


def _mounts(configs: Sequence[Config]) -> tuple[Path, ...]:
    """Folders that a container needs besides the bundle's code: those of the runs, and of files to which there are
    links."""
    found = [run_directory(config).parent for config in configs]
    paths = {Path(path) for config in configs for _, path in inputs(config)}
    real = {path.resolve().parent for path in paths}
    real.update(*(bundle.linked_folders(path) for path in paths if path.exists()))
    outermost = sorted(folder for folder in real if not real.intersection(folder.parents))
    return tuple(dict.fromkeys([*found, *outermost]))


def _say(line: str) -> None:
    print(f"hpcrl: {line}", file=sys.stderr)
