from __future__ import annotations

import pytest

from hpcrl.sandbox.isolation import probe_isolation


@pytest.fixture
def isolated() -> None:
    """For tests of what a kernel that isolates programs keeps from them."""
    if not probe_isolation().complete:
        pytest.skip(f"this kernel does not isolate programs: {probe_isolation().why_not}")
