"""How long each request of a batch may run, such that slow ones leave time for the others."""

from __future__ import annotations

LEAST_SECONDS = 600.0  # of a batch whose time is not given
PART = 0.25  # of the time that all of its requests would take if each of them timed out


class TimeBudget:
    """The time of a batch: the requests of a pool that have no answer yet. Times are in seconds.

    Half of it is spent on whole timeouts, in the order of the requests. The other half is reserved: each request has a
    share of it, in proportion to its timeout, whatever the others do. A request returns what it did not use.
    """

    def __init__(self, seconds: float | None, num_workers: int, setting: str) -> None:
        """seconds: of a batch; None: LEAST_SECONDS, or a PART of all timeouts if that is more. The workers share it.
        setting: its name in the template."""
        self.setting = setting
        self._seconds = seconds
        self._num_workers = num_workers
        self._total = self._left = 0.0  # seconds of one worker
        self._share = 1.0  # of a request's timeout

    def renew(self, timeouts: float, taken: float) -> None:
        """Begin the time of a batch again. timeouts: the sum of its requests' timeouts. taken: the sum of the limits of
        those that run."""
        if self._seconds is None:
            self._total = max(LEAST_SECONDS * self._num_workers, PART * timeouts)
        else:
            self._total = self._seconds * self._num_workers
        self._left = self._total - taken
        self._share = self._total / (2 * timeouts)

    def take(self, timeout: float, others: float) -> float:
        """The limit of a request that begins. others: the sum of the timeouts of those that have not begun."""
        return self._take(min(timeout, max(self._share * timeout, self._left - self._share * others)))

    def left_for(self, timeout: float, others: float) -> float:
        """The limit of a request that would begin again, with an equal share for the others that wait for that."""
        return min(timeout, max(0.0, self._left) * timeout / (timeout + others))

    def take_again(self, timeout: float, others: float) -> float:
        return self._take(self.left_for(timeout, others))

    def give_back(self, seconds: float) -> None:
        """Return what a request has left of its limit."""
        self._left = min(self._left + seconds, self._total)

    def _take(self, limit: float) -> float:
        self._left -= limit
        return limit
