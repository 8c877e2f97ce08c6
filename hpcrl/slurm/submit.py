"""`hpcrl submit`: check a job as far as possible on a login node, stage its inputs, and submit it to Slurm."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from hpcrl.config.derive import JobDescription
from hpcrl.config.loader import quoted_path
from hpcrl.config.paths import inputs, missing
from hpcrl.config.schema import AUTO, Config, JobConfig
from hpcrl.engine.checkpoint.store import load_path
from hpcrl.runtime import exits, run_owner
from hpcrl.runtime.exits import InputError
from hpcrl.runtime.job import run_directory
from hpcrl.runtime.run_folder import check as check_folder
from hpcrl.runtime.run_folder import close_to_others, make_directory
from hpcrl.sandbox.foreign_files import read_json
from hpcrl.slurm import bundle
from hpcrl.slurm.request import Link, Request, Stage, array_elements, parse, sbatch_command, submit_chain, write_chain
from hpcrl.slurm.site import SiteConfig, find_site, load_site
from hpcrl.slurm.template import INSIDE_RUN, Batch, render

if TYPE_CHECKING:
    from hpcrl.slurm.forecast import Forecast

MARGIN = 1.2  # for differences between nodes, and a busy file system
TIMES = "times.json"  # in the run's folder, written by its first slice


def check_slice(job: JobConfig, run_dir: Path) -> None:
    """Raise InputError if a slice cannot make progress: it must be longer than set-up, one step and one save.

    These three are known after the run's first slice has measured them.
    """
    length = job.time_seconds
    if length <= job.signal_seconds:
        raise InputError(
            f"job.time={job.time} is {length} s, but job.signal_seconds={job.signal_seconds} ends a slice that long "
            "before; use a longer job.time or a smaller job.signal_seconds"
        )
    try:
        measured = read_json(run_dir / TIMES)
        parts = {name: float(measured[f"{name}_s"]) for name in ("setup", "step", "save")}
    except (OSError, ValueError, KeyError, TypeError):
        return
    needed = MARGIN * sum(parts.values())
    if needed > length:
        measured_parts = " + ".join(f"{name} {value:.0f} s" for name, value in parts.items())
        raise InputError(
            f"job.time={job.time} is {length} s, but a slice of {run_dir.name} needs {needed:.0f} s to make progress "
            f"({measured_parts}, plus 20%); use a longer job.time"
        )


LoadJob = Callable[[str], JobDescription]
Check = Callable[[JobDescription, Config, int], object]  # (job, config, ranks); raises for a job that cannot run


@dataclass(frozen=True)
class PlannedJob:
    """A stage that has passed all checks."""

    batch: Batch
    configs: tuple[Config, ...]  # one per element
    folder: Path  # of the script and of Slurm's output
    trains_policy: bool  # its runs hold weights that a later job can start from
    saves_last: bool  # after its last step, whatever trainer.save_freq is
    forecast: Forecast | None = None  # of its slowest run

    @property
    def script(self) -> Path:
        return self.folder / "job.sbatch"


def main(arguments: list[str], load_job: LoadJob, check: Check, commands: Sequence[str]) -> NoReturn:
    """The subcommand. `commands` are the built-in jobs that can be submitted."""
    with exits.one_line_for_user_errors():
        run(parse(arguments, commands, (__doc__ or "").split(": ", 1)[1]), load_job, check)
    sys.exit(exits.DONE)


def run(request: Request, load_job: LoadJob, check: Check) -> None:
    root = bundle.code_root()
    site = load_site(find_site(request.site, os.environ))
    plans: list[PlannedJob] = []
    for stage in request.stages:
        plans.append(plan(stage, load_job(stage.command), request, check, site, plans))
    if request.response_lengths and all(config.job.machine is None for its in plans for config in its.configs):
        raise InputError("found --response-lengths without job.machine, by which times are predicted; set job.machine")
    created_later = runs_before(plans)
    texts = [render(planned.batch, site, sys.prefix) for planned in plans]
    for planned, created in zip(plans, created_later, strict=True):
        _log(cost(planned.batch, site))
        for folder in planned.batch.run_dirs:
            check_folder(folder)
        for line in [*misfits(planned.batch.job, site), *runs_in_use(planned), *missing_inputs(planned, created)]:
            if not request.dry_run:
                raise InputError(line)
            _log(f"warning: {line}")
    for planned in plans:
        if planned.forecast is not None:
            _log(f"{planned.batch.name}: {planned.forecast.line(planned.batch.job.time)}")
            for line in planned.forecast.warnings(planned.batch.job.time):
                _log(f"warning: {planned.batch.name}: {line}")
    if request.dry_run:
        for number, (planned, text) in enumerate(zip(plans, texts, strict=True)):
            _log(shlex.join(sbatch_command(planned.script, "JOB_BEFORE" if number else None)))
            print(text, end="")
        return
    for planned, created in zip(plans, created_later, strict=True):
        bundles = [bundle.stage(config, root, created, _log) for config in planned.configs]
        for staged in bundles:
            _log(f"staged {staged}")
        batch = replace(planned.batch, bundles=tuple(staged.name for staged in bundles))
        make_directory(planned.folder, is_shared=planned.configs[0].run.group_readable)
        planned.script.write_text(render(batch, site, sys.prefix), encoding="utf-8")
        close_to_others(planned.script, is_shared=planned.configs[0].run.group_readable)
    jobs = submit_chain([planned.script for planned in plans])
    write_chain([link(planned, job) for planned, job in zip(plans, jobs, strict=True)])
    for planned, job in zip(plans, jobs, strict=True):
        print(f"{planned.batch.name}: job {job}, {planned.script}")
    _log(f"its state: hpcrl status {shlex.quote(str(plans[-1].batch.run_dirs[0]))}")


def runs_before(plans: Sequence[PlannedJob]) -> list[list[Path]]:
    """Return for each stage the runs of the stages before it. Raises InputError if two stages write to one run."""
    before: list[list[Path]] = [[]]
    for planned in plans:
        twice = set(planned.batch.run_dirs).intersection(before[-1])
        if twice:
            raise InputError(f"two jobs of this chain write to {twice.pop()}; change run.name of one of them")
        before.append([*before[-1], *planned.batch.run_dirs])
    return before[:-1]


def link(planned: PlannedJob, job: str) -> Link:
    batch = planned.batch
    runs = tuple(map(str, batch.run_dirs))
    return Link(batch.command, batch.job.nodes, batch.job.ntasks_per_node, job, runs, str(planned.folder))


def runs_in_use(planned: PlannedJob) -> list[str]:
    """Return a line for each run whose folder a job owns that runs: it would end the new one when that starts."""
    batch = planned.batch
    folders = [run / batch.command if batch.command in INSIDE_RUN else run for run in batch.run_dirs]
    return [run_owner.in_use(folder, owner) for folder, owner in run_owner.live_owners(folders).items()]


def missing_inputs(planned: PlannedJob, created_later: Collection[Path]) -> list[str]:
    """Return a line for each input file that does not exist, and for each run that has no weights yet."""
    lines = []
    absent = {given for config in planned.configs for given in missing(config)}
    for given in dict.fromkeys(given for config in planned.configs for given in inputs(config)):
        key, path = given
        if bundle.is_created_later(path, created_later):
            continue
        if given in absent:
            lines.append(f"{key}={path} does not exist; create it first, or use another path")
        elif key.endswith("init_from"):
            try:
                load_path(path, _log)
            except InputError as error:
                lines.append(f"{key}: {error}; if its job is still to save, submit both as one chain")
    return lines


def misfits(job: JobConfig, site: SiteConfig) -> Iterator[str]:
    """Yield a line for each thing that the job needs and the site's nodes or its file do not have."""
    if site.gpus_per_node and job.gpus_per_node > site.gpus_per_node:
        yield (
            f"job.gpus_per_node={job.gpus_per_node}, but a node of this site has {site.gpus_per_node} GPUs; set it, "
            "job.ntasks_per_node and job.nodes to what the site has"
        )
    kind = site.container.kind
    if kind != "none" and not (site.container.image or os.environ.get("HPCRL_IMAGE")):
        yield f"found no container.image for container.kind={kind}; set it in a site file, or kind to none"


