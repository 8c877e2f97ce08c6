# PYTHON_ARGCOMPLETE_OK
"""`hpcrl COMMAND ...`. A job is a file in hpcrl/jobs, or a user's. Nothing heavy is imported until it is known."""

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

import hpcrl
from hpcrl.runtime import exits
from hpcrl.runtime.exits import ArgumentParser, InputError
from hpcrl.sandbox.foreign_files import take_any_text

if TYPE_CHECKING:
    from hpcrl.config.derive import JobDescription, RoleLayouts
    from hpcrl.config.schema import Config
    from hpcrl.run.job import Job
    from hpcrl.runtime.stop_requests import StopRequests
    from hpcrl.runtime.world import World

JOBS_FOLDER = Path(__file__).parent / "jobs"
RUN_USAGE = "hpcrl run [JOB.py] CONFIG [key=value ...]"


def main(argv: Sequence[str] | None = None) -> NoReturn:
    take_any_text()
    with exits.one_line_if_interrupted(), exits.quiet_if_reader_leaves():
        dispatch(list(sys.argv[1:] if argv is None else argv))
    sys.exit(exits.DONE)  # the reader has left


def dispatch(arguments: list[str]) -> NoReturn:
    if "_ARGCOMPLETE" in os.environ:
        complete()
    if not arguments:
        fail(f"a command is missing; expected one of {', '.join(commands())}")
    name, *rest = arguments
    if name in ("-h", "--help", "help"):
        print(help_text())
        sys.exit(exits.DONE)
    if name == "--version":
        print(f"hpcrl {hpcrl.__version__}")
        sys.exit(exits.DONE)
    if name in TOOLS:
        TOOLS[name][0](rest)
    elif name in job_names():
        run_job(name, rest)
    nearest = difflib.get_close_matches(name, commands(), n=1)
    hint = f"did you mean {nearest[0]}?" if nearest else f"expected one of {', '.join(commands())}"
    fail(f"unknown command {name!r}; {hint}")


def job_names() -> list[str]:
    return sorted(path.stem for path in JOBS_FOLDER.glob("[!_]*.py"))


def commands() -> list[str]:
    return [*job_names(), *TOOLS]


def help_text() -> str:
    """The commands with one line each: of a job, the docstring of its file, which is read without importing it."""
    lines = {}
    for name in job_names():
        tree = ast.parse((JOBS_FOLDER / f"{name}.py").read_text(encoding="utf-8"))
        lines[name] = (ast.get_docstring(tree) or "").split("\n")[0]
    lines |= {name: text for name, (_, text) in TOOLS.items()}
    width = max(map(len, lines))
    listed = "\n".join(f"  {name:<{width}}  {text}" for name, text in lines.items())
    return (
        f"usage: hpcrl COMMAND ...\n       hpcrl --version\n\n{listed}\n\n"
        "`hpcrl COMMAND --help` prints its arguments. CONFIG is a YAML file; key=value overrides one of its keys, as\n"
        "in actor.optim.lr=2e-6. Run a job on several ranks with mpiexec -n N python -m hpcrl ..., or with srun.\n"
        'Completion in bash: eval "$(register-python-argcomplete hpcrl)".'
    )


def complete() -> None:
    """Answer the shell, which asks for completions: commands, their options, files."""
    import argcomplete

    parser = argparse.ArgumentParser(prog="hpcrl")  # incomplete lines are errors, which argcomplete catches
    subparsers = parser.add_subparsers()
    for name in commands():
        subparser = subparsers.add_parser(name)
        if name in job_names():
            load_job(name).add_arguments(subparser)
        else:
            subparser.add_argument("arguments", nargs="*")
    argcomplete.autocomplete(parser)


def load_job(name: str) -> type[Job]:
    """The class of a built-in job, or of the job in a user's file. InputError, one line, for a file without a job."""
    if not name.endswith(".py"):
        built_in: type[Job] = import_module(f"hpcrl.jobs.{name}").JOB
        return built_in
    from hpcrl.run.job import Job
    from hpcrl.runtime.user_code import import_file

    try:
        job = getattr(import_file(name), "JOB", None)
    except Exception as error:
        raise InputError(f"{name} cannot be loaded: {type(error).__name__}: {error}") from error
    if not (isinstance(job, type) and issubclass(job, Job)):
        raise InputError(f"{name} names no job; end it with JOB = MyJob, a subclass of hpcrl.api.TrainingJob")
    job.file = name
    return job


