"""How long each request of a batch may run, such that slow ones leave time for the others."""

from __future__ import annotations

LEAST_SECONDS = 600.0  # of a batch whose time is not given
PART = 0.25  # of the time that all of its requests would take if each of them timed out
RESERVED = 0.75  # of the time of a batch, for the shares of its requests
MAX_SECONDS = 1.0  # charged for the start of a process; the rank may have been away meanwhile


class TimeBudget:
    """The time of a batch: the requests of a pool that have no answer yet. Times are in seconds.

    Each request has a share, in proportion to its timeout, whatever the others do. It may take what is not reserved
    for the shares of others, up to its timeout, and returns what it did not use. Ends and starts of processes are
    charged too, but take nothing from the shares.
    """

    def __init__(self, seconds: float | None, num_workers: int, setting: str) -> None:
        """seconds: of a batch; None: LEAST_SECONDS, or a PART of all timeouts if that is more. The workers share it.
        setting: its name in the template."""
        self.setting = setting
        self._seconds = seconds
        self._num_workers = num_workers
        self._total = self._left = 0.0  # seconds of one worker
        self._share = 1.0  # of a request's timeout

    def renew(self, timeouts: float) -> None:
        """Begin the time of a batch again. timeouts: the sum of its requests' timeouts."""
        if self._seconds is None:
            self._total = max(LEAST_SECONDS * self._num_workers, PART * timeouts)
        else:
            self._total = self._seconds * self._num_workers
        self._left = self._total
        self._share = RESERVED * self._total / timeouts

    def take(self, timeout: float, others: float) -> float:
        """The limit of a request that begins. others: the sum of the timeouts of those that have not begun."""
        return self._take(min(timeout, max(self._share * timeout, self._left - self._share * others)))

    def left_for(self, timeout: float, others: float) -> float:
        """The limit of a request that would begin again, with an equal share for the others that wait for that."""
        return min(timeout, max(0.0, self._left) * timeout / (timeout + others))

    def take_again(self, timeout: float, others: float) -> float:
        """The limit of a request that begins again."""
        return self._take(self.left_for(timeout, others))

    def give_back(self, seconds: float) -> None:
        """Return what a request has left of its limit."""
        self._left = min(self._left + seconds, self._total)

    def charge(self, seconds: float) -> None:
        """Charge the start or the end of a process."""
        self._left -= min(seconds, MAX_SECONDS)

    def _take(self, limit: float) -> float:
        self._left -= limit
        return limit
