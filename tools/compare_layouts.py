"""How well `hpcrl plan` predicts the lines of tools/bench layouts: a table, and a plot.

    .venv/bin/python tools/compare_layouts.py FILE.jsonl --machine FILE.yaml [--plot FILE.png] [--misses 10]

The machine's efficiencies are fitted to the six cases of CALIBRATED; all figures are of the other cases. A case's
seconds are the medians of its repeats, each of which is the median of a job's counted steps, divided by how much slower
than otherwise the machine was during that start of the ranks, of 24 jobs: see `drift`. Lines of `--memory` are
compared with the memory that is planned.
"""

from __future__ import annotations

import argparse
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from bench.harness import read_lines
from bench.layouts import PROMPT_LENGTH, PROMPTS, SAMPLES, STEPS, Case, cases, config_of, response_length

from hpcrl.forecast.memory.memory import TrainingPlan
from hpcrl.forecast.time.calibrate import Measured, fit, fitted_machine
from hpcrl.forecast.time.lengths import Lengths
from hpcrl.forecast.time.step import Prediction, predict
from hpcrl.machine.machine_file import Machine, read_machine

CALIBRATED = (
    "dense grpo fixed: dp, engine tp1",
    "dense ppo log-normal: tp2, engine tp2",
    "dense grpo log-normal: pp2 cp2, engine tp1",
    "moe grpo fixed: ep2, engine tp1",
    "moe ppo log-normal: tp2 pp2, engine tp1",
    "moe ppo log-normal: cp2 ep4, engine tp1",
)
POLISHES = 20


@dataclass(frozen=True)
class Compared:
    """spread: of the repeats' step times, largest less smallest, as a share of the median."""

    case: Case
    measured: Measured
    spread: float
    predicted: Prediction

    @property
    def step(self) -> float:
        return self.measured.seconds["step"]

    @property
    def error(self) -> float:
        """Of the step, relative."""
        return self.predicted.step / self.step - 1

    def phase_errors(self) -> dict[str, float]:
        """Relative, of those that take a part of the step."""
        found = self.measured.phases
        return {
            name: self.predicted.phases[name] / took - 1
            for name, took in found.items()
            if name in self.predicted.phases
        }


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--machine", required=True, help="machine file, or the name of one")
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--misses", type=int, default=10, help="cases that are listed, the worst first")
    options = parser.parse_args(arguments)
    lines = read_lines(options.file)
    if shares := memory(lines):
        most = max(shares, key=lambda name: shares[name])
        print(f"memory: {len(shares)} ranks, peak of live bytes / planned median {median(shares.values()):.2f},")
        print(f"  {min(shares.values()):.2f} to {shares[most]:.2f} ({most})")
    measured = measurements(lines)
    held_out, fitted = compared(measured, read_machine(options.machine))
    for line in report(held_out, fitted, len(measured) - len(held_out)):
        print(line)
    for it in sorted(held_out, key=lambda it: -abs(math.log1p(it.error)))[: options.misses]:
        print(describe(it))
    if options.plot:
        plot(held_out, options.plot)


def compared(measured: Mapping[str, tuple[Measured, float]], machine: Machine) -> tuple[list[Compared], Machine]:
    """All cases but those of CALIBRATED, and the machine that is fitted to these."""
    fitted = fitted_machine(machine, fit([measured[name][0] for name in CALIBRATED if name in measured], machine))
    held_out = []
    for case in cases():
        if case.name in measured and case.name not in CALIBRATED:
            took, spread = measured[case.name]
            held_out.append(Compared(case, took, spread, predict(took.job, fitted, took.lengths)))
    return held_out, fitted


