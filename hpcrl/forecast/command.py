"""`hpcrl plan`: memory of every rank, disk, and what would make the job fit.

The job is as large as `job.nodes` x `job.ntasks_per_node` says; nothing of it runs, and torch is not needed. With
--build every stage of every model is built, too, on torch's meta device, which takes no memory. With --refit: bytes and
memory only of a refit.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from typing import NamedTuple, NoReturn

from hpcrl.config.derive import JobDescription
from hpcrl.config.schema import AUTO
from hpcrl.forecast.memory import refit
from hpcrl.forecast.memory.fixes import cheapest_fix, tightest
from hpcrl.forecast.memory.memory import GIB, MIB, Phase, Row, TrainingPlan, binary
from hpcrl.forecast.memory.refit import size
from hpcrl.forecast.memory.state import FP32, checkpoint_bytes, kept_checkpoints, rollout_bytes
from hpcrl.runtime import exits
from hpcrl.runtime.exits import InputError
from hpcrl.runtime.launcher import format_spans, is_first_launched


def staged_bytes(job: TrainingPlan) -> int:
    """Host memory of a rank into which a save copies its part, which is divided over the replicas."""
    per_rank = 0
    for role, model in job.models.items():
        if model.optim is not None:
            stages = range(model.layout.pp)
            state = max((job.states[role, stage] for stage in stages), key=lambda state: state.total)
            per_rank += state.parameters // model.layout.dp + state.optimizer
            if model.itemsize == FP32:
                per_rank += state.gradients // model.layout.dp  # the optimizer's own copy is written, too
    return per_rank


COLUMNS = ("parameters", "gradients", "optimizer", "activations", "logits", "KV cache", "refit", "total")


class Replacement(NamedTuple):
    """A way of another package to run the command, which replaces the table: its option --`name`. describe: lines for
    the job, the file and the overrides; `parsed`: all options."""

    name: str
    help: str
    describe: Callable[..., list[str]]


class Extension(NamedTuple):
    """Options that another package adds to the command, and the lines that it adds to the table; `asks` is the option
    without which there are none."""

    asks: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    lines_of: Callable[[TrainingPlan, argparse.Namespace], list[str]]
    own: tuple[str, ...] = ()  # those of its options that nothing but the table has a use for


def main(
    arguments: list[str],
    load_job: Callable[[str], JobDescription],
    extension: Extension,
    replacements: Sequence[Replacement],
) -> NoReturn:
    """Run the subcommand; ends with code 2 and one line for a config that cannot run."""
    parser = exits.ArgumentParser(prog="hpcrl plan", description=(__doc__ or "").split(": ", 1)[1])
    way = parser.add_mutually_exclusive_group()
    way.add_argument("--refit", action="store_true", help="bytes and memory only of a refit")
    way.add_argument("--build", action="store_true", help="build the models, too, with torch: are they as planned?")
    for each in replacements:
        way.add_argument(f"--{each.name}", action="store_true", help=each.help)
    extension.add_arguments(parser)
    parser.add_argument("config", metavar="[JOB.py:]CONFIG", help="YAML file; before it, the file of a job of your own")
    parser.add_argument("overrides", metavar="key=value", nargs="*", default=[], help="override a key")
    parsed = parser.parse_intermixed_args(arguments)
    if parsed.refit and getattr(parsed, extension.asks) is not None:
        parser.error(f"found --{extension.asks} beside --refit, which prints a refit's bytes only; leave one out")
    ways = [name for name in ("refit", *(each.name for each in replacements)) if getattr(parsed, name)]
    for name in extension.own:
        if ways and getattr(parsed, name):
            parser.error(f"found --{name} beside --{ways[0]}, which has no use for it; leave one out")
    job, colon, path = parsed.config.rpartition(":")
    if "=" in parsed.config and not os.path.exists(path):
        parser.error(f"found the override {parsed.config!r} in place of a YAML file")

    def added(job: TrainingPlan) -> list[str]:
        return extension.lines_of(job, parsed)

    description = refit.describe if parsed.refit else partial(describe, builds=parsed.build, added=added)
    for each in replacements:
        if getattr(parsed, each.name):
            description = partial(each.describe, parsed=parsed)
    with exits.one_line_for_user_errors():
        lines = description(load_job(job if colon else "train"), path, parsed.overrides)
    if is_first_launched(os.environ):
        print("\n".join(lines))
    sys.exit(exits.DONE)


def describe(
    described: JobDescription,
    path: str,
    overrides: Sequence[str] = (),
    *,
    builds: bool = False,
    added: Callable[[TrainingPlan], list[str]] | None = None,
) -> list[str]:
    """The lines of the table. builds: whether the models are built, too. added: further lines."""
    job = TrainingPlan(described.read_config(path, overrides), tuple(described.own_specs()))
    rows = job.rows()
    in_gib = tightest(rows).total >= GIB
    unit, name = (GIB, "GiB") if in_gib else (MIB, "MiB")

    def cells(numbers: Sequence[int]) -> str:
        return "".join(f"{number / unit:>12.2f}" for number in numbers)

    def head(title: str, columns: Sequence[str]) -> str:
        return f"  {title:<14}{'stages':<8}{'ranks':<12}" + "".join(f"{name:>12}" for name in columns)

    return [
        *_heading(path, job),
        "",
        head(f"role, {name}", COLUMNS[:3]),
        *_states(job, cells),
        "",
        head(f"phase, {name}", COLUMNS),
        *_phases(job, rows, cells),
        "",
        *_fit(job, rows),
        *_costs(job),
        *(_built(job) if builds else ()),
        *(added(job) if added is not None else ()),
    ]


def _heading(path: str, job: TrainingPlan) -> Iterator[str]:
    its = job.config.job
    gpus = f"GPUs of {its.gpu_memory_gib:g} GiB" if job.on_gpu else "no GPUs (job.gpus_per_node=0)"
    yield f"plan of {path}: {job.derived.world_size} ranks, {its.nodes} nodes of {its.ntasks_per_node}, {gpus}"
    works = {phase.role: phase.work for phase in job.phases if phase.work}
    for role, placed in job.derived.roles.items():
        layout = f"tp {placed.tp}  pp {placed.pp}  dp {placed.dp}"
        line = f"  {role:<8} {layout:<20} ranks {format_spans(placed.ranks)}"
        if role in works:
            work = works[role]
            line += f", micro-batches of {work.tokens} tokens, {work.rows} with outputs"
        yield line


def _states(job: TrainingPlan, cells: Callable[[Sequence[int]], str]) -> Iterator[str]:
    for role, model in job.models.items():
        groups: dict[tuple[int, ...], list[int]] = {}
        for stage in range(model.layout.pp):
            groups.setdefault(job.states[role, stage], []).append(stage)
        for state, stages in groups.items():
            ranks = sorted(rank for rank in model.layout.ranks if model.layout.coord(rank).pp in stages)
            yield f"  {role:<14}{format_spans(stages):<8}{_ranks(ranks):<12}{cells(state)}"


def _phases(job: TrainingPlan, rows: Sequence[Row], cells: Callable[[Sequence[int]], str]) -> Iterator[str]:
    """Lines of the phases; places with equal numbers share a line."""
    for phase in job.phases:
        groups: dict[tuple[int, ...], list[Row]] = {}
        for row in rows:
            if row.phase == phase.name:
                groups.setdefault((*row[2:], row.total), []).append(row)
        for numbers, members in groups.items():
            ranks = sorted(rank for row in members for rank in row.place.ranks)
            yield f"  {phase.name:<14}{_stages(phase, members):<8}{_ranks(ranks):<12}{cells(numbers)}"


def _stages(phase: Phase, rows: Sequence[Row]) -> str:
    """Pipeline stages of the role that works."""
    stages = sorted({row.place.stages[phase.role] for row in rows if phase.role in row.place.stages})
    return format_spans(stages) if stages and phase.work else "-"


def _ranks(ranks: Sequence[int]) -> str:
    text = format_spans(ranks)
    return text if len(text) < 12 else f"{len(ranks)} from {ranks[0]}"


def _fit(job: TrainingPlan, rows: list[Row]) -> Iterator[str]:
    row, capacity = tightest(rows), job.capacity
    where = f"{row.phase} on ranks {_ranks(row.place.ranks)}: {binary(row.total)}"
    if capacity is None:
        yield f"  {'tightest phase':<22}{where}; there is no GPU to fit it into"
        return
    if row.total <= capacity:
        yield f"  {'tightest phase':<22}{where}, it fits; {binary(capacity - row.total)} are left"
    else:
        yield f"  {'tightest phase':<22}{where}, IT DOES NOT FIT; {binary(row.total - capacity)} too many"
        found = cheapest_fix(job)
        if found is None:
            yield f"  {'cheapest fix':<22}none found: layouts, micro-batches, KV cache, offload and nodes were tried"
        else:
            keys, then = found
            change = " ".join(f"{key}={value}" for key, value in keys.items())
            yield f"  {'cheapest fix':<22}{change}: then {binary(then.total)}, in {then.phase}"
    yield f"  {'not counted':<22}CUDA context, NCCL's buffers, fragmentation; activations of generation are estimated"


def _costs(job: TrainingPlan) -> Iterator[str]:
    config, steps = job.config, job.config.trainer.total_training_steps
    roles, kept = checkpoint_bytes(config, job.models), kept_checkpoints(config.trainer, steps)
    if offloaded := max(job.on_hosts().values(), default=0):
        rank = max(map(job.on_host, job.places))
        yield f"  {'offloaded':<22}{binary(offloaded)} of a node's host memory, {binary(rank)} of a rank's"
    if pictures := max(map(job.pictures_on_host, job.places)):
        yield f"  {'pictures':<22}at most {binary(pictures)} of a rank's host memory, if they fill the prompts"
    each = sum(roles.values())
    parts = ", ".join(f"{role} {size(nbytes)}" for role, nbytes in roles.items())
    if kept == 0:
        yield f"  {'checkpoints':<22}none (trainer.save_freq=-1)"
    else:
        most = "all are kept" if kept is None else f"at most {kept} at once, {size(kept * each)}"
        yield f"  {'checkpoints':<22}{size(each)} each ({parts}); {most}"
        yield f"  {'host copy of a save':<22}{size(staged_bytes(job))} per rank"
    if archive := rollout_bytes(config, job.derived):
        total = "" if steps is None else f", {size(archive * steps)} in {steps} steps"
        yield f"  {'rollout archive':<22}at most {size(archive)} per step{total}"
    its = config.job
    if its.time == AUTO:
        yield f"  {'node-hours':<22}{its.nodes} x job.time, which `hpcrl submit` sets: job.time=auto"
    else:
        yield f"  {'node-hours':<22}{its.node_hours:g} at most per slice ({its.nodes} x {its.time})"


def _built(job: TrainingPlan) -> Iterator[str]:
    """Build every distinct rank of every model on the meta device, and compare the bytes."""
    if not (find_spec("torch") and find_spec("megatron")):
        raise InputError("hpcrl plan --build needs torch and megatron-core, which are not installed here; leave it out")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # megatron's, of what a login node lacks
        from hpcrl.runtime import platform

        platform.import_megatron()
        from hpcrl.forecast.memory.meta import parameter_bytes

    start, count = time.perf_counter(), 0
    for role, model in job.models.items():
        for stage in range(model.layout.pp):
            built, planned = parameter_bytes(model, stage), replace(model, optim=None).state(stage).parameters
            if built != planned:
                raise RuntimeError(f"{role} of stage {stage} has {built} bytes of parameters, planned were {planned}")
            count += 1
    seconds = time.perf_counter() - start
    yield f"  {'models':<22}{count} stages built on the meta device in {seconds:.1f} s; their parameters are as planned"
