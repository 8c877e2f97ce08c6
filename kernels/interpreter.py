"""Mends of Triton's interpreter, which runs kernels on a CPU: for tests."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch


@functools.cache
def mend() -> None:
    """Up to Triton 3.9 bf16 is cut off where it has to be rounded, its subnormal numbers are widened to others, and
    products take its bits for integers; up to 3.6 NumPy from 2.4 on refuses the scalars that loops run to, which are
    arrays of one number."""
    import triton.language as tl
    from triton.runtime import interpreter

    builder, handle = interpreter.InterpreterBuilder, interpreter.TensorHandle
    multiply, cast, patch = builder.create_dot, builder.cast_impl, interpreter._patch_lang_tensor

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

    def patch_lang_tensor(tensor: Any, *rest: Any) -> None:
        patch(tensor, *rest)
        tensor.__index__ = lambda self: int(self.handle.data.squeeze())

    function = interpreter.InterpretedFunction
    call_patching = function.__call__

    @functools.cache
    def languages(fn: Any) -> list[Any]:
        return [value for value in fn.__globals__.values() if value is tl or value is tl.core]

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        # else every call of a function patches the language again, which takes longer than what it does
        if all(language.range.__name__ == "_new_range" for language in languages(self.fn)):
            return self.rewrite()(*args, **kwargs)
        return call_patching(self, *args, **kwargs)

    builder.create_dot, builder.cast_impl = create_dot, cast_impl
    interpreter._patch_lang_tensor = patch_lang_tensor
    function.__call__ = call
