"""How a job ends: exit codes, the error for bad input, and exit.json, from which a batch script reads what happened."""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

from hpcrl.runtime import run_owner
from hpcrl.runtime.launcher import is_first_launched

DONE = 0
OTHER = 1
BAD_INPUT = 2
REQUEUE = 85
HANG = 86
CHECKSUM = 87
INTERRUPTED = 130


class InputError(Exception):
    """Bad input, in one line: what was found, what was expected, what to do next.

    Shown as `hpcrl: error: <line>`; exit code 2, no traceback.
    `everywhere`: all ranks raise this error, so that they can finalize MPI together.
    """

    user_error = True

    def __init__(self, line: str, *, everywhere: bool = False):
        super().__init__(line)
        self.everywhere = everywhere


class ArgumentParser(argparse.ArgumentParser):
    """Ends the process with one line, on one rank, for a bad command line."""

    def error(self, message: str) -> NoReturn:
        """Exit with `<command>: <message>; <usage>`."""
        command = self.prog.removeprefix("hpcrl ").split()[0]
        exit_with_error(InputError(f"{command}: {message}; {' '.join(self.format_usage().split())}"))


def is_user_error(error: BaseException) -> bool:
    """Whether `error` is bad input. Error classes of layers that do not import this module have the attribute too."""
    return bool(getattr(error, "user_error", False))


@contextmanager
def one_line_for_user_errors() -> Iterator[None]:
    """End the process with one line for a user error inside; other errors are raised."""
    try:
        yield
    except Exception as error:
        if is_user_error(error):
            exit_with_error(error)
        raise


@contextmanager
def quiet_if_reader_leaves() -> Iterator[None]:
    """End the output without an error when its reader, such as `head`, has closed the pipe."""
    try:
        yield
    except BrokenPipeError:
        # The interpreter must not flush into the pipe at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def exit_code(error: BaseException) -> int:
    """Exit code of a job that ends with this uncaught error."""
    if is_user_error(error):
        return BAD_INPUT
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED
    return int(getattr(error, "exit_code", OTHER))


def one_line(error: BaseException) -> str:
    """`hpcrl: error: <message>`, with line breaks folded into spaces."""
    return "hpcrl: error: " + " ".join(str(error).split())


def summary(error: BaseException) -> str:
    """The text of an error in exit.json."""
    return str(error) if is_user_error(error) else f"{type(error).__name__}: {error}"


def write_exit(
    run_dir: str | os.PathLike[str] | None,
    code: int,
    rank: int | None = None,
    role: str | None = None,
    phase: str | None = None,
    error: str | None = None,
) -> bool:
    """Write exit.json atomically, and only if none exists: the first rank that fails is the cause. `start` in it, if
    there is one, is HPCRL_START of the batch script, by which the script finds its own.

    Returns whether this call wrote it. Returns True as well without a run directory, or if the file cannot be written,
    so that the caller still reports the error.
    """
    if run_dir is None:
        return True
    run_owner.check()
    record = {"code": code, "rank": rank, "role": role, "phase": phase, "error": error}
    if start := os.environ.get("HPCRL_START"):
        record["start"] = start
    target = Path(run_dir) / "exit.json"
    try:
        handle, draft = tempfile.mkstemp(prefix=".exit.", dir=run_dir)
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(json.dumps(record, indent=1) + "\n")
                file.flush()
                os.fsync(file.fileno())
            os.link(draft, target)  # unlike rename, link fails if another rank was first
            return True
        except FileExistsError:
            return False
        finally:
            os.unlink(draft)
    except OSError:
        return True


_before_kill: list[Callable[[], None]] = []


def before_kill(wait: Callable[[], None]) -> None:
    """Have this rank call `wait` when it ends the job with an error, after exit.json is written. It takes seconds at
    most."""
    _before_kill.append(wait)


def wait_before_kill() -> None:
    while _before_kill:
        _before_kill.pop()()


def exit_with_error(error: BaseException) -> NoReturn:
    """End a process that has not started MPI: the first one prints one line, all exit with code 2."""
    if is_first_launched(os.environ):
        print(one_line(error), file=sys.stderr, flush=True)
    else:
        time.sleep(0.5)  # a launcher may kill the first process as soon as another one has exited
    os._exit(BAD_INPUT)
