"""Token buckets: requests and tokens per minute, for functions that ask a service."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class TokenBucket:
    """Fills at `rate` per second up to what comes in one second, and is full at first (as verl's)."""

    rate: float
    level: float = 0.0
    time: float | None = None

    def reserve(self, amount: float, now: float) -> float:
        """Takes `amount`, and returns the time at which it will have been there; `now` never goes back.

        The level may become negative: those who come later wait for what those before them have taken.
        """
        if self.time is None:
            self.level = self.rate
        else:
            self.level = min(self.rate, self.level + (now - self.time) * self.rate)
        self.time = now
        start = now + max(0.0, (amount - self.level) / self.rate)
        self.level -= amount
        return start


@dataclass
class RateLimit:
    """When requests may start: at most so many at once, and so many, with their tokens, per minute (None: any)."""

    max_concurrent: int
    rpm: TokenBucket | None
    tpm: TokenBucket | None
    tokens_per_request: int

    @classmethod
    def per_minute(
        cls, max_concurrent: int, max_rpm: int | None, max_tpm: int | None, tokens_per_request: int
    ) -> RateLimit:
        rpm, tpm = (None if most is None else TokenBucket(most / 60) for most in (max_rpm, max_tpm))
        return cls(max_concurrent, rpm, tpm, tokens_per_request)

    def reserve(self, now: float) -> float:
        """The time at which the next request may start: first its turn among requests, then among tokens."""
        if self.rpm is not None:
            now = self.rpm.reserve(1, now)
        if self.tpm is not None:
            now = self.tpm.reserve(self.tokens_per_request, now)
        return now
