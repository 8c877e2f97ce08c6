"""The C library's heap."""

from __future__ import annotations

import ctypes

# Parameters of glibc's mallopt(3), and their values. Larger allocations than 32 MiB, its limit, are always mapped anew.
TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3
LARGEST_KEPT, MOST_KEPT = 2**25, 2**30


def keep_freed_memory() -> None:
    """Make glibc keep freed memory for later allocations. Other C libraries have no such parameters.

    By default it returns tensors of a megabyte to the system, so that every page of the next one is cleared and mapped
    when it is first written, which took a fifth of the time of small decode steps.
    """
    library = ctypes.CDLL(None)
    if hasattr(library, "mallopt"):
        library.mallopt(MMAP_THRESHOLD, LARGEST_KEPT)
        library.mallopt(TRIM_THRESHOLD, MOST_KEPT)
