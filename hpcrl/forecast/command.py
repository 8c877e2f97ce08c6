"""`hpcrl plan`: memory of every rank, disk, and what would make the job fit.

The job is as large as `job.nodes` x `job.ntasks_per_node` says; nothing of it runs, and torch is not needed. With
--build every stage of every model is built, too, on torch's meta device, which takes no memory. With --refit: bytes and
memory only of a refit.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from importlib.util import find_spec
from statistics import fmean
from typing import Any, NoReturn

from hpcrl.config.derive import JobDescription
from hpcrl.config.schema import AUTO
from hpcrl.engine.refit.planner import RankTraffic
from hpcrl.forecast.memory.fixes import cheapest_fix, override, tightest
from hpcrl.forecast.memory.memory import GIB, MIB, Row, TrainingPlan, binary, size
from hpcrl.forecast.memory.state import (
    FP32,
    RoleModel,
    State,
    checkpoint_bytes,
    kept_checkpoints,
    rollout_bytes,
    snapshot_bytes,
    staged_bytes,
)
from hpcrl.forecast.memory.supervised import JOBS, SupervisedPlan, plan_of
from hpcrl.forecast.time import calibrate, search_command
from hpcrl.forecast.time import table as time_table
from hpcrl.model.params import shards
from hpcrl.runtime import exits
from hpcrl.runtime.exits import InputError
from hpcrl.runtime.launcher import format_spans, is_first_launched


def host_copy(job: TrainingPlan) -> int:
    """Host memory of a rank into which a save copies its part."""
    per_rank = 0
    for role, model in job.models.items():
        if model.optim is not None:
            per_rank += staged_bytes(model, max(range(model.layout.pp), key=lambda n: job.states[role, n].total))
    return per_rank


COLUMNS = ("parameters", "gradients", "optimizer", "activations", "logits", "KV cache", "refit", "total")


WAYS = {  # of running the command in place of the table; --build adds to it
    "refit": "bytes and memory only of a refit",
    "build": "build the models, too, with torch: are they as planned?",
    "search": "search for the fastest layouts, with --machine",
    "calibrate": "fit --machine to the runs whose folders are given in place of CONFIG",
}


def main(arguments: list[str], load_job: Callable[[str], JobDescription]) -> NoReturn:
    """Run the subcommand; ends with code 2 and one line for a config that cannot run."""
    parser = exits.ArgumentParser(prog="hpcrl plan", description=(__doc__ or "").split(": ", 1)[1])
    group = parser.add_mutually_exclusive_group()
    for way, text in WAYS.items():
        group.add_argument(f"--{way}", action="store_const", const=way, dest="way", help=text)
    time_table.add_arguments(parser)
    search_command.add_arguments(parser)
    planned = "YAML file; before it, sft or preference, or the file of a job of your own"
    parser.add_argument("config", metavar="[JOB:]CONFIG", help=planned)
    parser.add_argument("overrides", metavar="key=value", nargs="*", default=[], help="override a key")
    parsed = parser.parse_intermixed_args(arguments)
    if parsed.way == "refit" and parsed.machine is not None:
        parser.error("found --machine beside --refit, which prints a refit's bytes only; leave one out")
    if parsed.way not in (None, "build") and parsed.timeline:
        parser.error(f"found --timeline beside --{parsed.way}, which has no use for it; leave one out")
    job, colon, path = parsed.config.rpartition(":")
    if job and not job.endswith(".py") and job not in ("train", *JOBS):
        parser.error(f"found the job {job!r}; expected train, {', '.join(JOBS)}, or a .py file")
    if job in JOBS and (parsed.machine is not None or parsed.way not in (None, "build")):
        option = "--machine" if parsed.machine is not None else f"--{parsed.way}"
        parser.error(f"found {option} beside {job}:, of which `hpcrl plan` has the memory only; leave one out")
    if "=" in parsed.config and not os.path.exists(path):
        parser.error(f"found the override {parsed.config!r} in place of a YAML file")
    ways: dict[str, Callable[..., list[str]]] = {
        "refit": describe_refit,
        "search": search_command.describe,
        "calibrate": calibrate.calibration_lines,
    }
    with exits.one_line_for_user_errors():
        lines = ways.get(parsed.way, describe)(load_job(job if colon else "train"), path, parsed.overrides, parsed)
    if is_first_launched(os.environ):
        print("\n".join(lines))
    sys.exit(exits.DONE)


def describe(
    described: JobDescription, path: str, overrides: Sequence[str] = (), parsed: argparse.Namespace | None = None
) -> list[str]:
    """The lines of the table.

    Args:
        parsed: options of the command, which may add lines.
    """
    job = plan_of(described, described.read_config(path, overrides))
    rows, supervised = job.rows(), isinstance(job, SupervisedPlan)
    in_gib = tightest(rows).total >= GIB
    unit, name = (GIB, "GiB") if in_gib else (MIB, "MiB")

    def cells(numbers: Sequence[int]) -> str:
        return "".join(f"{number / unit:>12.2f}" for number in numbers)

    def head(title: str, columns: Sequence[str]) -> str:
        return f"  {title:<14}{'stages':<8}{'ranks':<12}" + "".join(f"{name:>12}" for name in columns)

    return [
        *_heading(path, job),
        *([] if supervised else _other_jobs(path, job)),
        "",
        head(f"role, {name}", COLUMNS[:3]),
        *_states(job, cells),
        "",
        head(f"phase, {name}", COLUMNS),
        *_phases(job, rows, cells),
        "",
        *_fit(job, rows),
        *_costs(job, supervised),
        *(_built(job) if parsed is not None and parsed.way == "build" else ()),
        *(time_table.lines_of(job, parsed) if parsed is not None and not supervised else ()),
    ]


def _heading(path: str, job: TrainingPlan) -> Iterator[str]:
    its = job.config.job
    gpus = f"GPUs of {its.gpu_memory_gib:g} GiB" if job.on_gpu else "no GPUs (job.gpus_per_node=0)"
    yield f"plan of {path}: {job.derived.world_size} ranks, {its.nodes} nodes of {its.ntasks_per_node}, {gpus}"
    works = {phase.role: phase.work for phase in job.phases if phase.work}
    for role, placed in job.derived.roles.items():
        layout = f"tp {placed.tp}  pp {placed.pp}  dp {placed.dp}"
        work = works.get(role)
        batches = f", micro-batches of {work.tokens} tokens, {work.rows} with outputs" if work else ""
        yield f"  {role:<8} {layout:<20} ranks {format_spans(placed.ranks)}{batches}"


def _other_jobs(path: str, job: TrainingPlan) -> Iterator[str]:
    """A note for each section of a job that this plan is not of."""
    for name in JOBS:
        if name in job.config.model_fields_set:
            yield f"  note: this is the plan of `hpcrl train`; that of the section {name}: hpcrl plan {name}:{path}"


def _states(job: TrainingPlan, cells: Callable[[Sequence[int]], str]) -> Iterator[str]:
    for role, model in job.models.items():
        groups: dict[State, list[int]] = {}
        for stage in range(model.layout.pp):
            groups.setdefault(job.states[role, stage], []).append(stage)
        for state, stages in groups.items():
            ranks = sorted(rank for rank in model.layout.ranks if model.layout.coord(rank).pp in stages)
            numbers = state.parameters + state.copies, state.gradients, state.optimizer
            yield f"  {role:<14}{format_spans(stages):<8}{_ranks(ranks):<12}{cells(numbers)}"


def _phases(job: TrainingPlan, rows: Sequence[Row], cells: Callable[[Sequence[int]], str]) -> Iterator[str]:
    """Lines of the phases; places with equal numbers share a line."""
    for phase in job.phases:
        groups: dict[tuple[int, ...], list[Row]] = {}
        for row in rows:
            if row.phase == phase.name:
                groups.setdefault((*row[2:], row.total), []).append(row)
        for numbers, members in groups.items():
            ranks = sorted(rank for row in members for rank in row.place.ranks)
            stages = sorted({row.place.stages.get(phase.role, 0) for row in members})
            of_role = format_spans(stages) if phase.work else "-"
            yield f"  {phase.name:<14}{of_role:<8}{_ranks(ranks):<12}{cells(numbers)}"


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
        fix = cheapest_fix(job)
        if fix is None:
            yield f"  {'cheapest fix':<22}none found: see docs/planning.md for what was tried"
        else:
            yield f"  {'cheapest fix':<22}{' '.join(fix.overrides)}"
            joint = ""
            for key, then in fix.parts.items():
                change = f"{joint}{override(key, fix.change[key])}: " if len(fix.parts) > 1 else ""
                yield f"  {'':<22}{change}then {binary(then.total)}, in {then.phase}"
                joint = "and "
            if "model.lora_rank" in fix.change:
                yield f"  {'':<22}model.lora_rank trains adapters: use about ten times the learning rate"
    yield f"  {'not counted':<22}CUDA context, NCCL's buffers, fragmentation; activations of generation are estimated"


def _costs(job: TrainingPlan, supervised: bool) -> Iterator[str]:
    config, steps = job.config, job.steps
    roles = checkpoint_bytes(config, job.models)
    num_kept = kept_checkpoints(config.trainer, steps, saves_last=supervised)
    if offloaded := max(job.on_hosts().values(), default=0):
        rank = max(map(job.on_host, job.places))
        yield f"  {'offloaded':<22}{binary(offloaded)} of a node's host memory, {binary(rank)} of a rank's"
    if pictures := max(map(job.pictures_on_host, job.places)):
        yield f"  {'pictures':<22}at most {binary(pictures)} of a rank's host memory, if they fill the prompts"
    if environments := job.environments_on_host():
        limits = "max_open and memory_limit_mb of rollout.multi_turn.environment"
        yield f"  {'environments':<22}at most {binary(environments)} of a node's host memory ({limits})"
    each = sum(roles.values())
    parts = ", ".join(f"{role} {size(nbytes)}" for role, nbytes in roles.items())
    if num_kept == 0:
        yield f"  {'checkpoints':<22}none (trainer.save_freq=-1)"
    else:
        most = "all are kept" if num_kept is None else f"at most {num_kept} at once, {size(num_kept * each)}"
        yield f"  {'checkpoints':<22}{size(each)} each ({parts}); {most}"
        yield f"  {'host copy of a save':<22}{size(host_copy(job))} per rank"
    if config.trainer.snapshot_freq:
        its = config.job
        nodes = [rank // its.ntasks_per_node for rank in range(its.nodes * its.ntasks_per_node)]
        largest = max(snapshot_bytes(job.models, nodes).values())
        yield f"  {'snapshots':<22}{size(largest)} of a node's host memory, in trainer.checkpoint.snapshot_dir"
    if archive := 0 if supervised else rollout_bytes(config, job.derived):
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
        import hpcrl.model.build  # noqa: F401  # before the clock starts

    start, count = time.perf_counter(), sum(model.layout.pp for model in job.models.values())
    for role, model in job.models.items():
        for stage in range(model.layout.pp):
            built, planned = parameter_bytes(model, stage), replace(model, optim=None).state(stage).parameters
            if built != planned:
                raise RuntimeError(f"{role} of stage {stage} has {built} bytes of parameters, planned were {planned}")
    seconds = time.perf_counter() - start
    yield f"  {'models':<22}{count} stages built on the meta device in {seconds:.1f} s; their parameters are as planned"


def parameter_bytes(model: RoleModel, stage: int) -> int:
    """Bytes of the parameters that megatron builds for a pipeline stage, on torch's meta device. Raises InputError if
    megatron rejects the model or the layout."""
    import torch

    from hpcrl.model.build import build_model
    from hpcrl.runtime.groups import fake_rank

    kinds: dict[str, Any] = {"head": model.head, "dtype": torch.float32 if model.itemsize == FP32 else torch.bfloat16}
    kinds |= {"sequence_parallel": model.sequence_parallel, "lora": model.lora, "device": torch.device("meta")}
    with fake_rank(model.layout, model.layout.rank_of(pp=stage)) as groups, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            chunks = build_model(model.shape, groups, **kinds)
        except (ValueError, AssertionError) as error:
            raise InputError(f"megatron-core does not build this model: {error}") from error
        parameters = [parameter for chunk in chunks for parameter in chunk.parameters()]
        return sum(parameter.numel() * parameter.element_size() for parameter in parameters)


NAMED = 4  # ranks that a row of a refit's table names


def describe_refit(described: JobDescription, path: str, overrides: Sequence[str] = (), _: object = None) -> list[str]:
    """The lines of a refit's table. Raises ConfigError or InputError, one line, for invalid layouts."""
    job = TrainingPlan(described.read_config(path, overrides))
    resharding, start = job.refit, time.perf_counter()
    traffic = resharding.traffic()
    totals = time.perf_counter() - start
    busiest = max(traffic, key=lambda rank: traffic[rank].sent + traffic[rank].received)
    start = time.perf_counter()
    TrainingPlan(job.config).refit.plan_for_rank(busiest)
    share = time.perf_counter() - start
    return [
        *_refit_heading(path, job),
        "",
        *_refit_table(job, traffic),
        "",
        *_refit_summary(job, traffic),
        f"  {'planned in':<22}{share:.2f} s for the share of rank {busiest}, {totals:.2f} s for this table",
    ]


