from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# The machines that run these tests are shared: a slow example is no finding.
settings.register_profile("hpcrl", deadline=None, max_examples=50, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("hpcrl")

# Without a GPU kernels run in Triton's interpreter. Triton asks for it when it is imported, which megatron does. The
# interpreter's products are numpy's. Those of OpenBLAS for AVX2 (without AVX-512) depend on a row's place in a tile.
if not Path("/dev/nvidiactl").exists():
    os.environ |= {"TRITON_INTERPRET": "1", "OPENBLAS_CORETYPE": "Sandybridge"}


@pytest.fixture(autouse=True)
def _signal_mask() -> Iterator[None]:
    """A job's command that a test calls in this process blocks signals; processes of later tests inherit that."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    yield
    signal.pthread_sigmask(signal.SIG_SETMASK, before)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """HPCRL_QUIET=only keeps the tests that need a quiet machine, HPCRL_QUIET=no all others."""
    quiet = os.environ.get("HPCRL_QUIET")
    if quiet is not None:
        left_out = [item for item in items if (item.get_closest_marker("quiet") is None) == (quiet == "only")]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in set(left_out)]


def pytest_collection_finish() -> None:
    """What is loaded by now stays: else each full collection of garbage walks over it."""
    gc.freeze()
