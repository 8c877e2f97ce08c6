"""The batch script of a job, as text. A pure function, so that `hpcrl submit --dry-run` shows what is submitted, except
for the bundle's name.

User input enters the script in two ways: as a value of an #SBATCH line, whose characters the schema restricts, or as
one quoted word of the shell. Only the folder for temporary files may contain variables of the node, and the site file's
reader checks it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from shlex import quote

from hpcrl.config.paths import in_bash
from hpcrl.config.schema import JobConfig
from hpcrl.runtime.exits import InputError
from hpcrl.slurm.site import SiteConfig

MAX_NAME = 64  # characters of a job's name; squeue shows eight
INSIDE_RUN = ("evaluate", "generate")  # commands whose exit.json is in <run>/<command>; that in <run> is the training's


@dataclass(frozen=True)
class Batch:
    """One job, or the elements of one array, running `command`."""

    name: str
    command: str  # train, sft, ...
    job: JobConfig
    run_dirs: tuple[Path, ...]  # absolute; one per element of an array
    bundles: tuple[str, ...] = ()  # bundle folders in them; empty before staging: the link to the newest
    mounts: tuple[Path, ...] = ()  # folders that a container needs in addition to the working directory
    is_array: bool = False


def render(batch: Batch, site: SiteConfig, venv: str) -> str:
    """Return the script. `venv` is the Python environment, unless the site has another one or a container."""
    words = [*map(str, batch.run_dirs), *map(str, batch.mounts), venv, *site.environment.values()]
    words += [word for word in (site.venv, site.scratch, site.container.image, *site.container.mounts) if word]
    for word in words:
        if not word.isprintable():
            raise InputError(f"{word!r} has characters that are not allowed in a batch script; use another name")
    if site.container.kind != "none":
        _check_mounts(batch, site)
    folder = f"$run/{batch.command}" if batch.command in INSIDE_RUN else "$run"
    lines = [
        "#!/bin/bash",
        "# made by `hpcrl submit`; what it runs and reads is in the bundle, which its manifest.json lists",
        *(f"#SBATCH {option}" for option in _options(batch, site)),
        "",
        *([f'export TMPDIR="{in_bash(site.scratch)}"'] if site.scratch else []),
        *(f"export {name}={quote(value)}" for name, value in _variables(batch, site, venv).items()),
        *_choose_run(batch),
        "",
        'cd "$run/$bundle/code" || exit',
        "source slurm/common.sh || exit",
        *(f"hpcrl_set {name} {quote(value)}" for name, value in site.environment.items()),
        "hpcrl_start",
        f'hpcrl_srun "{folder}" {batch.command} "$run/$bundle/config.yaml"',
        "hpcrl_leave $?",
    ]
    return "\n".join(lines) + "\n"


def _check_mounts(batch: Batch, site: SiteConfig) -> None:
    """Check paths: lists of mounts use ',' and ':' as separators, without quoting."""
    wrong = [path for path in map(str, (*batch.run_dirs, *batch.mounts)) if "," in path or ":" in path]
    wrong += [mount for mount in site.container.mounts if "," in mount]
    if wrong:
        raise InputError(f"{wrong[0]} has ',' or ':', which are not allowed in a container's mounts; use another name")


def job_name(run_name: str) -> str:
    """Return the run's name in characters that are valid in Slurm's file names and tables."""
    return re.sub(r"[^A-Za-z0-9_.+-]", "_", run_name)[:MAX_NAME]


def _options(batch: Batch, site: SiteConfig) -> Iterator[str]:
    job = batch.job
    yield f"--job-name={job_name(batch.name)}"
    yield f"--nodes={job.nodes + job.spare_nodes}"
    yield f"--ntasks-per-node={job.ntasks_per_node}"
    if job.gpus_per_node and site.gpu_directive != "none":
        gpus = f"{site.gpu_type}:{job.gpus_per_node}" if site.gpu_type else str(job.gpus_per_node)
        yield f"--gres=gpu:{gpus}" if site.gpu_directive == "gres" else f"--gpus-per-node={gpus}"
    values = {
        "cpus-per-task": job.cpus_per_task,
        "mem": job.mem,
        "time": job.time,
        "partition": job.partition or site.partition,
        "account": job.account or site.account,
        "qos": job.qos or site.qos,
        "constraint": job.constraint or site.constraint,
        "reservation": job.reservation,
        "exclude": job.exclude,
    }
    yield from (f"--{name}={value}" for name, value in values.items() if value is not None)
    if job.exclusive:
        yield "--exclusive"
    # URG: every process of a step receives the signal, and its default action is to ignore it
    yield f"--signal=URG@{job.signal_seconds}"
    yield "--requeue" if job.requeue else "--no-requeue"
    if job.max_relaunches and job.nodes + job.spare_nodes > 1:
        yield "--no-kill"  # the allocation stays when a node is lost
    yield "--open-mode=append"
    if batch.is_array:
        yield f"--array=0-{len(batch.run_dirs) - 1}"
    yield "--output=slurm-%A_%a.out" if batch.is_array else "--output=slurm-%j.out"
    yield from (*site.extra_sbatch, *job.extra)


def _variables(batch: Batch, site: SiteConfig, venv: str) -> dict[str, str]:
    container = site.container
    variables: dict[str, str | None] = {
        "HPCRL_MODULES": " ".join(site.modules),
        "HPCRL_MPI": site.mpi,
        "HPCRL_CPU_BIND": site.cpu_bind,
        "HPCRL_INTERFACE": site.interface,
        "HPCRL_MAX_RESTARTS": str(batch.job.max_restarts if batch.job.requeue else 0),
        "HPCRL_MAX_RELAUNCHES": str(batch.job.max_relaunches),
        "HPCRL_SPARE_NODES": str(batch.job.spare_nodes or ""),
        "HPCRL_FABRIC_NET": site.fabric.net,
        "HPCRL_FABRIC_ALL_REDUCE": str(site.fabric.all_reduce_gb_s or ""),
        "HPCRL_FABRIC_POINT_TO_POINT": str(site.fabric.point_to_point_gb_s or ""),
    }
    if container.kind == "none":
        variables |= {"HPCRL_CONTAINER": "none", "HPCRL_VENV": site.venv or venv}
    else:
        mounts = [f"{path}:{path}" for path in batch.mounts]
        mounts += [mount if ":" in mount else f"{mount}:{mount}" for mount in container.mounts]
        unique = ",".join(dict.fromkeys(mounts))
        variables |= {"HPCRL_CONTAINER": container.kind, "HPCRL_IMAGE": container.image, "HPCRL_MOUNTS": unique}
    return {name: value for name, value in variables.items() if value and name not in site.environment}


def _choose_run(batch: Batch) -> Sequence[str]:
    runs = [quote(str(path)) for path in batch.run_dirs]
    bundles = [quote(name) for name in batch.bundles] or ["bundle"] * len(runs)
    if not batch.is_array:
        return [f"run={runs[0]}", f"bundle={bundles[0]}"]
    lists: list[str] = []
    for name, words in (("runs", runs), ("bundles", bundles)):
        lists += [f"{name}=(", *(f"    {word}" for word in words), ")"]
    return [*lists, "run=${runs[$SLURM_ARRAY_TASK_ID]}", "bundle=${bundles[$SLURM_ARRAY_TASK_ID]}"]
