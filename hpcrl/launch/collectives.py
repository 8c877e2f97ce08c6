"""Collectives of Python objects, by pickle. Ranks wait with back-off, as all do that outnumber their cores."""

from __future__ import annotations

import pickle
from array import array
from collections.abc import Callable
from itertools import accumulate
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
    blob = bytearray(pickle.dumps(obj)) if comm.rank == root else bytearray()
    size = array("q", [len(blob)])
    wait(comm.Ibcast(size, root))
    if comm.rank != root:
        blob = bytearray(size[0])
    wait(comm.Ibcast(blob, root))
    return obj if comm.rank == root else pickle.loads(blob)


def exchange(comm: MPI.Intracomm, obj: Any) -> list[Any]:
    """Every rank's `obj`, in rank order, on every rank, by pickle; waits with back-off."""
    blob = pickle.dumps(obj)
    sizes = array("q", [0] * comm.size)
    wait(comm.Iallgather(array("q", [len(blob)]), sizes))
    ends = list(accumulate(sizes))
    blobs = bytearray(ends[-1])
    wait(comm.Iallgatherv(blob, [blobs, sizes.tolist()]))
    return [pickle.loads(blobs[end - size : end]) for size, end in zip(sizes, ends, strict=True)]


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
        if not exits.is_user_error(error) or getattr(error, "everywhere", False):
            raise  # the latter by all ranks: `fn` has agreed on it, perhaps with ranks whose error is their own
        line = str(error)
    lines = [line for line in exchange(comm, line) if line is not None]
    if lines:
        raise InputError(lines[0], everywhere=True)
    return result
