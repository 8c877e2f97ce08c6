"""The memory ledger of a step, from the reports of all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

from hpcrl.controller.busy import BusyReport, MemoryUse

GIB = 2**30


def memory_metrics(reports: Sequence[BusyReport]) -> dict[str, float]:
    """GiB of the rank that has most: `memory/<phase>/{allocated,reserved,host}_gb`, `memory/host_buffers_gb` and, over
    all phases, `perf/max_memory_{allocated,reserved}_gb`; what is 0 everywhere, as a device that is none, is left out.
    """
    by_phase: dict[str, MemoryUse] = {}
    for report in reports:
        for phase, used in report.memory.items():
            by_phase[phase] = used.or_more(by_phase.get(phase, MemoryUse()))
    most = reduce(MemoryUse.or_more, by_phase.values(), MemoryUse())
    found = {
        f"memory/{phase}/{name}_gb": nbytes
        for phase, used in by_phase.items()
        for name, nbytes in used._asdict().items()
    }
    found |= {f"perf/max_memory_{name}_gb": getattr(most, name) for name in ("allocated", "reserved")}
    found["memory/host_buffers_gb"] = max((report.host_buffers for report in reports), default=0)
    return {name: nbytes / GIB for name, nbytes in found.items() if nbytes > 0}
