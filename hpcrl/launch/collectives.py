"""Collectives of Python objects, by pickle. Ranks wait with back-off, as all do that outnumber their cores."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from hpcrl.launch import exits
from hpcrl.launch.exits import InputError
from hpcrl.launch.waiting import wait

if TYPE_CHECKING:
    from mpi4py import MPI

T = TypeVar("T")


def barrier(comm: MPI.Intracomm) -> None:
    wait(comm.Ibarrier())


def broadcast(comm: MPI.Intracomm, obj: Any, root: int = 0) -> Any:
    """`obj` of rank `root` on every rank, by pickle; waits with back-off."""
    import numpy as np

    blob = np.frombuffer(pickle.dumps(obj), np.uint8) if comm.rank == root else None
    size = np.array([0 if blob is None else blob.size], np.int64)
    wait(comm.Ibcast(size, root))
    if blob is None:
        blob = np.empty(size[0], np.uint8)
    else:
        blob = blob.copy()  # frombuffer's view of bytes is read-only, which MPI's binding refuses for an in-out buffer
    wait(comm.Ibcast(blob, root))
    return obj if comm.rank == root else pickle.loads(blob.tobytes())


def exchange(comm: MPI.Intracomm, obj: Any) -> list[Any]:
    """Every rank's `obj`, in rank order, on every rank, by pickle; waits with back-off."""
    import numpy as np

    blob = np.frombuffer(pickle.dumps(obj), np.uint8)
    sizes = np.empty(comm.size, np.int64)
    wait(comm.Iallgather(np.array([blob.size], np.int64), sizes))
    blobs = np.empty(int(sizes.sum()), np.uint8)
    wait(comm.Iallgatherv(blob, [blobs, sizes]))
    ends = np.cumsum(sizes)
    return [pickle.loads(blobs[end - size : end].tobytes()) for size, end in zip(sizes, ends, strict=True)]


def together(comm: MPI.Intracomm, fn: Callable[[], T]) -> T:
    """Run `fn` on every rank and agree on how it went.

    A user error on any rank is raised on all of them with the same text (the lowest rank's), so that the job can end by
    exit code 2 without an abort. Any other exception is raised where it happened, which ends the job.
    """
    result: T
    line = None
    try:
        result = fn()
    except Exception as error:
        if not exits.is_user_error(error):
            raise
        line = str(error)
    lines = [line for line in exchange(comm, line) if line is not None]
    if lines:
        raise InputError(lines[0], everywhere=True)
    return result
