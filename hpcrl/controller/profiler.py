"""Traces of torch's profiler, a file for each rank."""

from __future__ import annotations

import gzip
import os
import shutil
from pathlib import Path

from torch.profiler import profile


class Profiler:
    """This rank's, on from `begin` to `end`: operators of the main thread, kernels of a GPU, and named ranges."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._profile: profile | None = None

    def begin(self) -> None:
        self._profile = profile()
        self._profile.start()

    def end(self, stem: str | None) -> str | None:
        """Write the trace to <stem>_rank_<rank>.json.gz, or drop it where `stem` is None; returns why that failed."""
        assert self._profile is not None
        trace, self._profile = self._profile, None
        trace.stop()
        if stem is None:
            return None
        try:
            write_trace(trace, Path(f"{stem}_rank_{self._rank:05d}.json.gz"))
        except (OSError, RuntimeError) as error:
            return str(error)
        return None


def write_trace(trace: profile, path: Path) -> None:
    """As Chrome's trace format, complete or not at all. OSError where the disk is full."""
    plain, packed = path.with_suffix(".tmp"), path.with_suffix(".gz.tmp")
    try:
        path.parent.mkdir(exist_ok=True)
        trace.export_chrome_trace(str(plain))
        _check_end(plain)
        with open(plain, "rb") as source, gzip.open(packed, "wb", compresslevel=1) as target:
            shutil.copyfileobj(source, target)
        os.replace(packed, path)
    finally:
        plain.unlink(missing_ok=True)
        packed.unlink(missing_ok=True)


def _check_end(path: Path) -> None:
    """The profiler writes in C++, and does not say when a write fails."""
    with open(path, "rb") as file:
        file.seek(max(0, path.stat().st_size - 4096))
        if b'"traceName"' not in file.read():
            raise OSError(f"{path} ends too early; is the disk full?")
