"""A rank's phases: time at work without the time that it waited for other ranks, peak memory, profiler traces."""

from __future__ import annotations

import gzip
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import psutil

from hpcrl.runtime import accelerator
from hpcrl.runtime.mpi import WaitTime
from hpcrl.runtime.spans import spans

if TYPE_CHECKING:
    from torch.profiler import profile


class MemoryUse(NamedTuple):
    """Bytes. allocated, reserved: the peaks of torch's allocator on the device, 0 on the CPU. host: the process's
    resident memory at the end of the phase, or of a phase inside it."""

    allocated: int = 0
    reserved: int = 0
    host: int = 0

    def or_more(self, other: MemoryUse) -> MemoryUse:
        return MemoryUse(*map(max, self, other))


class MemoryLedger:
    """Records the peak memory of each phase.

    Args:
        device: returns the first two fields of a `MemoryUse`, since its last call.
    """

    def __init__(self, device: Callable[[], tuple[int, int]] | None = None) -> None:
        self._device = device or accelerator.take_peak_bytes
        self._process = psutil.Process()
        self._so_far = MemoryUse()  # of the current phase, up to the end of its last inner one
        self._used: dict[str, MemoryUse] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Record a phase. Phases may nest; the peak of an inner one counts for its outer ones too."""
        outer = self._so_far.or_more(self._take())
        self._so_far = MemoryUse()
        yield
        now = self._take()
        spans.add_counter("memory host", now.host)
        if now.allocated:
            spans.add_counter("memory allocated", now.allocated)
        own = self._so_far.or_more(now)
        self._used[name] = own.or_more(self._used.get(name, MemoryUse()))
        self._so_far = outer.or_more(own)

    def collect(self) -> dict[str, MemoryUse]:
        """Peaks by phase since the last call, of phases that have ended; the maximum over phases of one name."""
        found, self._used = self._used, {}
        return found

    def _take(self) -> MemoryUse:
        return MemoryUse(*self._device(), self._process.memory_info().rss)


@dataclass(frozen=True)
class BusyReport:
    """What a rank did since the previous report.

    seconds, memory: by "role.method". host_buffers: bytes that the workers keep.
    """

    rank: int
    node: str
    seconds: dict[str, float]
    memory: dict[str, MemoryUse] = field(default_factory=dict)
    host_buffers: int = 0


class BusyClock:
    """Measures host time. Time in which the host waits for its GPU, and the GPU for others inside NCCL's kernels,
    counts as work: in such a phase the slow ranks are the *less* busy ones, or all are equal.
    """

    def __init__(self, waited: WaitTime, clock: Callable[[], float] = time.perf_counter) -> None:
        self._waited = waited
        self._clock = clock
        self._seconds: dict[str, float] = {}
        self._booked = 0.0  # seconds in all

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure a phase. Phases may nest; an outer one does not contain the time of its inner ones."""
        began, booked = self._worked(), self._booked
        yield
        own = (self._worked() - began) - (self._booked - booked)
        self._seconds[name] = self._seconds.get(name, 0.0) + own
        self._booked += own

    def collect(self) -> dict[str, float]:
        """Seconds by phase since the last call, of phases that have ended."""
        found, self._seconds = self._seconds, {}
        return found

    def _worked(self) -> float:
        now, since = self._clock(), self._waited.since
        return now - self._waited.seconds - (now - since if since is not None else 0.0)


class Profiler:
    """Records a trace from `begin` to `end`: operators of the main thread, kernels of a GPU, and named ranges."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._profile: profile | None = None

    def begin(self) -> None:
        from torch.profiler import profile

        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # otherwise each rank prints lines to stderr
        self._profile = profile()
        self._profile.start()

    def end(self, stem: str | None) -> str | None:
        """Write the trace to <stem>_rank_<rank>.json.gz, or drop it if `stem` is None. Returns an error message, None
        on success."""
        assert self._profile is not None
        trace, self._profile = self._profile, None
        try:
            trace.stop()
            if stem is not None:
                write_trace(trace, Path(f"{stem}_rank_{self._rank:05d}.json.gz"))
        except (OSError, RuntimeError) as error:
            return str(error)
        return None


def write_trace(trace: profile, path: Path) -> None:
    """As Chrome's trace format, complete or not at all. OSError where the disk is full."""
    path.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent) as drafts:
        plain, packed = Path(drafts, "trace.json"), Path(drafts, "trace.json.gz")
        trace.export_chrome_trace(str(plain))
        if not _is_whole(plain):
            raise OSError(f"{path} could not be written to its end; is the disk full?")
        with open(plain, "rb") as source, gzip.open(packed, "wb", compresslevel=1) as target:
            shutil.copyfileobj(source, target)
        os.replace(packed, path)


def _is_whole(path: Path) -> bool:
    """The profiler writes in C++, and raises nothing when a write fails."""
    if not path.exists():
        return False
    with open(path, "rb") as file:
        file.seek(max(0, path.stat().st_size - 4096))
        return b'"traceName"' in file.read()
