"""`hpcrl plan --search CONFIG --machine NAME`: the fastest layouts of a job, and how they scale over nodes."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter
from pathlib import Path
from typing import Any, get_args

from hpcrl.config import yaml_core
from hpcrl.config.derive import JobDescription
from hpcrl.config.roles import RoleSpec
from hpcrl.config.schema import AUTO, Config
from hpcrl.config.yaml_core import ConfigError
from hpcrl.forecast.memory.memory import Row, TrainingPlan, binary, with_keys
from hpcrl.forecast.time.lengths import Lengths
from hpcrl.forecast.time.search import KEPT, Found, Result, Search, fullest, leanest
from hpcrl.forecast.time.slices import Slice, counted, divide, order, slice_of
from hpcrl.forecast.time.space import AXES, Knobs, Mode, Space
from hpcrl.forecast.time.table import lengths_of, limits
from hpcrl.machine.machine_file import Machine, read_machine
from hpcrl.runtime.exits import InputError
from hpcrl.runtime.job import run_directory
from hpcrl.sandbox.new_files import draft_of, read_json_or

OBJECTIVES = ("step", "walltime", "node-hours")
MODES: tuple[Mode, ...] = get_args(Mode)
MOST_NODES = 1024  # up to which a size that fits is looked for


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--nodes",
        metavar="N[..M]",
        help="with --search: nodes, or a range that is doubled through; by default job.nodes",
    )
    parser.add_argument(
        "--objective",
        choices=OBJECTIVES,
        default="step",
        help="with --search, over a range of nodes: the shortest step; all steps within one job.time on the fewest "
        "nodes, else the most steps in it; or the fewest node-hours",
    )
    parser.add_argument(
        "--modes",
        metavar="MODE,...",
        help="with --search: values of async_training.mode to compare, which differ in the age of samples; by default "
        "the template's",
    )
    parser.add_argument(
        "--out",
        metavar="FILE",
        help="with --search: write the fastest as a YAML file; with --calibrate: write the machine",
    )


def describe(job: JobDescription, path: str, overrides: Sequence[str], parsed: argparse.Namespace) -> list[str]:
    """The lines of the tables. Raises ConfigError or InputError, one line."""
    if parsed.machine is None:
        raise ConfigError("found --search without --machine; name a machine of configs/machines or a file")
    if not has_rollout(job):
        raise InputError(
            "--search is for jobs of `hpcrl train` and jobs of your own like it; other jobs have no rollout"
        )
    machine = read_machine(parsed.machine)
    config = job.read_config(path, overrides)
    if parsed.objective == "walltime" and config.job.time == AUTO:
        raise ConfigError("found --objective walltime with job.time=auto; set job.time, within which steps are to end")
    lengths = lengths_of(TrainingPlan(config), parsed.response_lengths)
    asked = Asked(path, config, tuple(job.own_specs()), machine, lengths, parsed.objective)
    knobs, sizes, found = Knobs(modes=_modes(parsed.modes)), nodes_of(parsed.nodes, config.job.nodes), {}
    best, fastest = 0, None  # of the sizes, and its search
    for nodes in sizes:
        search = Search(asked.space(nodes, knobs), machine, asked.lengths, kept=KEPT if len(sizes) == 1 else 1)
        results = search.run()
        if results.results:
            found[nodes] = results
            if not best or asked.score(results.results[0]) < asked.score(found[best].results[0]):
                best, fastest = nodes, search
    if fastest is None:
        raise InputError(asked.fits_nowhere(sizes[-1]))
    if len(sizes) > 1:
        fastest.kept = KEPT
        found[best] = fastest.run()
    lines = [*asked.lines(found[best])]
    if len(found) > 1:
        lines += ["", *scaling(found, asked.cost)]
    if parsed.out is not None:
        write(Path(parsed.out), path, job.read_config(path), found[best].results[0].job.config)
        lines.append(f"  {'written':<22}{parsed.out}: the first, for `hpcrl plan` and `hpcrl train`")
    return lines


def has_rollout(job: JobDescription) -> bool:
    """Whether it is `hpcrl train`, or a job of the user's own like it."""
    return job.trained_role == "actor" and not job.saves_last


