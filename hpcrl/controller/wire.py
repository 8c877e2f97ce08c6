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

    def receive(self, source: int, tag: int) -> np.ndarray:
        """The next message of `source` under `tag`, as uint8."""
        from mpi4py import MPI

        status = MPI.Status()
        found: list[MPI.Message] = []

        def arrived() -> bool:
            message = self.comm.Improbe(source=source, tag=tag, status=status)
            if message is not None:
                found.append(message)
            return message is not None

        wait_for_ranks(arrived)
        return self._take(found[0], status, tag)

    def receive_if_there(self, source: int, tag: int) -> np.ndarray | None:
        """As `receive` when a message has arrived, else None."""
        from mpi4py import MPI

        status = MPI.Status()
        message = self.comm.Improbe(source=source, tag=tag, status=status)
        return None if message is None else self._take(message, status, tag)

    def receive_any(self, tag: int) -> np.ndarray:
        """The next message of any rank under `tag`."""
        from mpi4py import MPI

        return self.receive(MPI.ANY_SOURCE, tag)

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
