"""`--array key=a,b,c`: one element of a Slurm array, and one run, for each value."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence

from hpcrl.config.loader import quoted
from hpcrl.runtime.exits import InputError


def elements(arrays: Sequence[str], run_dir: str, run_name: str) -> list[list[str]]:
    """The overrides of every element: all combinations of the values, as runs `<run_dir>/<run_name>/<key=value>`,
    joined with '+'."""
    choices = list(itertools.product(*map(_axis, arrays)))
    folder = f"run.dir={quoted(f'{run_dir}/{run_name}')}"
    return [
        [*choice, folder, f"run.name={quoted(name)}"] for choice, name in zip(choices, _names(choices), strict=True)
    ]


def _names(choices: Sequence[Sequence[str]]) -> list[str]:
    """A folder's name for each choice. Containers' mounts are lists with ',' and ':', so no name has these."""
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