def memory(lines: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Peaks of live tensor bytes as shares of what `hpcrl plan` counts, by case and first rank of those that hold the
    same."""
    peaks = {line["case"]: line["peak_bytes"] for line in lines if "peak_bytes" in line}
    shares: dict[str, float] = {}
    for case in cases():
        if case.name in peaks:
            job = TrainingPlan(config_of(case, Path("/nowhere")))
            rows = job.rows()
            for place in job.places:
                planned = max(row.total for row in rows if row.place == place)
                measured = max(peaks[case.name][rank] for rank in place.ranks)
                shares[f"{case.name}, rank {place.ranks[0]}"] = measured / planned
    return shares


def drift(lines: Sequence[Mapping[str, Any]]) -> dict[int, float]:
    """By start of the ranks, the median ratio of its jobs' steps to other repeats of the same cases: a machine that
    others use changes over minutes. Median polish (Tukey 1977) of logarithms of steps."""
    logs = [(line["case"], line["start"], math.log(median(line["phases"]["step"]))) for line in lines]
    of_start = dict.fromkeys((start for _, start, _ in logs), 0.0)
    for _ in range(POLISHES):
        of_case = _medians((case, value - of_start[start]) for case, start, value in logs)
        of_start = _medians((start, value - of_case[case]) for case, start, value in logs)
    middle = median(of_start[start] for _, start, _ in logs)
    return {start: math.exp(value - middle) for start, value in of_start.items()}


def _medians(pairs: Iterable[tuple[Any, float]]) -> dict[Any, float]:
    grouped = defaultdict(list)
    for key, value in pairs:
        grouped[key].append(value)
    return {key: median(values) for key, values in grouped.items()}


def measurements(lines: Sequence[Mapping[str, Any]]) -> dict[str, tuple[Measured, float]]:
    """By case, the medians and the spread of the step, of the lines that have times."""
    repeats: dict[str, list[dict[str, float]]] = defaultdict(list)
    timed = [line for line in lines if "phases" in line]
    slower = drift(timed)
    for line in timed:
        repeats[line["case"]].append(
            {phase: median(seconds) / slower[line["start"]] for phase, seconds in line["phases"].items()}
        )
    measured_cases = {}
    for case in cases():
        if case.name in repeats:
            each = repeats[case.name]
            common = [phase for phase in each[0] if all(phase in it for it in each)]
            middle = {phase: median(it[phase] for it in each) for phase in common}
            steps = [it["step"] for it in each]
            job = TrainingPlan(config_of(case, Path("/nowhere")))
            measured = Measured(case.name, job, lengths_of(case), middle)
            measured_cases[case.name] = measured, (max(steps) - min(steps)) / middle["step"]
    return measured_cases


def lengths_of(case: Case) -> Lengths:
    """About those that were drawn: the generator's distribution."""
    drawn = [
        response_length(case.lengths, f"prompt {row}", sample)
        for row in range(PROMPTS * STEPS)
        for sample in range(SAMPLES)
    ]
    return Lengths.of_samples([PROMPT_LENGTH] * len(drawn), drawn)


def report(held_out: Sequence[Compared], machine: Machine, fitted_to: int) -> Iterator[str]:
    spread = median(it.spread for it in held_out)
    yield f"{machine.name}: {len(held_out)} cases, fitted to {fitted_to} others; spread of the repeats {spread:.1%}"
    steps = [abs(it.error) for it in held_out]
    yield f"  step          median error {median(steps):6.1%}, 90% below {quantile(steps, 0.9):6.1%}"
    errors: dict[str, list[float]] = defaultdict(list)
    for it in held_out:
        for name, error in it.phase_errors().items():
            errors[name].append(error)
    for name, values in errors.items():
        absolute = [abs(value) for value in values]
        yield (
            f"  {name:<14}median error {median(absolute):6.1%}, 90% below {quantile(absolute, 0.9):6.1%}, in the "
            f"middle {median(values):+.1%}, of {len(values)}; efficiency {machine.efficiency.get(name, 1.0):.2f}"
        )
    yield "  order of layouts, and the step of the one that is predicted to be fastest against the fastest measured:"
    groups: dict[str, list[Compared]] = defaultdict(list)
    for it in held_out:
        groups[f"{it.case.model} {it.case.algorithm} {it.case.lengths}"].append(it)
    for name, group in groups.items():
        if len(group) < 3:
            continue
        best = min(group, key=lambda it: it.step)
        chosen = min(group, key=lambda it: it.predicted.step)
        slowest = max(it.step for it in group) / best.step
        yield (
            f"  {name:<24}{len(group):>4} layouts, rank correlation {correlation(group):.2f}; "
            f"{chosen.step / best.step:.2f} ({chosen.case.layout}; fastest {best.case.layout}; slowest {slowest:.1f})"
        )


def correlation(group: Sequence[Compared]) -> float:
    """Spearman's, of predicted and measured steps."""
    places = [ranks([it.predicted.step for it in group]), ranks([it.step for it in group])]
    mean = (len(group) - 1) / 2
    above = sum((a - mean) * (b - mean) for a, b in zip(*places, strict=True))
    return above / math.sqrt(math.prod(sum((a - mean) ** 2 for a in place) for place in places))


def ranks(values: Sequence[float]) -> list[float]:
    """Equal values have the mean of their places."""
    return [
        (sum(other < value for other in values) + sum(other <= value for other in values) - 1) / 2 for value in values
    ]


def quantile(values: Sequence[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def describe(it: Compared) -> str:
    phases = ", ".join(
        f"{name} {it.predicted.phases.get(name, 0):.2f}/{took:.2f}" for name, took in it.measured.phases.items()
    )
    return f"  {it.error:+.0%} {it.case.name}: predicted/measured {it.predicted.step:.2f}/{it.step:.2f} s; {phases}"


def plot(held_out: Sequence[Compared], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(9, 4.4), layout="constrained")
    for axis, model in zip(axes, ("dense", "moe"), strict=True):
        group = [it for it in held_out if it.case.model == model]
        for algorithm, marker in (("grpo", "o"), ("ppo", "^")):
            for lengths, color in (("fixed", "tab:blue"), ("log-normal", "tab:orange")):
                shown = [it for it in group if (it.case.algorithm, it.case.lengths) == (algorithm, lengths)]
                steps = [it.step for it in shown], [it.predicted.step for it in shown]
                axis.scatter(*steps, marker=marker, s=18, color=color, alpha=0.7, label=f"{algorithm}, {lengths}")
        limits = [min(it.step for it in group) * 0.8, max(it.step for it in group) * 1.25]
        axis.plot(limits, limits, color="gray", linewidth=1)
        for factor in (0.85, 1.15):
            axis.plot(limits, [factor * limit for limit in limits], color="gray", linewidth=0.6, linestyle=":")
        axis.set(xscale="log", yscale="log", xlim=limits, ylim=limits, xlabel="measured, s per step", title=model)
    axes[0].set_ylabel("predicted, s per step")
    axes[0].legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
