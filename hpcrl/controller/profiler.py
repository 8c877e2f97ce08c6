"""Traces of torch's profiler, a file for each rank."""

from __future__ import annotations

import gzip
import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.profiler import profile


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
