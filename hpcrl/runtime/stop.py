"""Requests to stop: a signal on any rank, noticed by a thread at once and told to rank 0 on a board, not by MPI.

A handler of Python's runs only when the main thread comes back from MPI, which may be never, and an operation of MPI
inside one is not allowed. So signals are blocked, a thread waits for them, and rank 0 asks between two phases.
"""

from __future__ import annotations

import signal
import socket
import subprocess
import threading
from collections.abc import Mapping
from datetime import datetime

from hpcrl.runtime.rendezvous import KeyValueStore
from hpcrl.sandbox import process_tree

KEY = "stop"


def block_signals() -> None:
    """In the main thread, before there is another: each thread inherits the mask of the one that starts it."""
    signal.pthread_sigmask(signal.SIG_BLOCK, process_tree.STEP_SIGNALS)


class StopRequests:
    """One per rank; `block_signals` comes before it."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._lock = threading.Lock()
        self._store: KeyValueStore | None = None
        self._here: str | None = None  # what this rank was sent
        threading.Thread(target=self._listen, name="signals", daemon=True).start()

    def connect(self, store: KeyValueStore) -> None:
        """From now on rank 0 hears of it."""
        with self._lock:
            self._store = store
            self._tell()

    def found(self) -> str | None:
        """On rank 0: "SIGTERM on rank 3 (n1)" once any rank was sent one. Does not wait."""
        with self._lock:
            return self._here if self._here is not None or self._store is None else self._store.get(KEY)

    def _listen(self) -> None:
        while True:
            name = signal.Signals(signal.sigwait(process_tree.STEP_SIGNALS)).name
            with self._lock:
                self._here = self._here or f"{name} on rank {self._rank} ({socket.gethostname()})"
                self._tell()

    def _tell(self) -> None:
        if self._store is None or self._here is None:
            return
        try:
            self._store.set(KEY, self._here)
        except RuntimeError:
            pass  # rank 0 has gone, and with it the job


PATIENCE = 20.0  # seconds for a busy slurmctld to answer


def end_of_allocation(environ: Mapping[str, str]) -> float | None:
    """Seconds since the epoch; None where no batch system says. May start a process, so it is for before MPI.

    HPCRL_END_TIME is what the templates export, because compute nodes may lack squeue; newer versions of Slurm have a
    variable of their own.
    """
    for name in ("HPCRL_END_TIME", "SLURM_JOB_END_TIME"):
        if environ.get(name, "").isdigit():
            return float(environ[name])
    return _ask_slurm(environ["SLURM_JOB_ID"]) if "SLURM_JOB_ID" in environ else None


def _ask_slurm(job: str) -> float | None:
    command = ["squeue", "--noheader", "--jobs", job, "--format", "%e"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE).stdout.strip()
        return datetime.fromisoformat(said).timestamp()  # of this machine's time zone, as squeue's own
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return None
