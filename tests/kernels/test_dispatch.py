"""Which implementation runs, and that it is said."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from hpcrl.kernels import dispatch
from hpcrl.model.build import _has_kernel
from hpcrl.runtime.exits import InputError


@pytest.fixture(autouse=True)
def nothing_said() -> Iterator[None]:
    for cached in (dispatch._reason, dispatch._log_choice):
        cached.cache_clear()
    yield
    dispatch._reason.cache_clear()


def test_a_cpu_runs_torch_unless_asked(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", dispatch.__name__)
    x = torch.zeros(1)
    monkeypatch.delenv(dispatch.VARIABLE, raising=False)
    assert not dispatch.use_triton("one", x) and not caplog.messages
    monkeypatch.setenv(dispatch.VARIABLE, "torch")
    assert not dispatch.use_triton("one", x)
    monkeypatch.setenv(dispatch.VARIABLE, "triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert dispatch.use_triton("one", x) and dispatch.use_triton("one", x)
    assert not dispatch.use_triton("one", x, unless="rows are blue")
    assert not dispatch.use_triton("two", x.double())
    assert caplog.messages == [
        "one on cpu, float32: torch, HPCRL_KERNELS=torch",
        "one on cpu, float32: Triton",
        "one on cpu, float32: torch, rows are blue",
        "two on cpu, float64: torch, no kernels for torch.float64",
    ]


def test_what_cannot_be_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(dispatch.VARIABLE, "fast")
    with pytest.raises(InputError, match="HPCRL_KERNELS=fast is unknown; use one of auto, torch, triton"):
        _has_kernel("swiglu", torch.float32)
    if not torch.cuda.is_available():
        monkeypatch.setenv(dispatch.VARIABLE, "triton")
        monkeypatch.delenv("TRITON_INTERPRET")
        with pytest.raises(InputError, match="set TRITON_INTERPRET=1 as well"):
            _has_kernel("swiglu", torch.float32)
