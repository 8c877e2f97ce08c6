"""Compiling a kernel for a GPU that is not here, and what the machine code says of itself."""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

CHIPS = {80: "A100", 90: "H100, H200", 100: "B200"}  # by compute capability x 10


class Resources(NamedTuple):
    registers: int  # of a thread
    shared_bytes: int  # of a program
    spilled_bytes: int  # of a thread: what the registers could not hold


@dataclass(frozen=True)
class Specimen:
    """A Triton kernel with everything that its machine code depends on.

    signature: argument -> Triton's name of its type. Pointers and what ends with `stride` are taken to be multiples of
    16, as those of large tensors are. constants: the kernel's constexprs.
    """

    name: str
    kernel: Any
    signature: dict[str, str]
    constants: dict[str, Any]
    num_warps: int = 4
    num_stages: int = 3
    maxnreg: int | None = None  # registers that a thread may have

    def compile(self, chip: int) -> Resources:
        """For compute capability chip / 10. Needs no GPU, and Triton's interpreter must be off."""
        import triton
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource

        order = [name for name in self.kernel.arg_names if name not in self.constants]
        if sorted(order) != sorted(self.signature):
            raise ValueError(f"{self.name}: {order} are the kernel's arguments, the signature has {[*self.signature]}")
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
    """As the disassembler that Triton brings reads them."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        told = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    numbers = {key: int(value) for key, value in re.findall(r"\b(REG|STACK|SHARED|LOCAL):(\d+)", told)}
    return Resources(numbers["REG"], numbers["SHARED"], numbers["STACK"] + numbers["LOCAL"])
