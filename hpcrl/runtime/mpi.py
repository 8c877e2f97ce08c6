"""MPI calls that wait with back-off, and collectives of Python objects.

Ranks may outnumber cores, so a rank that waits must leave its core to the others.
"""

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
from hpcrl.runtime.spans import spans

if TYPE_CHECKING:
    from mpi4py import MPI


C = TypeVar("C", bound="MPI.Comm")
T = TypeVar("T")

_FIRST_PAUSE = 20e-6  # seconds


@dataclass
class BackOff:
    """How a rank waits: tests that yield the core before the first sleep, and seconds of the longest sleep."""

    # Measured, 1 KB all-reduce of 4 ranks on 2 cores: 24 us with 300 to 2,000 yielding tests before the first sleep,
    # but 2,800 us with 60: a rank that sleeps too early delays every round of the others. 1,000 tests cost 0.6 ms of
    # CPU.
    eager_tests: int = 1000
    last_pause: float = 1e-3


@dataclass
class WaitTime:
    """How long the main thread has waited for other ranks. Waits inside NCCL's kernels are not measured.

    seconds: total of the waits that have ended. since: start of the current wait on `time.perf_counter`, None outside
    waits. cpu_seconds: CPU time of the tests in the waits that have ended.
    """

    seconds: float = 0.0
    since: float | None = None
    cpu_seconds: float = 0.0


# Of this process: waits happen below torch.distributed and MPI, to which no object of ours can be passed.
back_off = BackOff()
wait_time = WaitTime()


def wait_until(ready: Callable[[], bool], eager_tests: int | None = None) -> None:
    """Call `ready` until it returns True: first yielding the core in between, then sleeping for 20 us up to 1 ms.

    `ready` must make progress itself, as MPI_Test does: nothing else makes progress while this rank sleeps.

    Args:
        eager_tests: by default those of `back_off`.
    """
    for _ in range(back_off.eager_tests if eager_tests is None else eager_tests):
        if ready():
            return
        os.sched_yield()
    pause = _FIRST_PAUSE
    while not ready():
        time.sleep(pause)
        pause = min(2 * pause, back_off.last_pause)


def wait_for_ranks(ready: Callable[[], bool], eager_tests: int | None = None) -> None:
    """As `wait_until`, and count the time in `wait_time` and in the trace. Nested calls count once."""
    if ready():
        return
    if wait_time.since is not None:
        return wait_until(ready, eager_tests)
    wait_time.since = began = time.perf_counter()
    cpu_began = time.thread_time()
    spans.begin_wait(began)
    try:
        wait_until(ready, eager_tests)
    finally:
        ended = time.perf_counter()
        wait_time.since = None
        wait_time.seconds += ended - began
        wait_time.cpu_seconds += time.thread_time() - cpu_began
        spans.end_wait(ended)


def wait(request: MPI.Request, status: MPI.Status | None = None) -> None:
    """Complete `request`, and fill `status` if given. Raises MPI.Exception if the operation failed."""
    wait_for_ranks(lambda: request.Test(status))


def wait_all(requests: Iterable[MPI.Request]) -> None:
    """Complete every request. They are waited for in turn, because each test makes progress on all of them."""
    for request in requests:
        wait(request)


def duplicate(comm: C) -> C:
    """Duplicate a communicator: messages of the copy never match those of `comm`. Collective over `comm`."""
    copy, request = comm.Idup()
    wait(request)
    return copy


def create_group(comm: MPI.Intracomm, ranks: Sequence[int], tag: int = 0) -> MPI.Intracomm:
    """Create a communicator of `ranks` of `comm`, in that order. Collective over these ranks only.

    `tag` distinguishes groups that overlapping sets of ranks create at the same time. No other message on `comm` may
    have this tag meanwhile.
    """
    _meet(comm, ranks, tag)
    everyone = comm.Get_group()
    members = everyone.Incl(ranks)
    group = comm.Create_group(members, tag=tag)
    members.Free()
    everyone.Free()
    return group


def _meet(comm: MPI.Intracomm, ranks: Sequence[int], tag: int) -> None:
    """Wait without spinning until all `ranks` are here (dissemination barrier), because Create_group spins."""
    from mpi4py import MPI

    nothing = [bytearray(), 0, MPI.BYTE]
    place, distance = ranks.index(comm.rank), 1
    while distance < len(ranks):
        ahead, behind = ranks[(place + distance) % len(ranks)], ranks[(place - distance) % len(ranks)]
        wait_all([comm.Isend(nothing, dest=ahead, tag=tag), comm.Irecv(nothing, source=behind, tag=tag)])
        distance *= 2


def barrier(comm: MPI.Intracomm) -> None:
    """Wait until all ranks of `comm` have called it."""
    wait(comm.Ibarrier())


def broadcast_object(comm: MPI.Intracomm, obj: Any, root: int = 0) -> Any:
    """Return rank `root`'s `obj` on every rank. Collective; uses pickle. None takes one message less."""
    blob = bytearray(pickle.dumps(obj, 5)) if comm.rank == root and obj is not None else bytearray()
    size = array("q", [len(blob)])
    wait(comm.Ibcast(size, root))
    if not size[0]:
        return None
    if comm.rank != root:
        blob = bytearray(size[0])
    wait(comm.Ibcast(blob, root))
    return obj if comm.rank == root else pickle.loads(blob)


def all_gather_object(comm: MPI.Intracomm, obj: Any) -> list[Any]:
    """Return every rank's `obj`, in rank order, on every rank. Collective; uses pickle."""
    blob = pickle.dumps(obj)
    sizes = array("q", [0] * comm.size)
    wait(comm.Iallgather(array("q", [len(blob)]), sizes))
    ends = list(accumulate(sizes))
    blobs = bytearray(ends[-1])
    wait(comm.Iallgatherv(blob, [blobs, sizes.tolist()]))
    return [pickle.loads(blobs[end - size : end]) for size, end in zip(sizes, ends, strict=True)]


def run_collectively(comm: MPI.Intracomm, fn: Callable[[], T]) -> T:
    """Run `fn` on every rank. A user error on any rank is raised on all of them. Collective.

    All ranks raise InputError with the text of the lowest rank that failed, so the job can end with exit code 2 without
    MPI_Abort. Any other exception is raised on its own rank only, and ends the job.
    """
    result: T
    wrong: tuple[str, ...] = ()
    try:
        result = fn()
    except Exception as error:
        if not exits.is_user_error(error) or getattr(error, "everywhere", False):
            raise  # if everywhere, `fn` is collective itself and has raised on all ranks already
        wrong = exits.lines_of(error)
    first = next(filter(None, all_gather_object(comm, wrong)), None)
    if first:
        raise InputError(*first, everywhere=True)
    return result
