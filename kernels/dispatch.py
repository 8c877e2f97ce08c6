"""Choice of the implementation: Triton on CUDA devices, plain torch elsewhere.

The environment variable HPCRL_KERNELS overrides it: `torch` disables Triton, `triton` runs it on CPU tensors too, in
Triton's interpreter with TRITON_INTERPRET=1, which is about a thousand times slower and meant for tests.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
import os

import torch
from torch import Tensor

from hpcrl.kernels.interpreter import patch_interpreter

VARIABLE = "HPCRL_KERNELS"
CHOICES = ("auto", "torch", "triton")
FLOATS = (torch.float32, torch.bfloat16, torch.float16)

log = logging.getLogger(__name__)


def use_triton(name: str, x: Tensor, *, unless: str = "") -> bool:
    """Whether kernel `name` runs in Triton for tensors like `x`; `unless` is the reason why this shape is not
    supported.

    The first result of each kind is logged. Raises ValueError for an unknown HPCRL_KERNELS, RuntimeError if it requires
    Triton on a CPU without the interpreter.
    """
    choice = os.environ.get(VARIABLE, "auto")
    if x.device.type == "cpu" and choice == "auto":
        return False
    reason = unless or _reason(choice, x.device.type, x.dtype)
    _log_choice(name, x.device.type, x.dtype, reason)
    return not reason


@functools.cache
def _reason(choice: str, device: str, dtype: torch.dtype) -> str:
    """Return why Triton does not run; empty if it does."""
    if choice not in CHOICES:
        raise ValueError(f"{VARIABLE}={choice} is unknown; use one of {', '.join(CHOICES)}")
    if choice == "torch":
        return f"{VARIABLE}=torch"
    if device == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        raise RuntimeError(f"{VARIABLE}=triton on a CPU needs Triton's interpreter; set TRITON_INTERPRET=1 as well")
    if device not in ("cpu", "cuda"):
        return f"no kernels for {device}"
    if dtype not in FLOATS:
        return f"no kernels for {dtype}"
    if not importlib.util.find_spec("triton"):
        return "Triton is not installed"
    if device == "cpu":
        patch_interpreter()
    return ""


@functools.cache
def _log_choice(name: str, device: str, dtype: torch.dtype, reason: str) -> None:
    log.info(
        "%s on %s, %s: %s", name, device, str(dtype).removeprefix("torch."), f"torch, {reason}" if reason else "Triton"
    )
