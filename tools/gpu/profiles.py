"""The kernels of a profile, by name."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import NamedTuple

from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

SHOWN, WIDTH = 16, 72  # kernels of a table, and characters of a name


class Kernel(NamedTuple):
    name: str
    calls: float
    seconds: float


def profiler() -> profile:
    """Of the device's work only."""
    return profile(activities=[ProfilerActivity.CUDA])


def kernels_of(ended: profile, name: str, repeats: int) -> list[Kernel]:
    """Those of one of `repeats` equal pieces of work, the longest first. The folder LOGS of the environment keeps the
    profile as `name`."""
    if folder := os.environ.get("LOGS"):
        ended.export_chrome_trace(f"{folder}/{name}.json.gz")
    found: dict[str, Kernel] = {}
    for event in ended.events():
        if event.device_type == DeviceType.CUDA and not event.is_user_annotation:
            _, calls, seconds = found.get(event.name, Kernel(event.name, 0.0, 0.0))
            took = event.time_range.elapsed_us() / 1e6
            found[event.name] = Kernel(event.name, calls + 1 / repeats, seconds + took / repeats)
    return sorted(found.values(), key=lambda kernel: -kernel.seconds)


def print_kernels(kernels: Sequence[Kernel]) -> None:
    total = sum(kernel.seconds for kernel in kernels)
    print("| kernel | calls | ms | share |\n|---|---:|---:|---:|")
    for kernel in kernels[:SHOWN]:
        name = kernel.name.replace("|", " ")[:WIDTH]
        print(f"| `{name}` | {kernel.calls:,.0f} | {kernel.seconds * 1e3:.2f} | {kernel.seconds / total:.0%} |")
    rest = kernels[SHOWN:]
    calls, seconds = (sum(values) for values in zip((0.0, 0.0), *(kernel[1:] for kernel in rest), strict=True))
    print(f"| {len(rest)} others | {calls:,.0f} | {seconds * 1e3:.2f} | {seconds / (total or 1.0):.0%} |", flush=True)
