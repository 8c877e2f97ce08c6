"""Objects sent between ranks: non-blocking sends that are kept until they are out, receives that wait with back-off."""

from __future__ import annotations

import pickle
from collections import Counter, deque
from typing import TYPE_CHECKING, Any

from hpcrl.runtime.mpi import duplicate, wait, wait_all, wait_for_ranks

if TYPE_CHECKING:
    from mpi4py import MPI

TESTS_PER_SEND = 8


class Wire:
    """Messages on a communicator of their own, so that they cannot match those of other parts of the program."""

    def __init__(self, comm: MPI.Comm) -> None:
        self.comm: MPI.Intracomm = duplicate(comm)  # type: ignore[assignment]
        self.rank: int = comm.rank
        self.size: int = comm.size
        self.bytes_sent: Counter[int] = Counter()  # by tag
        self.bytes_received: Counter[int] = Counter()
        self._sends: deque[tuple[MPI.Request, Any]] = deque()

    def send(self, message: object, to: int, tag: int) -> int:
        """Start a send; its buffer is kept until the send has completed. Returns its bytes."""
        data = pickle.dumps(message, protocol=5)
        self._free_completed()
        self.bytes_sent[tag] += len(data)
        self._sends.append((self.comm.Isend(data, dest=to, tag=tag), data))
        return len(data)

    def receive(self, source: int | None, tag: int) -> Any:
        """Wait for the next message of `source` (None: of any rank) under `tag`.

        Messages are pickles: only ranks of this program send them.
        """
        found: list[bytearray] = []

        def arrived() -> bool:
            found.extend(self._received(source, tag))
            return bool(found)

        wait_for_ranks(arrived)
        return pickle.loads(found[0])

    def receive_if_there(self, source: int, tag: int) -> Any:
        """As `receive` if a message has arrived, otherwise None."""
        found = self._received(source, tag)
        return pickle.loads(found[0]) if found else None

    def _received(self, source: int | None, tag: int) -> list[bytearray]:
        """The next message, if one has arrived."""
        from mpi4py import MPI

        status = MPI.Status()
        message = self.comm.Improbe(source=MPI.ANY_SOURCE if source is None else source, tag=tag, status=status)
        if message is None:
            return []
        buffer = bytearray(status.Get_count(MPI.BYTE))
        wait(message.Irecv([buffer, MPI.BYTE]))
        self.bytes_received[tag] += len(buffer)
        return [buffer]

    def _free_completed(self) -> None:
        """Free buffers of completed sends. A call tests a few of them in turn, because a call for each of many ranks
        would otherwise test all sends to the ranks before."""
        for _ in range(min(len(self._sends), TESTS_PER_SEND)):
            request, held = self._sends.popleft()
            if not request.Test():
                self._sends.append((request, held))

    def flush(self) -> None:
        wait_all([request for request, _ in self._sends])
        self._sends.clear()

    def close(self) -> None:
        self.flush()
        self.comm.Free()
