"""`hpcrl plan --search CONFIG --machine NAME`: the fastest layouts of a job, and how they scale over nodes.

The steps of a run divide over the slices of a job chain. Times are in seconds.
"""

from __future__ import annotations

import argparse
import math
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

from hpcrl.config import yaml_core
from hpcrl.config.derive import JobDescription
from hpcrl.config.roles import KEYS, RoleSpec
from hpcrl.config.schema import AUTO, Config
from hpcrl.config.yaml_core import ConfigError
from hpcrl.forecast.memory.memory import TrainingPlan, binary, with_keys
from hpcrl.forecast.time.lengths import Lengths
from hpcrl.forecast.time.phases import JobTimes
from hpcrl.forecast.time.search import AXES, VARIED, Result, Search, Space, leanest
from hpcrl.forecast.time.table import lengths_of, limits
from hpcrl.machine.machine_file import Machine, read_machine
from hpcrl.runtime.exits import InputError
from hpcrl.runtime.job import run_directory
from hpcrl.sandbox.new_files import draft_of, read_json_or

SETUP = 300.0  # starting MPI, imports and building the models, where no slice of the run has measured it


@dataclass(frozen=True)
class Slice:
    """A slice: after its set-up it makes whole steps, then it saves. setup: before the first step. save: after the
    last one. reserve: at the end of the wall time, in which no step ends; a save fits into it. A step that is cut is
    made again by the next slice."""

    length: float  # wall time
    setup: float
    save: float
    reserve: float

    def num_steps(self, step: float) -> int:
        """Steps of `step` seconds that end in the slice."""
        return max(0, math.floor((self.length - self.setup - self.reserve) / step + 1e-9))

    def needed(self, steps: int, step: float) -> float:
        """The wall time of one slice with so many steps."""
        return self.setup + steps * step + self.reserve


class Division(NamedTuple):
    """slices: their number. seconds: from the start of the first slice to
    the end of the last one, without the queue; all but the last take their whole wall time."""

    slices: int
    seconds: float


def divide(steps: int, step: float, its: Slice) -> Division | None:
    """The slices of a run; None if not even one step ends in a slice.

    With n slices of length L: (n - 1) L + set-up + the steps that are left + a save. It grows with `step`, so on the
    same nodes the layout with the shortest step is also the one with the shortest run.
    """
    each = its.num_steps(step)
    if each == 0:
        return None
    slices = math.ceil(steps / each)
    left = steps - (slices - 1) * each
    return Division(slices, (slices - 1) * its.length + its.setup + left * step + its.save)


def order(nodes: int, steps: int | None, step: float, its: Slice) -> tuple[float, ...]:
    """What is smallest for the best number of nodes: the fewest on which all steps end within one slice; if there are
    none, or the number of steps is not known, those with the most steps in a slice, the fewest of them; if no step ends
    in a slice, those with the shortest step."""
    each = its.num_steps(step)
    if steps is not None and each >= steps:
        return 0, nodes
    return (1, -each, nodes) if each else (2, step)


def shortest(steps: int, step: float, its: Slice, limit: float | None) -> float | None:
    """The shortest wall time with which the run takes one slice; if that is above `limit`, with which it takes as few
    slices as with the limit. None if no step ends within it."""
    if limit is None or its.needed(steps, step) <= limit:
        return its.needed(steps, step)
    division = divide(steps, step, replace(its, length=limit))
    return None if division is None else its.needed(math.ceil(steps / division.slices), step)


def counted(slices: int) -> str:
    return "1 slice" if slices == 1 else f"{slices} slices"


def clock(seconds: float, limit: float | None = None) -> str:
    """[D-]HH:MM:SS, in whole minutes that are not fewer; at most the limit."""
    whole = 60 * math.ceil(seconds / 60)
    whole = whole if limit is None else min(whole, math.floor(limit))
    days, rest = divmod(whole, 24 * 3600)
    text = f"{rest // 3600:02d}:{rest // 60 % 60:02d}:{rest % 60:02d}"
    return f"{days}-{text}" if days else text


MODES = ("sync", "one_step_off", "bounded_staleness")
MOST_NODES = 1024  # up to which a size that fits is looked for


def add_arguments(parser: argparse.ArgumentParser) -> None:
    nodes = "with --search: nodes, or a range whose start is doubled up to its end; by default job.nodes"
    objective = "with --search and a range: the shortest step, all steps within one job.time, or fewest node-hours"
    modes = "with --search: values of async_training.mode to compare; by default the template's"
    out = "with --search: write the fastest layout as a YAML file; with --calibrate: write the machine"
    parser.add_argument("--nodes", metavar="N[..M]", help=nodes)
    parser.add_argument("--objective", choices=("step", "walltime", "node-hours"), default="step", help=objective)
    parser.add_argument("--modes", metavar="MODE,...", help=modes)
    parser.add_argument("--out", metavar="FILE", help=out)


