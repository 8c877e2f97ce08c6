"""`hpcrl plan --calibrate RUN... --machine NAME`: the machine's efficiencies by phase, fitted to runs."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path

from hpcrl.config.derive import JobDescription
from hpcrl.config.yaml_core import ConfigError
from hpcrl.forecast.time.calibrate import ASSUMED, Fitted, Measured, fit, fitted_machine, misses
from hpcrl.forecast.time.recorded import read_all
from hpcrl.machine.machine_file import Machine, check_target, read_machine, save

SHOWN = 10  # phases of runs that are predicted badly


def describe(job: JobDescription, path: str, others: Sequence[str], parsed: argparse.Namespace) -> list[str]:
    """The lines of the table, for the runs `path` and `others`. Raises ConfigError or InputError, one line."""
    if parsed.machine is None:
        raise ConfigError("found --calibrate without --machine; name the machine that the runs ran on")
    if parsed.out is not None:
        check_target(parsed.out, "--out")
    machine, measured = read_machine(parsed.machine), read_all([path, *others], job)
    found = fit(measured, machine)
    fitted = fitted_machine(machine, found)
    lines = [*table(found, measured, machine), "", *_misses(measured, fitted)]
    if parsed.out is not None:
        save(
            parsed.out,
            {**fitted.model_dump(mode="json"), "sources": sources(machine, measured), "name": Path(parsed.out).stem},
        )
        lines.append(f"  {'written':<22}{parsed.out}: {machine.name} with these efficiencies, for --machine")
    return lines


def table(found: Mapping[str, Fitted], measured: Sequence[Measured], machine: Machine) -> Iterator[str]:
    runs = len({it.run for it in measured})
    yield f"{machine.name}, fitted to {len(measured)} steps of {runs} {'run' if runs == 1 else 'runs'}"
    yield f"  {'phase':<26}{'efficiency':>12}{'of communication':>18}{'error':>8}{'runs':>6}"
    for name, it in found.items():
        error = f"{ASSUMED:.0%} *" if it.spread is None else f"{it.spread:.0%}"
        yield f"  {name:<26}{it.efficiency:>12.3f}{it.communication:>18.3f}{error:>8}{it.runs:>6}"
    if any(it.spread is None for it in found.values()):
        yield "  * of one run the error is not known: it is taken to be this"


def _misses(measured: Sequence[Measured], machine: Machine) -> Iterator[str]:
    found = list(misses(measured, machine))
    if not found:
        yield "  every phase of every run is within 25% of what the fitted machine predicts"
    for it in islice(found, SHOWN):
        yield f"  {it.phase} of {it.run} took {it.ratio:.2f} times the prediction: {it.cause}"
    if len(found) > SHOWN:
        yield f"  and {len(found) - SHOWN} more"


def sources(machine: Machine, measured: Sequence[Measured]) -> list[str]:
    runs = ", ".join(dict.fromkeys(Path(it.run).name for it in measured))
    return [*machine.sources, f"efficiency and spread: `hpcrl plan --calibrate` of {runs}"]
