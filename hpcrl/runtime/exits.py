"""How a job ends: exit codes, the error for bad input, and exit.json, from which a batch script reads what happened."""

from __future__ import annotations

import argparse
import json
import os
import secrets
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

from hpcrl.runtime import run_owner
from hpcrl.runtime.launcher import is_first_launched, launched_rank
from hpcrl.sandbox import fork_server
from hpcrl.sandbox.foreign_files import printable, writable

DONE = 0
OTHER = 1
BAD_INPUT = 2
REQUEUE = 85
HANG = 86
CHECKSUM = 87
INTERRUPTED = 130

SECONDS_TO_REPORT = 1.0  # launchers drop output that is still in their pipes when the first rank exits


class InputError(Exception):
    """Bad input, in one line for each mistake: what was found, what was expected, what to do next.

    Each is shown as `hpcrl: error: <line>`; exit code 2, no traceback.

    Args:
        everywhere: all ranks raise this error, so that they can finalize MPI together.
    """

    user_error = True

    def __init__(self, *lines: str, everywhere: bool = False):
        super().__init__("\n".join(lines))
        self.lines = lines
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
def one_line_if_interrupted() -> Iterator[None]:
    """End the process with one line at Ctrl-C."""
    try:
        yield
    except KeyboardInterrupt:
        exit_with_line("hpcrl: interrupted", INTERRUPTED)


@contextmanager
def quiet_if_reader_leaves() -> Iterator[None]:
    """End the output without an error when its reader, such as `head`, has closed the pipe."""
    try:
        yield
    except BrokenPipeError:
        pass
    finally:
        try:
            print(end="", flush=True)  # here, because the interpreter's own flush at exit would show the error
        except BrokenPipeError:
            drop_output()


def drop_output() -> None:
    """Drop what is printed from now on, and what stdout still holds."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def exit_code(error: BaseException) -> int:
    """Exit code of a job that ends with this uncaught error."""
    if is_user_error(error):
        return BAD_INPUT
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED
    return int(getattr(error, "exit_code", OTHER))


def one_line(error: BaseException) -> str:
    """`hpcrl: error: <message>`, with line breaks folded into spaces; one such line for each mistake."""
    return "\n".join("hpcrl: error: " + printable(" ".join(line.split())) for line in lines_of(error))


def lines_of(error: BaseException) -> tuple[str, ...]:
    """The mistakes that a user error is about."""
    return getattr(error, "lines", None) or (str(error),)


def folded(error: BaseException) -> str:
    """Return an error's message with its white space collapsed, at most 160 characters."""
    return " ".join(str(error).split())[:160]


def summary(error: BaseException) -> str:
    """The text of an error in exit.json."""
    return writable(str(error) if is_user_error(error) else f"{type(error).__name__}: {error}")


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
        draft = target.with_name(f".exit.{secrets.token_hex(8)}")
        try:
            with open(draft, "x", encoding="utf-8") as file:
                file.write(json.dumps(record, indent=1) + "\n")
                file.flush()
                os.fsync(file.fileno())
            os.link(draft, target)  # unlike rename, link fails if another rank was first
            return True
        except FileExistsError:
            return False
        finally:
            draft.unlink(missing_ok=True)
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


def leave(code: int, *, has_reported: bool) -> NoReturn:
    """Exit without MPI, because the main thread may be in it. The launcher kills ranks that cannot exit.

    Args:
        has_reported: whether this is the rank that has printed the reason; the others wait longer.
    """
    if launched_rank(os.environ) is not None:
        time.sleep(SECONDS_TO_REPORT if has_reported else 2 * SECONDS_TO_REPORT)
    wait_before_kill()
    fork_server.remove_files()
    os._exit(code)


def exit_with_error(error: BaseException) -> NoReturn:
    """End a process that has not started MPI with one line and code 2."""
    exit_with_line(one_line(error), BAD_INPUT)


def exit_with_line(line: str, code: int) -> NoReturn:
    """End a process that has not started MPI: the first one prints the line, all exit with this code."""
    if is_first_launched(os.environ):
        print(line, file=sys.stderr, flush=True)
    else:
        time.sleep(0.5)  # a launcher may kill the first process as soon as another one has exited
    os._exit(code)