def describe(job: JobDescription, path: str, overrides: Sequence[str], parsed: argparse.Namespace) -> list[str]:
    """The lines of the tables. Raises ConfigError or InputError, one line."""
    if parsed.machine is None:
        raise ConfigError("found --search without --machine; name a machine of configs/machines or a file")
    if not has_rollout(job):
        why = "jobs of `hpcrl train` and jobs of your own like it; other jobs have no rollout"
        raise InputError(f"--search is for {why}")
    machine, config = read_machine(parsed.machine), job.read_config(path, overrides)
    if parsed.objective == "walltime" and config.job.time == AUTO:
        raise ConfigError("found --objective walltime with job.time=auto; set job.time, within which steps are to end")
    lengths = lengths_of(TrainingPlan(config), parsed.response_lengths)
    asked = Asked(path, config, tuple(job.own_specs()), machine, lengths, parsed.objective)
    modes, sizes = _modes(parsed.modes), nodes_of(parsed.nodes, config.job.nodes)
    searches = {nodes: Search(asked.space(nodes, modes), machine, lengths) for nodes in sizes}
    fastest = {nodes: results for nodes, search in searches.items() if (results := search.run())}
    if not fastest:
        raise InputError(asked.fits_nowhere(sizes[-1]))
    best = min(fastest, key=lambda nodes: asked.score(fastest[nodes][0]))
    lines = list(asked.lines(fastest[best], searches[best].counts))
    if len(fastest) > 1:
        lines += ["", *scaling({nodes: results[0] for nodes, results in fastest.items()}, asked.cost)]
    if parsed.out is not None:
        write(Path(parsed.out), path, job.read_config(path), fastest[best][0].job.config)
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

    def space(self, nodes: int, modes: Sequence[str] = (), varied: Collection[str] = VARIED) -> Space:
        memory = min(filter(None, (self.config.job.gpu_memory_gib, self.machine.device.memory_gib)))
        config = with_keys(self.config, {"job.gpu_memory_gib": memory})
        return Space(config, nodes, self.own_roles, modes, varied)

    @cached_property
    def measured(self) -> Mapping[str, float]:
        """What the run's slices have measured, if there were some."""
        times = read_json_or(run_directory(self.config) / "times.json", {})
        return {name: value for name, value in times.items() if type(value) in (int, float)}

    @property
    def steps(self) -> int | None:
        """Of the run; None before its first slice has counted those of the data."""
        return self.config.trainer.total_training_steps or int(self.measured.get("total_steps", 0)) or None

    def score(self, result: Result) -> tuple[float, ...]:
        """What is to be smallest over numbers of nodes."""
        nodes, seconds = result.job.config.job.nodes, result.prediction.seconds
        if self.objective == "walltime":
            return order(nodes, self.steps, seconds, self.slice(result.job, result.job.config.job.time_seconds))
        return (seconds * (nodes if self.objective == "node-hours" else 1),)

    def cost(self, result: Result) -> str:
        """Of the run: slices and hours where the wall time is the objective, and node-hours."""
        steps, its, seconds = self.steps, result.job.config.job, result.prediction.seconds
        if self.objective != "walltime":
            hours = its.nodes * seconds / 3600
            return f"{hours * steps:,.4g} node-hours for {steps} steps" if steps else f"{hours:.4g} node-hours per step"
        within = self.slice(result.job, its.time_seconds)
        each = within.num_steps(seconds)
        if steps is None or (division := divide(steps, seconds, within)) is None:
            return f"{each} steps end within {its.time}"
        hours, slices = division.seconds / 3600, counted(division.slices)
        took = f"{steps} steps take {slices} of {its.time}, {hours:.4g} h, {its.nodes * hours:,.4g} node-hours"
        return took if division.slices == 1 else f"{took}; {each} end within one"

    def slice(self, job: TrainingPlan, length: float) -> Slice:
        """A slice of the job, with what the run's slices have measured of set-up and save."""
        measured, machine, cfg = self.measured, self.machine, job.config
        times = JobTimes(job, machine, self.lengths)
        written = times.saved(machine.node.write) / machine.efficiency.get("save_checkpoint", 1.0)
        save = max(written, measured.get("save_s", 0.0))
        setup = measured.get("setup_s", SETUP + times.saved(machine.node.read))
        # Ranks stop at the signal, or when the next phase and a save would not leave the margin.
        return Slice(length, setup, save, max(float(cfg.job.signal_seconds), save + cfg.trainer.walltime_margin))

    def fits_nowhere(self, nodes: int) -> str:
        """The line for a job without a layout that fits: what is missing, and on how many nodes there is one."""
        (phase, most), limit = leanest(self.space(nodes)), int(self.space(nodes).limit)
        count, missing = "1 node" if nodes == 1 else f"{nodes} nodes", binary(most - limit)
        line = f"{self.path} fits on {count} in no layout: with everything offloaded, recomputed and divided, "
        line += f"{phase} takes {binary(most)} of a GPU, {missing} more than there are"
        while nodes < MOST_NODES:
            nodes = min(2 * nodes, MOST_NODES)
            if (most := leanest(self.space(nodes))[1]) <= limit:
                return f"{line}; use --nodes {nodes}, where it takes {binary(most)}"
        return f"{line}; it does not fit on {MOST_NODES} nodes either: use GPUs with more memory, or shorter sequences"

    def lines(self, results: Sequence[Result], counts: Mapping[str, int]) -> Iterator[str]:
        best, its = results[0], results[0].job.config.job
        yield f"fastest layouts of {self.path} on {its.nodes} x {its.ntasks_per_node} ranks of {self.machine.name}"
        if (caveat := self.machine.caveat()) is not None:
            yield f"  {caveat}"
        for place, result in enumerate(results, 1):
            yield from ("", *self._result(place, result))
        yield ""
        if len(results) > 1:
            yield f"  {'why not the second':<22}{difference(best, results[1])}"
        line = "  combinations          {all:,}, of which {full:,} are too large; {computed} computed exactly"
        yield line.format_map(counts)

    def _result(self, place: int, result: Result) -> Iterator[str]:
        step, job, row = result.prediction, result.job, result.row
        what, (low, high) = "GPU" if job.on_gpu else "rank", step.band(self.machine)
        rate = f"{step.tokens_per_second / job.derived.world_size:.4g} tokens/s per {what}"
        yield f"{place}. {step.seconds:.4g} s per step, {low:.4g} to {high:.4g}; {rate}; {self.cost(result)}"
        for role in job.derived.roles:
            yield f"     {role:<10}{_placed(role, job)}"
        for key in ("model.recompute.granularity", "async_training.mode", "rollout.gpu_memory_utilization"):
            yield f"     {key}={attrgetter(key)(job.config) or 'null'}"
        phases = sorted(step.phases.items(), key=lambda phase: -phase[1])
        shares = [f"{name} {seconds / step.seconds:.0%}" for name, seconds in phases if seconds >= 0.01 * step.seconds]
        slowest = phases[0][0]
        yield f"     phases    {', '.join(shares)}; {slowest} is limited by {limits(step.parts[slowest])}"
        if job.capacity is not None:
            yield f"     memory    {binary(job.capacity - row.total)} are left in {row.phase}"


