"""Which checkpoints stay."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Retention:
    """A checkpoint stays that is one of the `last`, or of a step that `every` divides, or one of the `best`.

    last: None keeps all. best counts those with a value of `metric`, the larger the better if `larger_is_better`; of
    equal ones the newer is the better.
    """

    last: int | None = None
    every: int | None = None
    best: int | None = None
    metric: str | None = None
    larger_is_better: bool = True

    def __post_init__(self) -> None:
        if self.last is not None and self.last < 1:
            raise ValueError(f"last={self.last}; at least 1, or None to keep all")

    def dropped(self, values: Mapping[int, float | None]) -> set[int]:
        """The steps that go. values: step -> value of the metric, of all that are there; the newest always stays."""
        if self.last is None:
            return set()
        newest_first = sorted(values, reverse=True)
        kept = set(newest_first[: self.last])
        kept |= {step for step in newest_first if self.every is not None and step % self.every == 0}
        sign = 1.0 if self.larger_is_better else -1.0
        known = [(sign * value, step) for step, value in values.items() if value is not None and not math.isnan(value)]
        kept |= {step for _, step in sorted(known, reverse=True)[: self.best or 0]}
        return set(values) - kept
