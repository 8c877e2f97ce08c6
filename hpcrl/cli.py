"""`hpcrl COMMAND ...`: subcommands, the one line that a bad command line gets, and nothing heavy until it is needed."""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, TypeVar

if TYPE_CHECKING:
    from hpcrl.config.derive import Derived, DerivedSft
    from hpcrl.config.schema import Config
    from hpcrl.launch.world import World

D = TypeVar("D", "Derived", "DerivedSft")

HELP = """\
usage: hpcrl COMMAND ...

  train CONFIG [key=value ...]   PPO, GRPO and relatives
  sft CONFIG [key=value ...]     supervised warm start
  check                          what is installed here, and what is wrong with it

CONFIG is a YAML file; key=value overrides one of its keys, as in actor.optim.lr=2e-6.
Run it on several ranks with mpiexec -n N python -m hpcrl ..., or with srun."""

# one of them is set on every rank: Hydra and Slurm's PMI, PMIx, Open MPI, srun
_RANK_VARIABLES = ("PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID")


def main(argv: Sequence[str] | None = None) -> NoReturn:
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments:
        _refuse(f"a command is missing; expected one of {', '.join(COMMANDS)}")
    name, *rest = arguments
    if name in ("-h", "--help", "help") or (name in ("train", "sft") and rest[:1] in (["-h"], ["--help"])):
        print(HELP)
        sys.exit(0)
    if name not in COMMANDS:
        nearest = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f"did you mean {nearest[0]}?" if nearest else f"expected one of {', '.join(COMMANDS)}"
        _refuse(f"unknown command {name!r}; {hint}")
    COMMANDS[name](rest)


def _run_job(name: str, job: Callable[[World, Config], int], arguments: list[str]) -> NoReturn:
    """Run `job` on all ranks with the config that rank 0 reads."""
    usage = f"hpcrl {name} CONFIG [key=value ...]"
    for argument in arguments:
        if argument.startswith("-"):
            _refuse(f"unknown option {argument!r}; {name} has none: {usage}")
    if not arguments:
        _refuse(f"{name} needs a YAML file: {usage}")
    path, *overrides = arguments
    if "=" in path and not Path(path).exists():
        _refuse(f"found the override {path!r} in place of a YAML file: {usage}")

    from hpcrl.launch.job import run_spmd

    run_spmd(partial(_load, path, overrides), job)


def _load(path: str, overrides: list[str]) -> Config:
    from hpcrl.config.loader import load_config

    return load_config(path, overrides)


def _train(world: World, config: Config) -> int:
    from hpcrl.algorithms.advantages import get_adv_estimator
    from hpcrl.algorithms.policy_loss import get_policy_loss
    from hpcrl.config import derive

    def derived() -> derive.Derived:
        get_policy_loss(config.actor.policy_loss.loss_mode)
        estimator = get_adv_estimator(config.algorithm.adv_estimator)
        return derive.check(
            config, world.size, needs_critic=estimator.needs_critic, needs_groups=estimator.needs_groups
        )

    found = _agreed(world, derived)
    from hpcrl.trainer import ppo

    return ppo.run(world, config, found)


def _sft(world: World, config: Config) -> int:
    from hpcrl.config import derive

    found = _agreed(world, lambda: derive.check_sft(config, world.size))
    from hpcrl.trainer import sft

    return sft.run(world, config, found)


def _agreed(world: World, derive: Callable[[], D]) -> D:
    """The derived values, printed once. An impossible job is refused before anything is built, by all ranks together."""
    from hpcrl.config.derive import describe
    from hpcrl.launch.exits import InputError, is_user_error

    try:
        derived = derive()
    except ValueError as error:
        if is_user_error(error):
            raise InputError(str(error), everywhere=True) from None
        raise
    if world.rank == 0:
        print(describe(derived), flush=True)
    return derived


def _check(arguments: list[str]) -> NoReturn:
    from hpcrl.launch import check

    sys.exit(check.main(arguments))


def _refuse(line: str) -> NoReturn:
    """End all ranks of a bad command line. The others leave with 0, so that no launcher kills rank 0 as it prints."""
    rank = next((os.environ[name] for name in _RANK_VARIABLES if name in os.environ), "0")
    if rank != "0":
        sys.exit(0)
    print(f"hpcrl: error: {line}", file=sys.stderr, flush=True)
    sys.exit(2)


COMMANDS: dict[str, Callable[[list[str]], NoReturn]] = {
    "train": partial(_run_job, "train", _train),
    "sft": partial(_run_job, "sft", _sft),
    "check": _check,
}
