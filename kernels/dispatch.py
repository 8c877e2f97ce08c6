"""Choice of the implementation: Triton on GPUs, plain torch elsewhere.

The environment variable HPCRL_KERNELS overrides it: `torch` disables Triton, `triton` runs it on CPU tensors too, in
Triton's interpreter with TRITON_INTERPRET=1, which is about a thousand times slower and meant for tests.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import logging
import os
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hpcrl.kernels.chips import chip_of


@functools.cache
def patch_interpreter() -> None:
    """Fix errors of Triton's interpreter.

    Up to Triton 3.9 it truncates to bf16 instead of rounding, widens subnormal bf16 numbers incorrectly, rounds halves
    and overflows of 8-bit numbers incorrectly, and multiplies the bits of bf16 as integers; up to 3.6 NumPy from 2.4 on
    rejects its loop bounds, which are arrays of one number.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    builder, handle = interpreter.InterpreterBuilder, interpreter.TensorHandle
    multiply, cast, patch = builder.create_dot, builder.cast_impl, interpreter._patch_lang_tensor
    convert = builder.create_fp_to_fp

    def widened(x: Any) -> Any:
        if x.dtype.scalar != tl.bfloat16:
            return x
        return handle((x.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    def create_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return multiply(self, widened(a), widened(b), *rest)

    def cast_impl(self: Any, x: Any, dtype: Any) -> Any:
        if dtype.scalar == tl.bfloat16 and x.dtype.scalar == tl.float32:
            rounded = torch.from_numpy(np.ascontiguousarray(x.data)).bfloat16().view(torch.int16)
            return handle(rounded.numpy().view(np.uint16), tl.bfloat16)
        if dtype.scalar == tl.float32 and x.dtype.scalar == tl.bfloat16:
            return widened(x)
        return cast(self, x, dtype)

    def create_fp_to_fp(self: Any, x: Any, dtype: Any, *rest: Any) -> Any:
        if dtype.scalar == tl.float8e4nv and x.dtype.scalar == tl.float32:
            rounded = torch.from_numpy(np.ascontiguousarray(x.data)).to(FP8).view(torch.uint8)
            return handle(rounded.numpy(), tl.float8e4nv)
        if dtype.scalar == tl.float32 and x.dtype.scalar == tl.float8e4nv:
            numbers = torch.from_numpy(np.ascontiguousarray(x.data)).view(FP8)
            return handle(numbers.float().numpy(), tl.float32)
        return convert(self, x, dtype, *rest)

    def patch_lang_tensor(tensor: Any, *rest: Any) -> None:
        patch(tensor, *rest)
        tensor.__index__ = lambda self: int(self.handle.data.squeeze())

    function = interpreter.InterpretedFunction
    call_patching = function.__call__

    @functools.cache
    def languages(fn: Any) -> list[Any]:
        return [value for value in fn.__globals__.values() if value is tl or value is tl.core]

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        # Avoids patching the language on every call, which takes longer than the call.
        if all(language.range.__name__ == "_new_range" for language in languages(self.fn)):
            return self.rewrite()(*args, **kwargs)
        return call_patching(self, *args, **kwargs)

    builder.create_dot, builder.cast_impl, builder.create_fp_to_fp = create_dot, cast_impl, create_fp_to_fp
    interpreter._patch_lang_tensor = patch_lang_tensor
    function.__call__ = call


VARIABLE = "HPCRL_KERNELS"
CHOICES = ("auto", "torch", "triton")
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
FP8 = torch.float8_e4m3fn

log = logging.getLogger(__name__)


def use_triton(name: str, x: Tensor, *, unless: str = "") -> bool:
    """Whether kernel `name` runs in Triton for tensors like `x`; `unless` is the reason why this shape is not
    supported.

    The first result of each kind is logged. Raises ValueError for an unknown HPCRL_KERNELS, RuntimeError if it requires
    Triton on a CPU without the interpreter.
    """
    choice = os.environ.get(VARIABLE, "auto")
    if choice == "auto" and x.is_cpu:
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
    if dtype not in (*FLOATS, FP8):
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


@functools.cache
def has_fp8(device: torch.device) -> bool:
    """Whether a GPU has products of `FP8`. gfx942 has them of other 8-bit numbers, float8_e4m3fnuz."""
    return device.type == "cuda" and chip_of(device).fp8 == str(FP8).removeprefix("torch.")


def lacks_fp8(x: Tensor, dtype: torch.dtype | None = None) -> str:
    """Return why the device of `x` has no kernels for its dtype, or another; empty if it has."""
    lacks = (dtype or x.dtype) == FP8 and not x.is_cpu and not has_fp8(x.device)
    return "a GPU without products of float8_e4m3fn" if lacks else ""


def use_library(name: str, module: str, x: Tensor, *, unless: str = "") -> bool:
    """Whether kernel `name` runs by `module` of an optional library, on GPUs and in 16 bits, for tensors like `x`;
    `unless` is the reason why this shape is not supported."""
    return not _missing(name, module, os.environ.get(VARIABLE, "auto"), x.device.type, x.dtype, unless)


@functools.cache
def _missing(name: str, module: str, choice: str, device: str, dtype: torch.dtype, unless: str) -> str:
    """Return why the library does not run, empty if it does; logged once on GPUs."""
    if device != "cuda":
        return f"no library for {device}"
    package, reason = module.partition(".")[0], unless
    if choice == "torch":
        reason = f"{VARIABLE}=torch"
    elif dtype not in (torch.bfloat16, torch.float16):
        reason = f"no library for {dtype}"  # fp32 runs keep fp32's precision, which tf32 products do not have
    elif not unless and library(module) is None:
        reason = f"{package} is not installed, or cannot be imported"
    log.info("%s on %s, %s: %s", name, device, dtype, f"torch, {reason}" if reason else package)
    return reason


@functools.cache
def library(module: str) -> Any:
    """Return a module of an optional library; None if there is none."""
    try:
        return importlib.import_module(module)
    except ImportError:
        return None
    except Exception as error:  # Triton without a driver raises errors of many kinds
        log.warning("%s cannot be imported: %s", module, error)
        return None
