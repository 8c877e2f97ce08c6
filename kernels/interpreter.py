"""Test support: kernels in Triton's interpreter on a CPU, and compilation for GPUs that are not present."""

from __future__ import annotations

import functools
import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch


@functools.cache
def patch_interpreter() -> None:
    """Fix errors of Triton's interpreter.

    Up to Triton 3.9 it truncates to bf16 instead of rounding, widens subnormal bf16 numbers incorrectly, and multiplies
    the bits of bf16 as integers; up to 3.6 NumPy from 2.4 on rejects its loop bounds, which are arrays of one number.
    """
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
        # Avoids patching the language on every call, which takes longer than the call.
        if all(language.range.__name__ == "_new_range" for language in languages(self.fn)):
            return self.rewrite()(*args, **kwargs)
        return call_patching(self, *args, **kwargs)

    builder.create_dot, builder.cast_impl = create_dot, cast_impl
    interpreter._patch_lang_tensor = patch_lang_tensor
    function.__call__ = call


CHIPS = {80: "A100", 90: "H100, H200", 100: "B200"}  # by compute capability x 10


class Resources(NamedTuple):
    registers: int  # of a thread
    shared_bytes: int  # of a program
    spilled_bytes: int  # of a thread


@dataclass(frozen=True)
class KernelVariant:
    """A Triton kernel with everything that its machine code depends on.

    signature: argument -> Triton's name of its type. Pointers and arguments ending with `stride` are assumed to be
    multiples of 16, as for large tensors. constants: the kernel's constexprs.
    """

    name: str
    kernel: Any
    signature: dict[str, str]
    constants: dict[str, Any]
    num_warps: int = 4
    num_stages: int = 3
    maxnreg: int | None = None  # maximum registers of a thread

    def compile(self, chip: int) -> Resources:
        """Compile for compute capability chip / 10. Needs no GPU; Triton's interpreter must be off."""
        import triton
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource

        order = [name for name in self.kernel.arg_names if name not in self.constants]
        if sorted(order) != sorted(self.signature):
            raise ValueError(f"{self.name}: the arguments are {order}, but the signature has {[*self.signature]}")
        source = ASTSource(
            fn=self.kernel,
            signature={name: self.signature.get(name, "constexpr") for name in self.kernel.arg_names},
            constexprs=self.constants,
            attrs={
                (index,): [["tt.divisibility", 16]]
                for index, name in enumerate(self.kernel.arg_names)
                if self.signature.get(name, "").startswith("*") or name.endswith("stride")
            },
        )
        options = {"num_warps": self.num_warps, "num_stages": self.num_stages, "maxnreg": self.maxnreg}
        compiled = triton.compile(source, target=GPUTarget("cuda", chip, 32), options=options)
        return resources(compiled.asm["cubin"])._replace(shared_bytes=compiled.metadata.shared)


def resources(cubin: bytes) -> Resources:
    """Read registers and memory by the disassembler in Triton's package."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        output = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    numbers = {key: int(value) for key, value in re.findall(r"\b(REG|STACK|SHARED|LOCAL):(\d+)", output)}
    return Resources(numbers["REG"], numbers["SHARED"], numbers["STACK"] + numbers["LOCAL"])