def _placed(role: str, job: TrainingPlan) -> str:
    placed, spec = job.derived.roles[role], job.specs.get(role)
    axes = " ".join(f"{axis} {getattr(placed, axis)}" for axis in AXES if axis == "tp" or getattr(placed, axis) > 1)
    text = f"{axes} dp {placed.dp} on ranks {placed.ranks[0]}-{placed.ranks[-1]}"
    if spec is None or not spec.max_tokens:
        return text
    away = [KEYS[part].removesuffix("_offload") for part in job.away(role)]
    text += f", micro-batches of {spec.token_budget(job.config)} tokens"
    return f"{text}, offloads {' '.join(away)}" if away else text


def difference(best: Result, other: Result) -> str:
    """The phase that the other one loses most in."""
    mine, its = best.prediction.phases, other.prediction.phases
    name = max(its, key=lambda name: its[name] - mine.get(name, 0.0))
    lost, more = its[name], other.prediction.seconds - best.prediction.seconds
    return f"{name} takes {lost:.4g} s and not {mine.get(name, 0.0):.4g}, of a difference of {more:.4g} s per step"


def scaling(fastest: Mapping[int, Result], cost: Callable[[Result], str]) -> Iterator[str]:
    ideal = next(nodes * its.prediction.seconds for nodes, its in fastest.items())
    yield f"  {'nodes':>6}{'s per step':>12}{'tokens/s':>12}{'efficiency':>12}  cost"
    for nodes, result in fastest.items():
        step = result.prediction
        share = ideal / nodes / step.seconds
        yield f"  {nodes:>6}{step.seconds:>12.4g}{step.tokens_per_second:>12.4g}{share:>12.0%}  {cost(result)}"


def nodes_of(text: str | None, default: int) -> list[int]:
    """4..64 is 4, 8, 16, 32, 64; the end is always among them."""
    text = str(default) if text is None else text
    match = re.fullmatch(r"(\d+)(?:\.\.(\d+))?", text, re.ASCII)
    first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not 1 <= first <= last:
        why = "is empty" if first > last else "is no range"
        raise ConfigError(f"--nodes {text} {why}; expected a number of nodes, or a range such as 4..64")
    return [*(first << power for power in range(last.bit_length()) if first << power < last), last]


def _modes(text: str | None) -> list[str]:
    named = text.split(",") if text is not None else []
    if unknown := [name for name in named if name not in MODES]:
        raise ConfigError(f"--modes {text} has {unknown[0]!r}; expected some of {','.join(MODES)}")
    return [mode for mode in MODES if mode in named]


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
    changes: dict[str, Any] = {}
    for key, value in other.items():
        if key in base and isinstance(value, dict) and isinstance(base[key], dict):
            value = differences(base[key], value) or base[key]
        if key not in base or base[key] != value:
            changes[key] = value
    return changes
