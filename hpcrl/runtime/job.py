"""The one way a job runs: children's server, MPI, config from rank 0, run directory, logs, torch, main, and an end."""

from __future__ import annotations

import faulthandler
import logging
import os
import shutil
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, Protocol, TypeVar

from hpcrl.runtime import exits, rank_status, watchdog
from hpcrl.runtime.exits import InputError
from hpcrl.runtime.mpi import broadcast_object
from hpcrl.runtime.rank_status import RankStatus
from hpcrl.runtime.stop import StopRequests, block_signals, end_of_allocation
from hpcrl.runtime.world import (
    World,
    abort,
    finish,
    set_deterministic_libraries,
    set_torch_precision,
    start_mpi,
    start_torch,
)
from hpcrl.sandbox import fork_server

if TYPE_CHECKING:
    from mpi4py import MPI


class RunSection(Protocol):
    @property
    def name(self) -> str: ...
    @property
    def dir(self) -> str: ...
    @property
    def c10d_backend(self) -> str: ...
    @property
    def full_determinism(self) -> bool: ...
    @property
    def nccl_timeout(self) -> int: ...
    @property
    def memory_snapshot(self) -> bool: ...
    @property
    def cpu_bind(self) -> bool: ...
    @property
    def watchdog(self) -> watchdog.Patience: ...


class JobConfig(Protocol):
    """What a job needs of its configuration; hpcrl.config.schema.Config has it."""

    @property
    def run(self) -> RunSection: ...


C = TypeVar("C", bound=JobConfig)
# Of a config, the number of ranks, a rank, its role and its phase.
Advice = Callable[[C, int, int, str | None, str | None], str]


def run_spmd(
    load: Callable[[], C],
    main: Callable[[World, C], int],
    *,
    handles_signals: bool = False,
    memory_advice: Advice[C] | None = None,
) -> NoReturn:
    """Run a job on every rank that the launcher started, and end the process with the job's exit code.

    Args:
        load: makes the configuration; runs on rank 0 alone, so that a template is read, and refused, once.
        main: the job on every rank; returns the exit code. When ranks disagree the highest counts.
        handles_signals: `main` asks `world.stop` whether a signal has come, and ends of its own accord; without it
            SIGTERM and SIGUSR1 kill.
        memory_advice: what to add to the error of a rank whose GPU has not enough memory for a phase.

    A user error that all ranks share ends the job by agreement; anything else that main raises ends it by MPI_Abort,
    with the rank, its role and phase (world.status) and the traceback on the terminal and in exit.json.
    """
    if handles_signals:
        block_signals()
    ends_at = end_of_allocation(os.environ) if exits.is_first_launched(os.environ) else None
    os.umask(0o077)  # a run directory holds data and weights; children inherit it
    fork_server.start()
    if handles_signals:
        block_signals()  # again: multiprocessing has unblocked SIGTERM
    try:
        comm = start_mpi()
    except InputError as error:
        exits.exit_with_error(error)
    run_dir = None
    status = RankStatus(phase="start")
    try:
        config = load_once(comm, load)
        run_dir = run_directory(config)
        start_logging(run_dir, comm.rank)
        set_deterministic_libraries(config.run.full_determinism)
        watchdog.start(run_dir, comm.rank, comm.size, status, config.run.watchdog)
        world = start_torch(
            comm,
            config.run.c10d_backend,
            with_tensorrt_llm=asks_for_tensorrt_llm(config),
            needs_bfloat16="bfloat16" in getattr(config, "dtypes", ()),
            cpu_bind=config.run.cpu_bind,
            nccl_timeout=config.run.nccl_timeout,
            stop=StopRequests(comm.rank) if handles_signals else None,
            ends_at=broadcast_object(comm, ends_at),
            status=status,
        )
        take_terminal_from_torch()
        set_torch_precision(config.run.full_determinism)
        from hpcrl.runtime import accelerator, platform  # import torch

        if config.run.memory_snapshot:
            accelerator.record_memory_history(world.device)
        platform.import_megatron()
        code = max(world.all_gather_object(main(world, config)))
        status.role, status.phase = None, "end"
    except BaseException as error:
        if getattr(error, "everywhere", False):
            if comm.rank == 0:
                exits.write_exit(run_dir, exits.BAD_INPUT, error=exits.summary(error))
                print(exits.one_line(error), file=sys.stderr)
            finish(exits.BAD_INPUT)
        if run_dir is not None and "torch" in sys.modules:
            error = _with_memory(error, config, run_dir, comm, status, memory_advice)
        abort(error, run_dir=run_dir, rank=comm.rank, role=status.role, phase=status.phase)
    if comm.rank == 0:
        exits.write_exit(run_dir, code)
    finish(code)


