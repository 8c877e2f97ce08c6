"""When a job has to stop: signals on any rank, and the end of the allocation.

A Python signal handler runs only when the main thread returns from MPI, which may take forever, and must not call MPI.
So signals are blocked, a thread waits for them and reports them through the c10d store, and rank 0 polls between
phases.
"""

from __future__ import annotations

import signal
import socket
import subprocess
import threading
from collections.abc import Mapping
from datetime import datetime

from hpcrl.runtime.rendezvous import KeyValueStore
from hpcrl.sandbox.process_tree import STEP_SIGNALS

KEY = "stop"
SQUEUE_TIMEOUT = 20.0  # seconds, for a busy slurmctld


def block_signals() -> None:
    """Block a batch system's signals. Call it in the main thread before others start, because they inherit the mask."""
    signal.pthread_sigmask(signal.SIG_BLOCK, STEP_SIGNALS)


class StopRequests:
    """Receives this rank's signals and reports them to rank 0. Call `block_signals` before."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._lock = threading.Lock()
        self._store: KeyValueStore | None = None
        self._received: str | None = None  # this rank's first signal
        threading.Thread(target=self._wait_for_signals, name="signals", daemon=True).start()

    def connect(self, store: KeyValueStore) -> None:
        """Report signals to rank 0 through `store` from now on, including one that has arrived already."""
        with self._lock:
            self._store = store
            self._publish()

    def found(self) -> str | None:
        """On rank 0: "SIGTERM on rank 3 (n1)" once a signal has arrived on any rank, otherwise None. Does not wait."""
        with self._lock:
            return self._received if self._received is not None or self._store is None else self._store.get(KEY)

    def _wait_for_signals(self) -> None:
        while True:
            name = signal.Signals(signal.sigwait(STEP_SIGNALS)).name
            with self._lock:
                self._received = self._received or f"{name} on rank {self._rank} ({socket.gethostname()})"
                self._publish()

    def _publish(self) -> None:
        if self._store is None or self._received is None:
            return
        try:
            self._store.set(KEY, self._received)
        except RuntimeError:
            pass  # rank 0 has ended, and the job ends with it


def end_of_allocation(environ: Mapping[str, str]) -> float | None:
    """End of the allocation in seconds since the epoch, or None without a batch system.

    Reads HPCRL_END_TIME, which the templates export because compute nodes may lack squeue, then the variable of newer
    versions of Slurm. Otherwise starts squeue, so call it before MPI starts.
    """
    for name in ("HPCRL_END_TIME", "SLURM_JOB_END_TIME"):
        if environ.get(name, "").isdigit():
            return float(environ[name])
    return _ask_slurm(environ["SLURM_JOB_ID"]) if "SLURM_JOB_ID" in environ else None


def _ask_slurm(job: str) -> float | None:
    command = ["squeue", "--noheader", "--jobs", job, "--format", "%e"]
    try:
        output = subprocess.run(command, capture_output=True, text=True, timeout=SQUEUE_TIMEOUT).stdout.strip()
        return datetime.fromisoformat(output).timestamp()  # in the local time zone, as squeue prints it
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return None
