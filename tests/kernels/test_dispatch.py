"""Which implementation runs, and that it is said."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

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


def test_a_library_runs_only_on_gpus_in_16_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(found: object, choice: str, device: str, dtype: torch.dtype, unless: str = "") -> str:
        monkeypatch.setattr(dispatch, "library", lambda module: found)
        return dispatch._missing.__wrapped__("rule", "lib.ops", choice, device, dtype, unless)

    assert not missing(object(), "auto", "cuda", torch.bfloat16)
    assert missing(object(), "auto", "cuda", torch.float32) == "no library for torch.float32"
    assert missing(object(), "torch", "cuda", torch.bfloat16) == "HPCRL_KERNELS=torch"
    assert missing(object(), "auto", "cuda", torch.bfloat16, "heads are wide") == "heads are wide"
    assert missing(None, "auto", "cuda", torch.bfloat16) == "lib is not installed, or cannot be imported"
    assert missing(object(), "auto", "cpu", torch.bfloat16) == "no library for cpu"


def test_a_library_that_needs_a_driver_is_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "needs_a_driver.py").write_text("raise RuntimeError('0 active drivers')")
    monkeypatch.syspath_prepend(tmp_path)
    assert dispatch.library.__wrapped__("needs_a_driver") is None
    assert dispatch.library.__wrapped__("is_not_installed") is None
