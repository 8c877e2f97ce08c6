"""The ledger of phases over a device whose peaks are given."""

from __future__ import annotations

import pytest

from hpcrl.controller.busy import BusyReport, MemoryLedger, MemoryUse
from hpcrl.run.performance import GIB, memory_metrics


def test_an_outer_phase_takes_what_its_inner_ones_take() -> None:
    peaks = iter([(9, 9), (1, 2), (7, 8), (2, 2), (3, 3), (4, 9), (5, 5)])
    ledger = MemoryLedger(lambda: next(peaks))
    with ledger.phase("outer"):  # (9, 9) was before it
        with ledger.phase("inner"):  # (1, 2) was the outer's
            pass  # (7, 8)
        # (2, 2)
    with ledger.phase("inner"):  # (3, 3) was between them
        pass  # (4, 9): of the two, the most
    found = ledger.collect()
    assert {name: used[:2] for name, used in found.items()} == {"outer": (7, 8), "inner": (7, 9)}
    assert all(used.host > 2**20 for used in found.values())
    assert ledger.collect() == {}


def test_metrics_are_those_of_the_worst_rank() -> None:
    of = {
        0: {"actor.update_actor": MemoryUse(3 * GIB, 4 * GIB, GIB), "ref.load": MemoryUse(0, 0, GIB)},
        1: {"actor.update_actor": MemoryUse(2 * GIB, 5 * GIB, GIB)},
    }
    reports = [BusyReport(rank, "n0", {}, memory, host_buffers=rank * GIB) for rank, memory in of.items()]
    assert memory_metrics(reports) == {
        "memory/actor.update_actor/allocated_gb": 3.0,
        "memory/actor.update_actor/reserved_gb": 5.0,
        "memory/actor.update_actor/host_gb": 1.0,
        "memory/ref.load/host_gb": 1.0,
        "perf/max_memory_allocated_gb": 3.0,
        "perf/max_memory_reserved_gb": 5.0,
        "memory/host_buffers_gb": pytest.approx(1.0),
    }