def load_once(comm: MPI.Intracomm, load: Callable[[], C]) -> C:
    """rank 0's configuration on every rank, with its run directory made. A user error is raised on all ranks."""
    config, line = None, None
    if comm.rank == 0:
        try:
            config = load()
            make_run_directory(run_directory(config))
        except Exception as error:
            if not exits.is_user_error(error):
                raise
            line = str(error)
    config, line = broadcast_object(comm, (config, line))
    if line is not None:
        raise InputError(line, everywhere=True)
    return config


def _with_memory(
    error: BaseException,
    config: C,
    run_dir: Path,
    comm: MPI.Intracomm,
    here: RankStatus,
    advice: Advice[C] | None,
) -> BaseException:
    """`error`, explained where it is that of a GPU without enough memory."""
    snapshot = run_dir / "logs" / f"oom_rank_{comm.rank:05d}.pickle" if config.run.memory_snapshot else None
    place = config, comm.size, comm.rank, here.role, here.phase
    try:
        from hpcrl.runtime import accelerator  # import torch

        if not accelerator.is_out_of_memory(error):
            return error
        advice_here = partial(advice, *place) if advice is not None else str
        return accelerator.explained(error, comm.rank, here, advice_here, snapshot)
    except Exception:  # the job has to end with the first error, whatever state torch is in
        logging.getLogger("hpcrl").exception("rank %d cannot explain its error", comm.rank)
        return error


def asks_for_tensorrt_llm(config: object) -> bool:
    """Jobs without generation have no such section."""
    return getattr(getattr(config, "rollout", None), "engine", None) == "tensorrt_llm"


def run_directory(config: JobConfig) -> Path:
    """<run.dir>/<run.name>, absolute: a rank may change its working directory later."""
    return Path(os.path.abspath(os.path.join(config.run.dir, config.run.name)))


def make_run_directory(path: Path) -> None:
    """Make it, for the user's eyes alone: it will hold data and weights."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        exits.clear_exit(path)
        shutil.rmtree(path / rank_status.FOLDER, ignore_errors=True)  # of an earlier attempt
    except OSError as error:
        why = f"cannot make the run directory {path}: {error.strerror}; change run.dir or run.name"
        raise InputError(why) from error


class TerminalFormatter(logging.Formatter):
    """`12:30:05 message`, with the level in front of the message only where it is not INFO."""

    def format(self, record: logging.LogRecord) -> str:
        level = "" if record.levelno == logging.INFO else f"{record.levelname.lower()}: "
        return f"{self.formatTime(record, '%H:%M:%S')} {level}{super().format(record)}"


def start_logging(run_dir: str | os.PathLike[str], rank: int) -> None:
    """Log to `<run_dir>/logs/rank_%05d.log`, Python's warnings too; rank 0 shows hpcrl's own lines on stdout."""
    folder = Path(run_dir) / "logs"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    file = logging.FileHandler(folder / f"rank_{rank:05d}.log", encoding="utf-8")
    file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.root.addHandler(file)
    logging.root.setLevel(logging.INFO)
    logging.captureWarnings(True)
    if rank == 0:
        terminal = logging.StreamHandler(sys.stdout)
        terminal.setFormatter(TerminalFormatter())
        logging.getLogger("hpcrl").addHandler(terminal)
    faulthandler.enable()  # a crash in a library shows its Python stack on stderr


def take_terminal_from_torch() -> None:
    """torch hangs handlers of its own on its loggers; N ranks' worth of its warnings belong into the files."""
    for name, logger in logging.root.manager.loggerDict.items():
        if isinstance(logger, logging.Logger) and name.split(".")[0] == "torch":
            logger.handlers = [handler for handler in logger.handlers if isinstance(handler, logging.FileHandler)]
            logger.propagate = True
