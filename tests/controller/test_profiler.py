"""A rank's trace is whole or not there."""

from __future__ import annotations

import resource
from pathlib import Path

import torch

from hpcrl.controller.busy import Profiler


def test_a_full_disk_costs_the_trace_and_leaves_nothing(tmp_path: Path) -> None:
    """The profiler writes in C++, and raises nothing when a write fails; here no file may be larger than 16 KB."""
    profiler, stem = Profiler(3), tmp_path / "profile" / "step_00000007"
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    profiler.begin()
    for _ in range(300):
        torch.ones(1)
    resource.setrlimit(resource.RLIMIT_FSIZE, (16384, hard))
    try:
        why = profiler.end(str(stem))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert why is not None and "disk full" in why
    assert list(stem.parent.iterdir()) == []

    profiler.begin()
    assert profiler.end(None) is None and list(stem.parent.iterdir()) == []
    profiler.begin()
    assert profiler.end(str(stem)) is None
    assert [path.name for path in stem.parent.iterdir()] == ["step_00000007_rank_00003.json.gz"]
