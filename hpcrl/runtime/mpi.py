"""Waiting on MPI without spinning: ranks outnumber cores, so a rank that waits must leave its core to the others."""

from __future__ import annotations

import os
import pickle
import time
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any, TypeVar

from hpcrl.runtime import exits
from hpcrl.runtime.exits import InputError

if TYPE_CHECKING:
    from mpi4py import MPI

C = TypeVar("C", bound="MPI.Comm")

# Measured, 1 KB all-reduce of 4 ranks on 2 cores: 24 us with 300 to 2,000 yielding tests before the first sleep, but
# 2,800 us with 60: a rank that sleeps too early delays every round of the others. 1,000 tests cost 0.6 ms of CPU.
_EAGER_TESTS = 1000
_FIRST_PAUSE = 20e-6  # seconds
_LAST_PAUSE = 1e-3  # seconds


@dataclass
class WaitTime:
    """How long the main thread has waited for other ranks. What a GPU waits for inside NCCL's kernels is not seen.

    seconds: of the waits that have ended. since: when the wait under way began, on `time.perf_counter`, None outside
    waits.
    """

    seconds: float = 0.0
    since: float | None = None


# Of this process. Waits happen below torch.distributed and MPI, where nothing of the program's own can be passed.
waited = WaitTime()


def wait_until(ready: Callable[[], bool], eager_tests: int = _EAGER_TESTS) -> None:
    """Call `ready` until it is true: first yielding the core in between, then with pauses that grow from 20 us to 1 ms.

    `ready` should make progress itself (MPI_Test does): nothing else does while this rank sleeps.
    """
    for _ in range(eager_tests):
        if ready():
            return
        os.sched_yield()
    pause = _FIRST_PAUSE
    while not ready():
        time.sleep(pause)
        pause = min(2 * pause, _LAST_PAUSE)


def wait_for_ranks(ready: Callable[[], bool], eager_tests: int = _EAGER_TESTS) -> None:
    """As `wait_until`, for what other ranks do: it counts in `waited`, once where `ready` itself waits for others."""
    if ready():
        return
    if waited.since is not None:
        return wait_until(ready, eager_tests)
    waited.since = began = time.perf_counter()
    try:
        wait_until(ready, eager_tests)
    finally:
        waited.since = None
        waited.seconds += time.perf_counter() - began


def wait(request: MPI.Request, status: MPI.Status | None = None) -> None:
    """Complete `request`. `status`, when given, is filled. Raises MPI.Exception when the operation failed."""
    wait_for_ranks(lambda: request.Test(status))


def wait_all(requests: Iterable[MPI.Request]) -> None:
    """Complete every request. One after the other: each test makes progress on all of them."""
    for request in requests:
        wait(request)


def duplicate(comm: C) -> C:
    """A communicator of the same ranks whose messages never meet those of `comm`. Collective over `comm`."""
    copy, request = comm.Idup()
    wait(request)
    return copy


def create_group(comm: MPI.Intracomm, ranks: Sequence[int], tag: int = 0) -> MPI.Intracomm:
    """Communicator of `ranks` of `comm`, in that order. Collective over them alone.

    `tag` tells apart what overlapping sets of ranks make at the same time; nobody else may send under it meanwhile.
    """
    _meet(comm, ranks, tag)
    everyone = comm.Get_group()
    members = everyone.Incl(ranks)
    made = comm.Create_group(members, tag=tag)
    members.Free()
    everyone.Free()
    return made


def _meet(comm: MPI.Intracomm, ranks: Sequence[int], tag: int) -> None:
    """Wait with back-off until all `ranks` are here (dissemination barrier): Create_group itself would spin."""
    from mpi4py import MPI

    nothing = [bytearray(), 0, MPI.BYTE]
    place, distance = ranks.index(comm.rank), 1
    while distance < len(ranks):
        ahead, behind = ranks[(place + distance) % len(ranks)], ranks[(place - distance) % len(ranks)]
        wait_all([comm.Isend(nothing, dest=ahead, tag=tag), comm.Irecv(nothing, source=behind, tag=tag)])
        distance *= 2


T = TypeVar("T")


def barrier(comm: MPI.Intracomm) -> None:
    wait(comm.Ibarrier())


def broadcast_object(comm: MPI.Intracomm, obj: Any, root: int = 0) -> Any:
    """`obj` of rank `root` on every rank, by pickle; waits with back-off."""
    blob = bytearray(pickle.dumps(obj)) if comm.rank == root else bytearray()
    size = array("q", [len(blob)])
    wait(comm.Ibcast(size, root))
    if comm.rank != root:
        blob = bytearray(size[0])
    wait(comm.Ibcast(blob, root))
    return obj if comm.rank == root else pickle.loads(blob)


def all_gather_object(comm: MPI.Intracomm, obj: Any) -> list[Any]:
    """Every rank's `obj`, in rank order, on every rank, by pickle; waits with back-off."""
    blob = pickle.dumps(obj)
    sizes = array("q", [0] * comm.size)
    wait(comm.Iallgather(array("q", [len(blob)]), sizes))
    ends = list(accumulate(sizes))
    blobs = bytearray(ends[-1])
    wait(comm.Iallgatherv(blob, [blobs, sizes.tolist()]))
    return [pickle.loads(blobs[end - size : end]) for size, end in zip(sizes, ends, strict=True)]


def run_collectively(comm: MPI.Intracomm, fn: Callable[[], T]) -> T:
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
    lines = [line for line in all_gather_object(comm, line) if line is not None]
    if lines:
        raise InputError(lines[0], everywhere=True)
    return result
