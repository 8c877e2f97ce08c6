from __future__ import annotations

import pytest

from hpcrl.sandbox.isolation import DIED, probe_isolation


@pytest.fixture
def isolated() -> None:
    """For tests of what a kernel that isolates programs keeps from them."""
    found = probe_isolation()
    assert found.why_not != DIED, "the program that finds out does not start: run hpcrl/sandbox/isolation.py with -I -S"
    if not found.complete:
        pytest.skip(f"this kernel does not isolate programs: {found.why_not}")