@dataclass(frozen=True)
class Asked:
    """A template, and the machine that it is planned for."""

    path: str
    config: Config
    own_roles: tuple[RoleSpec, ...]
    machine: Machine
    lengths: Lengths
    objective: str = "step"

    def space(self, nodes: int, knobs: Knobs | None = None) -> Space:
        config, memory = self.config, self.machine.device.memory_gib
        if memory is not None and config.job.gpus_per_node > 0 and memory < config.job.gpu_memory_gib:
            config = with_keys(config, {"job.gpu_memory_gib": memory})
        return Space(config, nodes, knobs, self.own_roles)

    @cached_property
    def measured(self) -> Mapping[str, float]:
        """What the run's slices have measured, if there were some."""
        found = read_json_or(run_directory(self.config) / "times.json", {})
        return {name: value for name, value in found.items() if type(value) in (int, float)}

    @property
    def steps(self) -> int | None:
        """Of the run; None before its first slice has counted those of the data."""
        return self.config.trainer.total_training_steps or int(self.measured.get("total_steps", 0)) or None

    def score(self, result: Result) -> tuple[float, ...]:
        """What is to be smallest over numbers of nodes."""
        nodes, seconds = result.job.config.job.nodes, result.prediction.seconds
        if self.objective == "walltime":
            return order(nodes, self.steps, seconds, self._slice(result))
        return (seconds * (nodes if self.objective == "node-hours" else 1),)

    def cost(self, result: Result) -> str:
        """Of the run: slices and hours where the wall time is the objective, and node-hours."""
        steps, its, seconds = self.steps, result.job.config.job, result.prediction.seconds
        if self.objective != "walltime":
            return cost(its.nodes, seconds, steps)
        each = self._slice(result).num_steps(seconds)
        division = None if steps is None else divide(steps, seconds, self._slice(result))
        if division is None:
            return f"{each} steps end within {its.time}"
        hours = division.seconds / 3600
        took = f"{steps} steps take {counted(division.slices)} of {its.time}, {hours:.4g} h"
        took = f"{took}, {its.nodes * hours:,.4g} node-hours"
        return took if division.slices == 1 else f"{took}; {each} end within one"

    def _slice(self, result: Result) -> Slice:
        job = result.job
        return slice_of(job, self.machine, self.lengths, job.config.job.time_seconds, self.measured)

    def fits_nowhere(self, nodes: int) -> str:
        """The line for a job without a layout that fits: what is missing, and on how many nodes there is one."""
        row, spare = self._leanest(nodes)
        line = (
            f"{self.path} fits on {nodes} {_nodes(nodes)} in no layout: with everything offloaded, recomputed and "
            f"divided, {row.phase} takes {binary(row.total)} of a GPU, {binary(-spare)} more than there are"
        )
        more = nodes
        while more < MOST_NODES:
            more = min(2 * more, MOST_NODES)
            row, spare = self._leanest(more)
            if spare >= 0:
                return f"{line}; use --nodes {more}, where it takes {binary(row.total)}"
        return f"{line}; it does not fit on {MOST_NODES} nodes either: use GPUs with more memory, or shorter sequences"

    def _leanest(self, nodes: int) -> tuple[Row, int]:
        """The fullest row of the candidate that takes least, and the bytes that are left of what it may take."""
        space = self.space(nodes)
        assert space.capacity is not None, "without GPUs everything fits"
        row = fullest(leanest(space)[1], space.capacity)
        return row, space.capacity - row.total

    def lines(self, found: Found) -> Iterator[str]:
        best, counts = found.results[0], found.counts
        size, machine, its = best.job.derived.world_size, self.machine, best.job.config.job
        yield f"fastest layouts of {self.path} on {its.nodes} x {its.ntasks_per_node} ranks of {machine.name}"
        if (caveat := machine.caveat()) is not None:
            yield f"  {caveat}"
        for place, result in enumerate(found.results, 1):
            yield from ("", *self._result(place, result, size))
        yield ""
        if len(found.results) > 1:
            yield f"  {'why not the second':<22}{difference(best, found.results[1])}"
        yield f"  {'placements':<22}{counts.frames:,}, of which the bound excluded {counts.frames - counts.opened:,}"
        yield (
            f"  {'choices of a role':<22}{counts.too_large:,} were too large, {counts.too_slow:,} too slow, "
            f"{counts.dominated:,} slower and no smaller than others"
        )
        yield (
            f"  {'candidates':<22}{counts.all:,} of the rest: {counts.by_memory:,} excluded by memory, "
            f"{counts.by_bound:,} by the bound, {counts.rejected:,} by the job's checks; {counts.evaluated:,} computed"
        )
        if found.bound < best.prediction.seconds:
            gain = 1 - found.bound / best.prediction.seconds
            yield f"  {'not computed':<22}candidates that may be faster, by {gain:.1%} at most"

    def _result(self, place: int, result: Result, size: int) -> Iterator[str]:
        step, job = result.prediction, result.job
        what, (low, high) = "GPU" if job.on_gpu else "rank", step.band(self.machine)
        yield (
            f"{place}. {step.seconds:.4g} s per step, {low:.4g} to {high:.4g}; "
            f"{step.tokens_per_second / size:.4g} tokens/s per {what}; {self.cost(result)}"
        )
        for role in job.derived.roles:
            yield f"     {role:<10}{self._role(role, job)}"
        for key in ("model.recompute.granularity", "async_training.mode", "rollout.gpu_memory_utilization"):
            yield f"     {key}={_yaml(attrgetter(key)(job.config))}"
        shares = ", ".join(
            f"{name} {seconds / step.seconds:.0%}"
            for name, seconds in sorted(step.phases.items(), key=lambda phase: -phase[1])
            if seconds >= 0.01 * step.seconds
        )
        slowest = max(step.phases, key=lambda name: step.phases[name])
        yield f"     phases    {shares}; {slowest} is limited by {limits(step.parts[slowest])}"
        if result.left is not None:
            yield f"     memory    {binary(result.left)} are left in {result.row.phase}"

    def _role(self, role: str, job: TrainingPlan) -> str:
        placed = job.derived.roles[role]
        axes = " ".join(f"{axis} {getattr(placed, axis)}" for axis in AXES if axis == "tp" or getattr(placed, axis) > 1)
        text = f"{axes} dp {placed.dp} on ranks {placed.ranks[0]}-{placed.ranks[-1]}"
        spec = job.specs.get(role)
        if spec is not None and spec.max_tokens:
            text += f", micro-batches of {spec.token_budget(job.config)} tokens"
            away = [
                part
                for part in ("param", "grad", "optimizer")
                if getattr(spec.config_of(job.config), f"{part}_offload", 0)
            ]
            text += f", offloads {' '.join(away)}" if away else ""
        return text


