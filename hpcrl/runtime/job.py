"""The entry of every job: start MPI, load the config on rank 0, start logs, watchdog and torch, run main, and end."""

from __future__ import annotations

import faulthandler
import gc
import logging
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from multiprocessing import util
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TextIO, TypeVar

from hpcrl.runtime import exits, rank_status, run_owner, watchdog
from hpcrl.runtime.events import prepare as prepare_events
from hpcrl.runtime.exits import InputError
from hpcrl.runtime.launcher import end_of_allocation, is_first_launched
from hpcrl.runtime.mpi import broadcast_object, run_collectively
from hpcrl.runtime.rank_status import RankStatus
from hpcrl.runtime.run_folder import GROUP_READABLE, PRIVATE, cannot_make, make_directory, open_to_group
from hpcrl.runtime.stop_requests import StopRequests
from hpcrl.runtime.world import (
    World,
    abort,
    finish,
    finish_with_error,
    set_deterministic_libraries,
    set_torch_precision,
    start_mpi,
    start_torch,
)
from hpcrl.sandbox import fork_server
from hpcrl.sandbox.foreign_files import ERRORS, printable

if TYPE_CHECKING:
    from mpi4py import MPI


log = logging.getLogger(__name__)

C = TypeVar("C", bound=Any)  # hpcrl.config.schema.Config, a layer above: its section `run` is read here
# (config, number of ranks, rank, role, phase) -> text
Advice = Callable[[C, int, int, str | None, str | None], str]


def run_spmd(
    load: Callable[[], C],
    main: Callable[[World, C], int],
    *,
    stop: StopRequests | None = None,
    prepare_folder: Callable[[C], None] = lambda config: None,
    memory_advice: Advice[C] | None = None,
) -> NoReturn:
    """Run a job on every rank that the launcher started, and end the process with the job's exit code.

    A user error that all ranks raise ends the job with exit code 2. Any other exception ends it by MPI_Abort, with the
    rank, its role and phase (`world.status`) and the traceback on the terminal and in exit.json.

    Args:
        load: makes the configuration. Runs on rank 0 only, so that a template is read, and its error reported, once.
        main: the job on every rank; returns the exit code. The highest code of all ranks counts.
        stop: for a job whose `main` polls `world.stop` and ends when a signal has arrived. Otherwise SIGTERM and
            SIGUSR1 kill. The commands of `job.on_event` are for such jobs.
        prepare_folder: makes what the run directory has to hold before the start. Runs on rank 0 only, once this job
            owns the directory.
        memory_advice: returns what to add to the error of a rank whose GPU is out of memory.
    """
    gc.disable()  # importing torch and megatron-core leaves no garbage, and collections take a fifth of its time
    ends_at = end_of_allocation(os.environ) if is_first_launched(os.environ) else None
    os.umask(PRIVATE)  # a run directory holds data and weights; child processes inherit the mask
    removed = fork_server.start()
    fork_server.set_compiler_cache()
    tempfile.tempdir = util.get_temp_dir()  # of the rank: wandb, which megatron imports, leaves folders in it
    if stop is not None:
        stop.block_signals()  # again: multiprocessing unblocks SIGTERM and SIGINT
    try:
        comm = start_mpi()
    except InputError as error:
        exits.exit_with_error(error)
    run_dir = None
    status = RankStatus(phase="start")
    try:
        config = load_once(comm, load, prepare_folder)
        run_dir = run_directory(config)
        if stop is not None:
            stop.enter_run(comm.rank, run_dir)
        world = _start_world(comm, config, run_dir, stop, ends_at, status)
        for folder in removed:
            log.info("removed %s: the temporary files of processes that were killed", folder)
        gc.freeze()  # later collections need not walk over what stays loaded
        gc.enable()
        code = max(world.all_gather_object(main(world, config)))
        status.role, status.phase = None, "end"
        if stop is not None:
            stop.main_thread_ends()
    except BaseException as error:
        if stop is not None:
            stop.main_thread_ends()
        if getattr(error, "everywhere", False):
            finish_with_error(error, comm.rank, run_dir)
        if run_dir is not None and "torch" in sys.modules:
            error = _explain_out_of_memory(error, config, run_dir, comm, status, memory_advice)
        abort(error, run_dir=run_dir, rank=comm.rank, role=status.role, phase=status.phase)
    if comm.rank == 0:
        exits.write_exit(run_dir, code)
        world.events.close(code)
    finish(code)


def _start_world(
    comm: MPI.Intracomm,
    config: Any,
    run_dir: Path,
    stop: StopRequests | None,
    ends_at: float | None,
    status: RankStatus,
) -> World:
    """Start logs, events and the watchdog of a rank, then torch and megatron. Collective."""
    start_logging(run_dir, comm.rank)
    set_deterministic_libraries(config.run.full_determinism)
    commands = getattr(getattr(config, "job", None), "on_event", ()) if stop is not None else ()
    events = prepare_events(run_dir, comm.rank, commands)
    watchdog.start(run_dir, comm.rank, comm.size, status, config.run.watchdog)
    engine = getattr(config, "engine", None)  # of a job that generates
    world = start_torch(
        comm,
        config.run.c10d_backend,
        first=getattr(engine, "start", None),
        expandable_segments=getattr(engine, "expandable_segments", True),
        needs_bfloat16="bfloat16" in getattr(config, "dtypes", ()),
        cpu_bind=config.run.cpu_bind,
        nccl_timeout=config.run.nccl_timeout,
        stop=stop,
        ends_at=broadcast_object(comm, ends_at),
        status=status,
    )
    remove_torch_log_handlers()
    set_torch_precision(config.run.full_determinism)
    from hpcrl.runtime import accelerator, platform  # import torch

    if config.run.memory_snapshot:
        accelerator.record_memory_history(world.device)
    platform.import_megatron()
    return replace(world, events=events)


