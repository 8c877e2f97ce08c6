"""Signals that ask a job to save and stop, and Ctrl-C.

A Python signal handler runs only when the main thread returns from MPI, which may take forever, and must not call MPI.
So signals are blocked, a thread waits for them and reports them through the store, and rank 0 polls between phases.
"""

from __future__ import annotations

import _thread
import contextlib
import logging
import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

from hpcrl.runtime import exits
from hpcrl.runtime.launcher import is_first_launched
from hpcrl.sandbox.process_tree import STEP_SIGNALS, STOP_SIGNALS

if TYPE_CHECKING:
    from hpcrl.runtime.key_value_store import KeyValueStore

log = logging.getLogger(__name__)

KEY = "stop"  # the first signal that any rank has received
SAVES_KEY = "stop/saves"  # set once Ctrl-C saves
SECONDS_TO_END = 2.0  # for the main thread, which may be in a long computation
SAME_PRESS_SECONDS = 0.5  # the terminal and a launcher may both send the SIGINT of one Ctrl-C


class StopRequests:
    """Receives this rank's signals and reports them to rank 0.

    Make it in the main thread before other threads start, because they inherit the mask; importing numpy starts some.

    Ctrl-C (SIGINT) ends the job at once, with exit code 130, until `save_on_interrupt` is called. From then on it is a
    request like the other signals the first time, and ends the job at once the second time.
    """

    def __init__(self) -> None:
        is_ignored = signal.getsignal(signal.SIGINT) is signal.SIG_IGN  # in the background of a script
        self._signals = STEP_SIGNALS if is_ignored else STOP_SIGNALS
        self._lock = threading.Lock()
        self._rank = 0
        self._run_dir: Path | None = None
        self._store: KeyValueStore | None = None
        self._received: signal.Signals | None = None  # this rank's first signal
        self._interrupted_at: float | None = None  # monotonic time of the first Ctrl-C that is a request
        self._is_restored = False
        self._ends = threading.Event()
        self.block_signals()
        threading.Thread(target=self._wait_for_signals, name="signals", daemon=True).start()

    def block_signals(self) -> None:
        """Block the signals in this thread. Call it again after multiprocessing has started its server, which unblocks
        some."""
        signal.pthread_sigmask(signal.SIG_BLOCK, self._signals)

    def restore_signals(self) -> None:
        """Give the signals their default effects again, for a job that does not handle them. In the main thread."""
        with self._lock:
            self._is_restored = True
            signal.pthread_sigmask(signal.SIG_UNBLOCK, self._signals)
            if self._received is not None:
                signal.raise_signal(self._received)

    def enter_run(self, rank: int, run_dir: Path) -> None:
        """From now on this is `rank`, and exit.json is in `run_dir`."""
        self._rank, self._run_dir = rank, run_dir

    def connect(self, store: KeyValueStore) -> None:
        """Report signals to rank 0 through `store` from now on, including one that has arrived already."""
        with self._lock:
            self._store = store
            self._publish()

    def save_on_interrupt(self) -> None:
        """On rank 0, after `connect`: all ranks take the first Ctrl-C for a request from now on."""
        if self._store is not None:
            self._store.set(SAVES_KEY, "")

    def main_thread_ends(self) -> None:
        """The main thread ends the job, with or without an error: ignore Ctrl-C from now on."""
        self._ends.set()

    def found(self) -> str | None:
        """On rank 0: "SIGTERM on rank 3 (n1)" once a signal has arrived on any rank, otherwise None. Does not wait."""
        with self._lock:
            if self._received is not None or self._store is None:
                return self._text()
            return self._store.get(KEY)

    def _wait_for_signals(self) -> None:
        while True:
            number = signal.Signals(signal.sigwait(self._signals))
            if self._is_restored:
                signal.pthread_kill(threading.main_thread().ident or 0, number)
            elif number != signal.SIGINT or self._is_request():
                with self._lock:
                    self._received = self._received or number
                    self._publish()

    def _is_request(self) -> bool:
        """Whether this Ctrl-C asks to save and stop. Otherwise it ends the job, or has no effect."""
        if self._ends.is_set():
            return False
        now = time.monotonic()
        if self._interrupted_at is None and self._saves():
            self._interrupted_at = now
            if self._rank == 0:
                log.info("stopping after this phase, with a save; press Ctrl-C again to leave at once, without it")
            return True
        if self._interrupted_at is None or now - self._interrupted_at > SAME_PRESS_SECONDS:
            self._leave()
        return False

    def _saves(self) -> bool:
        with contextlib.suppress(RuntimeError):  # rank 0 has ended
            return self._store is not None and self._store.get(SAVES_KEY) is not None
        return False

    def _leave(self) -> None:
        """End the job by a KeyboardInterrupt in the main thread, or without it where that takes too long."""
        logging.disable()  # what the main thread does until then, or raises, is of no interest
        sys.unraisablehook = lambda _: None
        _thread.interrupt_main()
        if self._ends.wait(SECONDS_TO_END):
            return
        is_first = exits.write_exit(self._run_dir, exits.INTERRUPTED, self._rank, error="interrupted")
        if is_first and (self._run_dir is not None or is_first_launched(os.environ)):
            os.write(2, b"hpcrl: interrupted\n")
        exits.leave(exits.INTERRUPTED, has_reported=is_first)

    def _text(self) -> str | None:
        if self._received is None:
            return None
        return f"{self._received.name} on rank {self._rank} ({socket.gethostname()})"

    def _publish(self) -> None:
        text = self._text()
        if self._store is None or text is None:
            return
        with contextlib.suppress(RuntimeError):  # rank 0 has ended, and the job ends with it
            self._store.set(KEY, text)
