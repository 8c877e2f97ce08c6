"""How a job ends: exit codes, the error that is the user's to mend, and exit.json, which tells a template the truth."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

DONE = 0
OTHER = 1
BAD_INPUT = 2
REQUEUE = 85
HANG = 86
CHECKSUM = 87
INTERRUPTED = 130


class InputError(Exception):
    """Bad input, in one line that says found, expected, what to do next.

    Shown as `hpcrl: error: <line>`; exit code 2, no traceback.
    `everywhere` is True when all ranks are known to have raised it, so that they can leave MPI together.
    """

    user_error = True

    def __init__(self, line: str, *, everywhere: bool = False):
        super().__init__(line)
        self.everywhere = everywhere


def is_user_error(error: BaseException) -> bool:
    """Layers below `launch` have error classes of their own; the attribute is what they share."""
    return bool(getattr(error, "user_error", False))


def exit_code(error: BaseException) -> int:
    """The code that a job ends with when `error` was raised and nobody caught it."""
    if is_user_error(error):
        return BAD_INPUT
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED
    return int(getattr(error, "exit_code", OTHER))


def one_line(error: BaseException) -> str:
    """`hpcrl: error: <line>`, line breaks of the message folded into spaces."""
    return "hpcrl: error: " + " ".join(str(error).split())


def summary(error: BaseException) -> str:
    """What exit.json says of an error."""
    return str(error) if is_user_error(error) else f"{type(error).__name__}: {error}"


def write_exit(
    run_dir: str | os.PathLike[str] | None,
    code: int,
    rank: int | None = None,
    role: str | None = None,
    phase: str | None = None,
    error: str | None = None,
) -> bool:
    """Write exit.json at once or not at all, and only where none exists: the first rank that fails is the cause.

    Returns whether this call wrote it; True as well when there is no run directory or it cannot be written, so that the
    caller still reports what happened.
    """
    if run_dir is None:
        return True
    record = {"code": code, "rank": rank, "role": role, "phase": phase, "error": error}
    target = Path(run_dir) / "exit.json"
    try:
        handle, draft = tempfile.mkstemp(prefix=".exit.", dir=run_dir)
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(json.dumps(record, indent=1) + "\n")
                file.flush()
                os.fsync(file.fileno())
            os.link(draft, target)  # unlike rename, link refuses when another rank was first
            return True
        except FileExistsError:
            return False
        finally:
            os.unlink(draft)
    except OSError:
        return True


def clear_exit(run_dir: str | os.PathLike[str]) -> None:
    """Take away the exit.json of an earlier attempt of the same run."""
    (Path(run_dir) / "exit.json").unlink(missing_ok=True)


def is_first_launched(environ: Mapping[str, str]) -> bool:
    """Whether this process is the first of those started together, where MPI cannot tell: it alone prints."""
    return launched_rank(environ) in (None, "0")


def launched_rank(environ: Mapping[str, str]) -> str | None:
    """Its rank, as the launcher has it; None without a launcher."""
    for name in ("PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID"):
        if name in environ:
            return environ[name]
    return None


def exit_with_error(error: BaseException) -> NoReturn:
    """End without MPI (a wrong command line, MPI unusable): one line from one process, exit code 2 from all."""
    if is_first_launched(os.environ):
        print(one_line(error), file=sys.stderr, flush=True)
    else:
        time.sleep(0.5)  # a launcher may kill the first as soon as another has left
    os._exit(BAD_INPUT)
