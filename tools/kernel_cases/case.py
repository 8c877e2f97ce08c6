"""What `tools/bench_kernels.py` measures."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple


class Case(NamedTuple):
    """Implementations of one thing on one set of inputs, which lies on the GPU and is several times its L2 cache.

    `runs` has "hpcrl" and those of the peers that are installed. Each moves at least `nbytes` (inputs read once,
    results written once) and does at least `flops`; the larger time at the measured ceilings is the floor. If it
    `only_reads`, its results are small beside its inputs.
    """

    name: str
    runs: dict[str, Callable[[], object]]
    nbytes: int
    flops: int = 0
    only_reads: bool = False