def _refit_heading(path: str, job: TrainingPlan) -> Iterator[str]:
    config, refit, its = job.config, job.refit, job.config.job
    parameters = sum(math.prod(shard.global_shape) for shard in shards(refit.shape))
    dtype = config.rollout.dtype or config.model.dtype
    yield f"refit of {path}: {its.nodes * its.ntasks_per_node} ranks, {its.nodes} nodes of {its.ntasks_per_node}"
    sizes = f"{parameters / 1e9:.3g} B parameters, {size(parameters * refit.itemsize)} in {dtype}"
    yield f"  model    {refit.shape.num_layers} layers, {sizes}"
    for name, role, kind in (
        ("actor", refit.source, f"{config.model.dtype}, megatron"),
        ("rollout", refit.destination, f"{dtype}, engine {config.rollout.engine}"),
    ):
        yield f"  {name:<8} tp {role.tp}  pp {role.pp}  dp {role.dp}  ranks {format_spans(role.ranks)}, {kind}"


def _refit_table(job: TrainingPlan, traffic: dict[int, RankTraffic]) -> Iterator[str]:
    received = {rank: its.received for rank, its in traffic.items()}
    shared = {rank: job.shared(rank) for rank in traffic}
    copied = {rank: its.copied - shared[rank] for rank, its in traffic.items()}
    rows = {
        "sent": {rank: its.sent for rank, its in traffic.items()},
        "received": received,
        "least to receive": received,
        "copied on the rank": copied,
        "aliased": shared,
        "engine's own weights": {rank: received[rank] + copied[rank] for rank in traffic},
    }
    yield f"  {'per rank':<22}{'min':>10}{'mean':>10}{'max':>10}  ranks with the most"
    for name, values in rows.items():
        most = max(values.values())
        worst = [rank for rank, value in values.items() if value == most]
        named = "-" if not most else "all" if len(worst) == len(values) else ", ".join(map(str, worst[:NAMED]))
        more = f" and {len(worst) - NAMED} more" if NAMED < len(worst) < len(values) and most else ""
        numbers = (min(values.values()), fmean(values.values()), most)
        yield f"  {name:<22}{''.join(f'{size(number):>10}' for number in numbers)}  {named}{more}"


def _refit_summary(job: TrainingPlan, traffic: dict[int, RankTraffic]) -> Iterator[str]:
    refit, bucket = job.refit, job.config.rollout.checkpoint_engine.update_weights_bucket_megabytes
    moved, crossed = sum(its.received for its in traffic.values()), refit.cross_node_bytes()
    sent = [[traffic[rank].sent for rank in replicas] for replicas in refit.source.groups("cp", "dp")]
    unevenness = max((max(each) / fmean(each) for each in sent if any(each)), default=1.0)
    most = max(its.sent + its.received for its in traffic.values())
    peak = f"at most {bucket} MiB" if most > bucket * MIB else size(most)
    yield f"  {'moved over all ranks':<22}{size(moved)}, of it {size(crossed)} between nodes, the least possible"
    yield f"  {'largest sender':<22}{unevenness:.3f} x the mean of the ranks that hold the same"
    limit = f"update_weights_bucket_megabytes={bucket}"
    yield f"  {'peak extra memory':<22}{peak} per rank, besides the weights ({limit})"
