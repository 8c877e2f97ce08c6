"""Which implementation runs: Triton on CUDA devices, plain torch elsewhere.

The environment variable HPCRL_KERNELS says otherwise: `torch` keeps Triton from running, `triton` runs it on CPU
tensors too, where TRITON_INTERPRET=1 has Triton's interpreter do the work, which takes a thousand times as long and is
for tests.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
import os

import torch
from torch import Tensor

from hpcrl.kernels.interpreter import mend

VARIABLE = "HPCRL_KERNELS"
CHOICES = ("auto", "torch", "triton")
FLOATS = (torch.float32, torch.bfloat16, torch.float16)

log = logging.getLogger(__name__)


def use_triton(name: str, x: Tensor, *, unless: str = "") -> bool:
    """Whether kernel `name` runs in Triton for tensors like `x`; `unless` says why this shape cannot.

    The first answer of each kind is logged. ValueError where HPCRL_KERNELS is none of its choices, RuntimeError where
    it asks for Triton on a CPU without the interpreter.
    """
    choice = os.environ.get(VARIABLE, "auto")
    if x.device.type == "cpu" and choice == "auto":
        return False
    why = unless or _why_not(choice, x.device.type, x.dtype)
    _say(name, x.device.type, x.dtype, why)
    return not why


@functools.cache
def _why_not(choice: str, device: str, dtype: torch.dtype) -> str:
    """Empty where Triton is to run."""
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
        mend()
    return ""


@functools.cache
def _say(name: str, device: str, dtype: torch.dtype, why: str) -> None:
    log.info("%s on %s, %s: %s", name, device, str(dtype).removeprefix("torch."), f"torch, {why}" if why else "Triton")