def cost(nodes: int, seconds: float, steps: int | None) -> str:
    hours = nodes * seconds / 3600
    return f"{hours:.4g} node-hours per step" if steps is None else f"{hours * steps:,.4g} node-hours for {steps} steps"


def difference(best: Result, other: Result) -> str:
    """The phase that the other one loses most in."""
    mine, its = best.prediction.phases, other.prediction.phases
    name = max(its, key=lambda name: its[name] - mine.get(name, 0.0))
    return (
        f"{name} takes {its[name]:.4g} s and not {mine.get(name, 0.0):.4g}, of a difference of "
        f"{other.prediction.seconds - best.prediction.seconds:.4g} s per step"
    )


def scaling(found: Mapping[int, Found], cost: Callable[[Result], str]) -> Iterator[str]:
    first = next(iter(found))
    ideal = first * found[first].results[0].prediction.seconds
    yield f"  {'nodes':>6}{'s per step':>12}{'tokens/s':>12}{'efficiency':>12}  cost"
    for nodes, its in found.items():
        step = its.results[0].prediction
        share = ideal / nodes / step.seconds
        yield f"  {nodes:>6}{step.seconds:>12.4g}{step.tokens_per_second:>12.4g}{share:>12.0%}  {cost(its.results[0])}"


def nodes_of(text: str | None, default: int) -> list[int]:
    """4..64 is 4, 8, 16, 32, 64; the end is always among them."""
    if text is None:
        return [default]
    match = re.fullmatch(r"(\d+)(?:\.\.(\d+))?", text, re.ASCII)
    first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not match or not 1 <= first <= last:
        why = "is empty" if match and first > last else "is no range"
        raise ConfigError(f"--nodes {text} {why}; expected a number of nodes, or a range such as 4..64")
    found = []
    while first < last:
        found.append(first)
        first *= 2
    return [*found, last]


def _modes(text: str | None) -> tuple[Mode, ...]:
    if text is None:
        return ()
    named = text.split(",")
    if unknown := [name for name in named if name not in MODES]:
        raise ConfigError(f"--modes {text} has {unknown[0]!r}; expected some of {','.join(MODES)}")
    return tuple(mode for mode in MODES if mode in named)


def write(out: Path, template: str, base: Config, config: Config) -> None:
    """The file that extends the template and sets what is different."""
    changes = differences(base.model_dump(), config.model_dump())
    extends = os.path.relpath(Path(template).resolve(), out.resolve().parent)
    try:
        with draft_of(out) as draft:
            draft.write_text(yaml_core.dump({"extends": extends, **changes}), encoding="utf-8")
    except OSError as error:
        raise InputError(f"cannot write {out}: {error.strerror}; name a file in a folder that exists") from None


def differences(base: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in other.items():
        if key not in base or not (isinstance(value, dict) and isinstance(base[key], dict)):
            if key not in base or base[key] != value:
                found[key] = value
        elif inner := differences(base[key], value):
            found[key] = inner
    return found


def _yaml(value: object) -> str:
    return "null" if value is None else str(value)


def _nodes(count: int) -> str:
    return "node" if count == 1 else "nodes"