def load_once(comm: MPI.Intracomm, load: Callable[[], C], prepare_folder: Callable[[C], None]) -> C:
    """Load the configuration and take the run directory on rank 0, and return the configuration on every rank.

    A user error is raised on all ranks. Collective.
    """

    def load_and_take() -> tuple[C, int] | None:
        if comm.rank != 0:
            return None
        config = load()
        set_umask(config)
        number = take_run_directory(config)
        prepare_folder(config)
        return config, number

    loaded: tuple[C, int] = broadcast_object(comm, run_collectively(comm, load_and_take))
    config, number = loaded
    set_umask(config)
    if comm.rank != 0:
        run_owner.hold(run_directory(config), number, config.run.owner_heartbeat_seconds, comm.rank)
    return config


def set_umask(config: Any) -> None:
    if config.run.group_readable:
        fork_server.set_umask(GROUP_READABLE)


def _explain_out_of_memory(
    error: BaseException, config: C, run_dir: Path, comm: MPI.Intracomm, here: RankStatus, advice: Advice[C] | None
) -> BaseException:
    """`error`, with an explanation if it says that a GPU is out of memory."""
    snapshot = run_dir / "logs" / f"oom_rank_{comm.rank:05d}.pickle" if config.run.memory_snapshot else None
    place = config, comm.size, comm.rank, here.role, here.phase
    try:
        from hpcrl.runtime import accelerator  # import torch

        if not accelerator.is_out_of_memory(error):
            return error
        advice_here = partial(advice, *place) if advice is not None else str
        return accelerator.explain_out_of_memory(error, comm.rank, here, advice_here, snapshot)
    except Exception:  # the job must end with the first error, whatever the state of torch
        logging.getLogger("hpcrl").exception("rank %d failed to explain its error", comm.rank)
        return error


def run_directory(config: Any) -> Path:
    """`<run.dir>/<run.name>` as an absolute path, because a rank may change its working directory later."""
    return Path(os.path.abspath(os.path.join(config.run.dir, config.run.name)))


def take_run_directory(config: Any) -> int:
    """Make the run directory, become its owner, and remove exit.json and heartbeats of an earlier attempt. Returns the
    owner's number."""
    path = run_directory(config)
    make_directory(path, is_shared=False)
    try:
        number = run_owner.take(path, config.run.owner_heartbeat_seconds)
        if config.run.group_readable:
            open_to_group(path)
        (path / "exit.json").unlink(missing_ok=True)
        shutil.rmtree(path / rank_status.FOLDER, ignore_errors=True)
        return number
    except OSError as error:
        raise cannot_make(path, error) from error


class TerminalHandler(logging.StreamHandler[TextIO]):
    """Prints to stdout. When its reader, such as `tee`, has ended, the job continues without."""

    def handleError(self, record: logging.LogRecord) -> None:
        if isinstance(sys.exc_info()[1], BrokenPipeError):
            exits.drop_output()
        else:
            super().handleError(record)


class PrintableFormatter(logging.Formatter):
    """Messages may hold text of other processes, of models and of files."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))


class TerminalFormatter(PrintableFormatter):
    """`12:30:05 message`, with the level before the message unless it is INFO. A record's `coloured`, which holds no
    such text, is preferred to its message."""

    def format(self, record: logging.LogRecord) -> str:
        level = "" if record.levelno == logging.INFO else f"{record.levelname.lower()}: "
        text = getattr(record, "coloured", None) or super().format(record)
        return f"{self.formatTime(record, '%H:%M:%S')} {level}{text}"


def start_logging(run_dir: str | os.PathLike[str], rank: int) -> None:
    """Log everything, including warnings, to `<run_dir>/logs/rank_%05d.log`; rank 0 also prints hpcrl's lines."""
    folder = Path(run_dir) / "logs"
    folder.mkdir(parents=True, exist_ok=True)
    file = logging.FileHandler(folder / f"rank_{rank:05d}.log", encoding="utf-8", errors=ERRORS)
    file.setFormatter(PrintableFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.root.addHandler(file)
    logging.root.setLevel(logging.INFO)
    logging.captureWarnings(True)
    if rank == 0:
        terminal = TerminalHandler(sys.stdout)
        terminal.setFormatter(TerminalFormatter())
        logging.getLogger("hpcrl").addHandler(terminal)
    faulthandler.enable()  # a crash in a library shows its Python stack on stderr


def remove_torch_log_handlers() -> None:
    """Remove the stream handlers of torch's loggers, so that its warnings go to the ranks' log files only."""
    for name, logger in logging.root.manager.loggerDict.items():
        if isinstance(logger, logging.Logger) and name.split(".")[0] == "torch":
            logger.handlers = [handler for handler in logger.handlers if isinstance(handler, logging.FileHandler)]
            logger.propagate = True