def run_file(arguments: list[str]) -> NoReturn:
    """`hpcrl run`: a job of the user's own. The file is named here, or by run.job_file of a resolved config."""
    if not arguments or arguments[0] in ("-h", "--help"):
        from hpcrl.run.job import Job

        parser = ArgumentParser(prog="hpcrl run [JOB.py]", description="Run the job in a Python file of your own.")
        Job.add_arguments(parser)
        parser.parse_args(arguments)
    if arguments[0].endswith(".py"):
        run_job(arguments[0], arguments[1:])
    from hpcrl.config.loader import job_file

    with exits.one_line_for_user_errors():
        file = job_file(arguments[0], arguments[1:])
    if file is None:
        fail(f"{arguments[0]} has no run.job_file, so it does not say which job it is for; use {RUN_USAGE}")
    run_job(file, arguments)


def run_job(name: str, arguments: list[str]) -> NoReturn:
    """Run a job on all ranks with the config that rank 0 reads."""
    from hpcrl.forecast import dry_run

    if dry_run.requested(os.environ):
        dry_run.main(arguments, lambda: load_job(name))
    from hpcrl.runtime.stop_requests import StopRequests

    stop = StopRequests()  # before anything that starts threads is imported
    is_file = name.endswith(".py")
    try:
        job = load_job(name)
    except InputError as error:
        exits.exit_with_error(error)
    parser = ArgumentParser(prog=f"hpcrl run {name}" if is_file else f"hpcrl {name}", description=job.__doc__)
    job.add_arguments(parser)
    parsed = parser.parse_intermixed_args(arguments)
    config = getattr(parsed, "config", "")
    if "=" in config and not Path(config).exists():
        parser.error(f"found the override {config!r} in place of a YAML file")
    if not job.handles_signals:
        stop.restore_signals()
    with exits.one_line_for_user_errors():
        if job.run_without_ranks(parsed):
            sys.exit(exits.DONE)
    run_on_ranks(job, parsed, stop if job.handles_signals else None)


def run_on_ranks(job: type[Job], parsed: argparse.Namespace, stop: StopRequests | None = None) -> NoReturn:
    """Run a job whose command line is parsed.

    Args:
        stop: for a job that handles signals.
    """
    from hpcrl.runtime.job import run_spmd

    job.schema()

    def on_every_rank(world: World, config: Config) -> int:
        derived = print_derived(world, lambda: job.check_with_torch(config, world.size))
        if world.rank == 0:
            for line in job.without_effect(config):
                logging.getLogger("hpcrl").warning("%s", line)
        return job(world, config, derived, parsed).main()

    run_spmd(
        lambda: job.load(parsed),
        on_every_rank,
        stop=stop,
        prepare_folder=lambda config: job.prepare_folder(config, parsed),
        memory_advice=partial(memory_advice, job),
    )


def memory_advice(
    job: type[Job], config: Config, num_ranks: int, rank: int, role: str | None, phase: str | None
) -> str:
    from hpcrl.forecast.memory.fixes import advice

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
            raise InputError(*exits.lines_of(error), everywhere=True) from None
        raise
    if world.rank == 0:
        logging.getLogger("hpcrl").info("%s", describe(derived))
    return derived


def plan(arguments: list[str]) -> NoReturn:
    from hpcrl.forecast import command

    command.main(arguments, load_job)


def check(arguments: list[str]) -> NoReturn:
    from hpcrl.machine import check

    parser = ArgumentParser(prog="hpcrl check", description=TOOLS["check"][1])
    parser.add_argument("--trtllm", action="store_true", help="whether TensorRT-LLM can be used here; collective")
    parser.add_argument("--job", action="store_true", help="the nodes and links of this allocation; collective")
    parser.add_argument("--machine", metavar="OUT.yaml", help="with --job: measure the machine, and write its file")
    rounds = "of --machine, a few seconds each, of which the best count (3)"
    parser.add_argument("--rounds", metavar="N", type=int, default=3, help=rounds)
    parser.add_argument("config", metavar="CONFIG", nargs="?", help="with --job: YAML file of the run to check, too")
    parser.add_argument("overrides", metavar="key=value", nargs="*", help="override a key")
    parsed = parser.parse_intermixed_args(arguments)
    if parsed.rounds < 1:
        parser.error(f"found --rounds {parsed.rounds}; expected at least 1")
    if parsed.config and not parsed.job:
        parser.error(f"found {parsed.config!r}, which only --job reads")
    if parsed.machine and not parsed.job:
        parser.error("found --machine, which needs --job")
    if parsed.job:
        check_job(parsed.config, parsed.overrides, parsed.machine, parsed.rounds)
    from hpcrl.rollout.engines.tensorrt_llm.signatures import findings

    check.main(findings if parsed.trtllm else None)


