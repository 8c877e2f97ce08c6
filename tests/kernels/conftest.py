"""Kernels run on a GPU where there is one, else in Triton's interpreter, see tests/conftest.py."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    """What nobody wrote is NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """Where kernels can run; the dispatcher picks Triton in this test."""
    monkeypatch.setenv("HPCRL_KERNELS", "triton")
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
