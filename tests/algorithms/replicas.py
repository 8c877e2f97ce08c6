"""Simulated data-parallel replicas: a `reduce` that sums over threads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch


def on_replicas(count: int, work: Callable[[int, Callable[[torch.Tensor], torch.Tensor]], Any]) -> list[Any]:
    """Runs work(replica, reduce) on `count` threads at once; each must call reduce equally often."""
    barrier = threading.Barrier(count, timeout=30)
    shared: list[torch.Tensor | None] = [None] * count

    def run(replica: int) -> Any:
        def reduce(sums: torch.Tensor) -> torch.Tensor:
            assert sums.dtype == torch.float64
            shared[replica] = sums
            barrier.wait()
            total = torch.stack([part for part in shared if part is not None]).sum(0)
            barrier.wait()
            return total

        try:
            return work(replica, reduce)
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(run, range(count)))
