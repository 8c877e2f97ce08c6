"""`hpcrl COMMAND ...`. Nothing heavy is imported until the command is known; a job is a file in hpcrl/jobs."""

from __future__ import annotations

import argparse
import ast
import difflib
import logging
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from hpcrl.runtime import exits
from hpcrl.runtime.exits import InputError

if TYPE_CHECKING:
    from hpcrl.config.derive import RoleLayouts
    from hpcrl.config.schema import Config
    from hpcrl.run.job import Job
    from hpcrl.runtime.world import World

JOBS_FOLDER = Path(__file__).parent / "jobs"


class Parser(argparse.ArgumentParser):
    """Prints one line for a bad command line, on one rank."""

    def error(self, message: str) -> NoReturn:
        refuse(f"{self.prog.split()[-1]}: {message}; {' '.join(self.format_usage().split())}")


def main(argv: Sequence[str] | None = None) -> NoReturn:
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments:
        refuse(f"a command is missing; expected one of {', '.join(commands())}")
    name, *rest = arguments
    if name in ("-h", "--help", "help"):
        print(help_text())
        sys.exit(0)
    if name in TOOLS:
        TOOLS[name][0](rest)
    elif name in job_names():
        run_job(name, rest)
    nearest = difflib.get_close_matches(name, commands(), n=1)
    hint = f"did you mean {nearest[0]}?" if nearest else f"expected one of {', '.join(commands())}"
    refuse(f"unknown command {name!r}; {hint}")


def job_names() -> list[str]:
    return sorted(path.stem for path in JOBS_FOLDER.glob("[!_]*.py"))


def commands() -> list[str]:
    return [*job_names(), *TOOLS]


def help_text() -> str:
    """Every command with one line: of a job, the docstring of its file, which is read without importing it."""
    lines = {}
    for name in job_names():
        tree = ast.parse((JOBS_FOLDER / f"{name}.py").read_text(encoding="utf-8"))
        lines[name] = (ast.get_docstring(tree) or "").split("\n")[0]
    lines |= {name: text for name, (_, text) in TOOLS.items()}
    width = max(map(len, lines))
    listed = "\n".join(f"  {name:<{width}}  {text}" for name, text in lines.items())
    return (
        f"usage: hpcrl COMMAND ...\n\n{listed}\n\n"
        "`hpcrl COMMAND --help` prints its arguments. CONFIG is a YAML file; key=value overrides one of its keys, as\n"
        "in actor.optim.lr=2e-6. Run a job on several ranks with mpiexec -n N python -m hpcrl ..., or with srun."
    )


def load_job(name: str) -> type[Job]:
    job: type[Job] = import_module(f"hpcrl.jobs.{name}").JOB
    return job


def run_job(name: str, arguments: list[str]) -> NoReturn:
    """Run a job on all ranks with the config that rank 0 reads."""
    from hpcrl.plan import dry_run

    if dry_run.requested(os.environ):
        dry_run.main(arguments, lambda: load_job(name).check)
    from hpcrl.runtime.job import run_spmd

    job = load_job(name)
    parser = Parser(prog=f"hpcrl {name}", description=job.__doc__)
    job.add_arguments(parser)
    parsed = parser.parse_intermixed_args(arguments)
    config = getattr(parsed, "config", "")
    if "=" in config and not Path(config).exists():
        parser.error(f"found the override {config!r} in place of a YAML file")

    def on_every_rank(world: World, config: Config) -> int:
        derived = print_derived(world, lambda: job.check_with_torch(config, world.size))
        if world.rank == 0:
            for line in job.without_effect(config):
                logging.getLogger("hpcrl").warning("%s", line)
        return job(world, config, derived, parsed).main()

    run_spmd(
        lambda: job.load(parsed),
        on_every_rank,
        handles_signals=job.handles_signals,
        memory_advice=partial(memory_advice, job),
    )


def memory_advice(
    job: type[Job], config: Config, num_ranks: int, rank: int, role: str | None, phase: str | None
) -> str:
    from hpcrl.plan.out_of_memory import advice

    if job.memory_advice:
        return f"to need less: {job.memory_advice}"
    return advice(config, num_ranks, rank, role, phase, job.own_specs())


def print_derived(world: World, compute: Callable[[], RoleLayouts]) -> RoleLayouts:
    """Check a job before anything is built. Every rank computes the same, so an error ends all of them together."""
    from hpcrl.config.derive import describe

    try:
        derived = compute()
    except ValueError as error:
        if exits.is_user_error(error):
            raise InputError(str(error), everywhere=True) from None
        raise
    if world.rank == 0:
        logging.getLogger("hpcrl").info("%s", describe(derived))
    return derived


def plan(arguments: list[str]) -> NoReturn:
    from hpcrl.plan import command

    command.main(arguments)


def check(arguments: list[str]) -> NoReturn:
    if arguments[:1] == ["--job"]:
        check_job(arguments[1:])
    from hpcrl.rollout.tensorrt_llm.signatures import findings
    from hpcrl.runtime import check

    check.main(arguments, findings)


def check_job(arguments: list[str]) -> NoReturn:
    from hpcrl.checkpoint.manifest import verify
    from hpcrl.runtime import check_job

    def folder() -> str:
        if not arguments:
            return ""
        from hpcrl.config.loader import load_config

        run = load_config(arguments[0], arguments[1:]).run
        return str(Path(run.dir, run.name))

    check_job.main(folder, partial(verify, with_links=True))


def submit(arguments: list[str]) -> NoReturn:
    from hpcrl.slurm import submit

    jobs = {name: job for name in job_names() if (job := load_job(name)).can_be_submitted}

    def check_on_login_node(command: str, config: Config, ranks: int) -> None:
        """Check what the job checks first; without torch, its own ranks check the rest."""
        job = jobs[command]
        if find_spec("torch") and find_spec("megatron"):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # megatron's, about what a login node lacks
                job.check_with_torch(job.prepare(config), ranks)
        else:
            job.check(config, ranks)

    submit.main(arguments, check_on_login_node, list(jobs))


def refuse(line: str) -> NoReturn:
    exits.exit_with_error(InputError(line))


TOOLS: dict[str, tuple[Callable[[list[str]], NoReturn], str]] = {
    "plan": (plan, "whether a training job fits its GPUs, and what it costs; needs neither MPI nor GPU"),
    "check": (check, "what is installed here, and what is wrong with it; with --job: the nodes of an allocation"),
    "submit": (submit, "a Slurm job, checked and with all it reads"),
}
