"""Messages between ranks: non-blocking sends that are kept until they are out, receives that wait with back-off."""

from __future__ import annotations

import pickle
from collections import Counter
from typing import TYPE_CHECKING, Any

import numpy as np

from hpcrl.runtime.mpi import duplicate, wait, wait_all, wait_for_ranks

if TYPE_CHECKING:
    from mpi4py import MPI


class Wire:
    """Messages on a communicator of their own, so that they cannot match those of other parts of the program."""

    def __init__(self, comm: MPI.Comm) -> None:
        self.comm: MPI.Intracomm = duplicate(comm)  # type: ignore[assignment]
        self.rank: int = comm.rank
        self.size: int = comm.size
        self.bytes_sent: Counter[int] = Counter()  # by tag
        self.bytes_received: Counter[int] = Counter()
        self._sends: list[tuple[MPI.Request, Any]] = []

    def send(self, data: bytes | np.ndarray, to: int, tag: int) -> None:
        """Start a send; its buffer is kept until the send has completed."""
        self._sends = [(request, held) for request, held in self._sends if not request.Test()]
        self.bytes_sent[tag] += len(data)
        self._sends.append((self.comm.Isend(data, dest=to, tag=tag), data))

    def receive(self, source: int | None, tag: int) -> np.ndarray:
        """Wait for the next message of `source` (None: of any rank) under `tag`; returns it as uint8."""
        found: list[tuple[MPI.Message, MPI.Status]] = []

        def arrived() -> bool:
            found.extend(self._probe(source, tag))
            return bool(found)

        wait_for_ranks(arrived)
        return self._take(*found[0], tag)

    def receive_if_there(self, source: int, tag: int) -> np.ndarray | None:
        """As `receive` if a message has arrived, otherwise None."""
        found = self._probe(source, tag)
        return self._take(*found[0], tag) if found else None

    def _probe(self, source: int | None, tag: int) -> list[tuple[MPI.Message, MPI.Status]]:
        """The next message, which then is no longer in MPI's queue, if one has arrived."""
        from mpi4py import MPI

        status = MPI.Status()
        message = self.comm.Improbe(source=MPI.ANY_SOURCE if source is None else source, tag=tag, status=status)
        return [] if message is None else [(message, status)]

    def _take(self, message: MPI.Message, status: MPI.Status, tag: int) -> np.ndarray:
        from mpi4py import MPI

        buffer = np.empty(status.Get_count(MPI.BYTE), dtype=np.uint8)
        wait(message.Irecv([buffer, MPI.BYTE]))
        self.bytes_received[tag] += len(buffer)
        return buffer

    def flush(self) -> None:
        wait_all([request for request, _ in self._sends])
        self._sends.clear()

    def close(self) -> None:
        self.flush()
        self.comm.Free()


def encode(message: object) -> bytes:
    return pickle.dumps(message, protocol=5)


def decode(data: np.ndarray) -> Any:
    """Unpickle a message. Only for messages of this program's own ranks, never for files."""
    return pickle.loads(data.data)