def check_job(config: str | None, overrides: list[str], machine: str | None, rounds: int) -> NoReturn:
    from hpcrl.engine.checkpoint.manifest import verify
    from hpcrl.machine import check_job

    save_machine = None
    if machine:
        from hpcrl.machine import machine_file

        save_machine = partial(machine_file.save_machine, machine)

    def job() -> tuple[str, str]:
        if machine:
            machine_file.check_target(machine)
        if config is None:
            return "", "mpi_host"
        run = load_job("train").read_config(config, overrides).run
        return str(Path(run.dir, run.name)), run.c10d_backend

    check_job.main(job, partial(verify, with_links=True), save_machine, rounds)


def submit(arguments: list[str]) -> NoReturn:
    from hpcrl.config.plugins import load_plugins
    from hpcrl.slurm import submit

    def check_on_login_node(job: JobDescription, config: Config, ranks: int) -> None:
        """Check what the job checks first; torch, which takes seconds to import, only for losses of plugins."""
        load_plugins(config)  # they may register what `check` looks up
        if config.run.plugins and find_spec("torch") and find_spec("megatron"):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # megatron's, about what a login node lacks
                job.check_with_torch(job.prepare(config), ranks)
        else:
            job.check(job.prepare(config), ranks)

    can_be_submitted = [name for name in job_names() if load_job(name).can_be_submitted]
    submit.main(arguments, load_job, check_on_login_node, can_be_submitted)


def init(arguments: list[str]) -> NoReturn:
    from hpcrl.config import start_folder

    start_folder.main(arguments, TOOLS["init"][1])


def data(arguments: list[str]) -> NoReturn:
    from hpcrl.data import command

    command.main(arguments, load_job)


def from_verl(arguments: list[str]) -> NoReturn:
    from hpcrl.config import from_verl

    from_verl.main(arguments)


def status(arguments: list[str]) -> NoReturn:
    from hpcrl.slurm import status

    status.main(arguments)


def samples(arguments: list[str]) -> NoReturn:
    from hpcrl.observe.report import samples_command

    samples_command.main(arguments)


def report(arguments: list[str]) -> NoReturn:
    from hpcrl.observe.report import page

    page.report_main(arguments)


def trace(arguments: list[str]) -> NoReturn:
    from hpcrl.observe.trace import command

    command.main(arguments)


def replay(arguments: list[str]) -> NoReturn:
    from hpcrl.run import replay

    parser = ArgumentParser(prog="hpcrl replay", description=TOOLS["replay"][1])
    replay.add_arguments(parser)
    parsed = parser.parse_intermixed_args(arguments)
    with exits.one_line_for_user_errors():
        name = replay.job_of(Path(parsed.run), parsed.overrides)
        if not name.endswith(".py") and name not in job_names():
            fail(f"{parsed.run} is a run of `hpcrl {name}`, which this version does not have")
        job = replay.replayed(load_job(name))
    run_on_ranks(job, parsed)


def fail(line: str) -> NoReturn:
    exits.exit_with_error(InputError(line))


TOOLS: dict[str, tuple[Callable[[list[str]], NoReturn], str]] = {
    "init": (init, "a folder to start from: templates, a reward function, and what to run next"),
    "run": (run_file, "a job in a Python file of your own"),
    "plan": (plan, "whether a training job fits its GPUs, and what it costs; needs neither MPI nor GPU"),
    "check": (check, "what is installed here, and what is wrong with it; with --job: the nodes of an allocation"),
    "data": (data, "datasets in verl's schema from downloaded files, their duplicates, and which tokens are trained"),
    "from-verl": (from_verl, "a job template from a command of verl, and what became of each of its keys"),
    "submit": (submit, "a Slurm job or a chain of them, checked and with all they read"),
    "status": (status, "the state of a run and its chain, or of several runs; --watch repeats it"),
    "samples": (samples, "prompts and responses of a run: the worst, the best, by text, or of two runs"),
    "report": (report, "runs as one HTML page: curves, times, slices, warnings, samples; needs neither torch nor MPI"),
    "trace": (trace, "what every rank did in a step, as a file for Perfetto"),
    "replay": (replay, "a recorded step of a run again, here: whether its numbers are those that the run logged"),
}
