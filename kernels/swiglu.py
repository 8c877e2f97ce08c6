"""SwiGLU (Shazeer 2020, arXiv:2002.05202, eq. 6) of the two halves of a row."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import silu

from hpcrl.kernels.dispatch import use_triton


def swiglu(x: Tensor) -> Tensor:
    """silu(gate) * up of `x` (..., 2 m), gate and up beside one another: (..., m), in the dtype of `x`.

    x: fp32, bf16 or fp16. Computed in fp32 and rounded once on a GPU, after each of the two steps elsewhere.
    Moves x in and the result, half as large, out: about 6 operations for each number of it. For the backward pass the
    kernel keeps x alone; it moves x and the gradient in, that of x out: about 12 operations. ValueError for odd rows.
    """
    if x.size(-1) % 2:
        raise ValueError(f"rows of {x.size(-1)} are not two halves; give gate and up of one width")
    if use_triton("swiglu", x):
        from hpcrl.kernels.swiglu_triton import SwiGLU

        return SwiGLU.apply(x)
    gate, up = x.chunk(2, dim=-1)
    gated = silu(gate)
    return gated * up if x.requires_grad else gated.mul_(up)
