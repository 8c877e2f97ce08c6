"""Requests to stop: a signal on any rank, noticed by a thread at once and told to rank 0 on a board, not by MPI.

A handler of Python's runs only when the main thread comes back from MPI, which may be never, and an operation of MPI
inside one is not allowed. So signals are blocked, a thread waits for them, and rank 0 asks between two phases.
"""

from __future__ import annotations

import signal
import socket
import threading

from hpcrl.launch import family
from hpcrl.launch.board import Board

KEY = "stop"


def block_signals() -> None:
    """In the main thread, before there is another: each thread inherits the mask of the one that starts it."""
    signal.pthread_sigmask(signal.SIG_BLOCK, family.STEP_SIGNALS)


class StopRequests:
    """One per rank; `block_signals` comes before it."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._lock = threading.Lock()
        self._board: Board | None = None
        self._here: str | None = None  # what this rank was sent
        threading.Thread(target=self._listen, name="signals", daemon=True).start()

    def connect(self, board: Board) -> None:
        """From now on rank 0 hears of it."""
        with self._lock:
            self._board = board
            self._tell()

    def found(self) -> str | None:
        """On rank 0: "SIGTERM on rank 3 (n1)" once any rank was sent one. Does not wait."""
        with self._lock:
            return self._here if self._here is not None or self._board is None else self._board.look(KEY)

    def _listen(self) -> None:
        while True:
            name = signal.Signals(signal.sigwait(family.STEP_SIGNALS)).name
            with self._lock:
                self._here = self._here or f"{name} on rank {self._rank} ({socket.gethostname()})"
                self._tell()

    def _tell(self) -> None:
        if self._board is None or self._here is None:
            return
        try:
            self._board.post(KEY, self._here)
        except RuntimeError:
            pass  # rank 0 has gone, and with it the job