def chained(config: Config, before: Sequence[PlannedJob]) -> list[str]:
    """Return the override with which a job starts from the policy that was trained last before it in the chain.

    A job keeps its own model.init_from. Raises InputError if that policy is not one run, or has no weights when it
    ends.
    """
    last = next((planned for planned in reversed(before) if planned.trains_policy), None)
    own = config.model.init_from
    if last is None:
        return []
    name, trainer = last.batch.name, last.configs[0].trainer
    if own is not None and not bundle.is_created_later(own, last.batch.run_dirs):
        _log(f"warning: {config.run.name} starts from model.init_from={own}, not from {name}, the run before it")
        return []
    if not last.saves_last and trainer.save_freq <= 0:
        raise InputError(
            f"{config.run.name} starts from {name}, which saves no weights: trainer.save_freq={trainer.save_freq}; "
            "set it to the number of its steps, or less"
        )
    if own is not None:
        return []
    if last.batch.is_array:
        raise InputError(
            f"{config.run.name} starts from {name}, which is {len(last.batch.run_dirs)} runs; name one of them with "
            f"model.init_from, such as {last.batch.run_dirs[0]}"
        )
    return [f"model.init_from={quoted_path(str(last.batch.run_dirs[0]))}"]


def plan(
    stage: Stage,
    job: JobDescription,
    request: Request,
    check: Check,
    site: SiteConfig,
    before: Sequence[PlannedJob] = (),
) -> PlannedJob:
    """Return the stage's job, checked for its number of ranks and for the length of a slice, with a wall time in place
    of job.time=auto.

    Args:
        before: the jobs before it in the chain.
    """
    overrides = [*request.job_overrides, *stage.overrides]
    overrides += chained(job.read_config(stage.config, overrides), before)
    base = job.read_config(stage.config, overrides)
    variants = array_elements(stage.arrays, base.run.dir, base.run.name) if stage.arrays else [[]]
    runs = [[*overrides, *variant] for variant in variants]
    configs = [job.read_config(stage.config, words) for words in runs]
    for config in configs:
        check(job, config, config.job.nodes * config.job.ntasks_per_node)
    forecast, given = None, [base, *configs]
    if any(config.job.machine is not None or config.job.time == AUTO for config in given):
        from hpcrl.slurm.forecast import slowest_of

        pairs = list(zip(runs, configs, strict=True))
        forecast = slowest_of(job, stage.config, pairs, request.response_lengths, _log)
    if forecast is not None and any(config.job.time == AUTO for config in given):
        time = f"job.time={forecast.time(site.max_time)}"
        base, *configs = [job.read_config(stage.config, [*words, time]) for words in (overrides, *runs)]
    for config in configs:
        check_slice(config.job, run_directory(config))
    run_dirs = tuple(run_directory(config) for config in configs)
    command = "run" if job.file is not None else stage.command
    batch = Batch(base.run.name, command, base.job, run_dirs, mounts=_mounts(configs), is_array=bool(stage.arrays))
    return PlannedJob(batch, tuple(configs), run_directory(base), job.trained_role == "actor", job.saves_last, forecast)


def cost(batch: Batch, site: SiteConfig) -> str:
    """Return the largest charge of a slice of the job."""
    job, hours = batch.job, batch.job.node_hours * len(batch.run_dirs)
    elements = f"{len(batch.run_dirs)} x " if batch.is_array else ""
    charged = f", {hours * site.charge_factor:.1f} charged" if site.charge_factor != 1.0 else ""
    again = f"; up to {job.max_restarts} more slices of that" if job.requeue and job.max_restarts else ""
    return f"{batch.name}: {elements}{job.nodes} nodes x {job.time} = {hours:.1f} node-hours{charged}{again}"


def _mounts(configs: Sequence[Config]) -> tuple[Path, ...]:
    """Return the folders that a container needs besides the bundle's code: those of runs, and of linked files."""
    found = [run_directory(config).parent for config in configs]
    paths = {Path(path) for config in configs for _, path in inputs(config)}
    real = {path.resolve().parent for path in paths}
    real.update(*(bundle.linked_folders(path) for path in paths if path.exists()))
    outermost = sorted(folder for folder in real if not real.intersection(folder.parents))
    return tuple(dict.fromkeys([*found, *outermost]))


def _log(line: str) -> None:
    print(f"hpcrl: {line}", file=sys.stderr)
