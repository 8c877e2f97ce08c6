"""Copies of many rectangles of numbers in one launch, such as weights into the buffers of a refit."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, TypeAlias

from torch import Tensor
from torch.nn import Parameter

from hpcrl.kernels.dispatch import FLOATS, FP8, lacks_fp8, use_triton
from hpcrl.kernels.fp8_matrix import Fp8Matrix

if TYPE_CHECKING:
    from hpcrl.kernels.pack_triton import Launch

Pairs: TypeAlias = Iterable[tuple[Tensor, Tensor | Fp8Matrix]]  # (source, destination)


class RepeatedCopies:
    """Copies that are repeated among tensors that seldom move.

    On a GPU they take one launch per pair of dtypes and width of access, mostly one in total. The launch reads a table
    of addresses, strides and sizes, which is rebuilt if a tensor has moved since the last call (by offload, sleep or
    adopted weights). No tensor is kept alive. Each number is read once and written once; beyond small rectangles the
    table adds less than 0.03% to that, and to memory.
    """

    def __init__(self) -> None:
        self._made_for: list[object] = []
        self._launches: list[Launch] = []

    def run(self, tensors: Sequence[Tensor | Fp8Matrix], pairs: Callable[[], Pairs]) -> None:
        """Run `destination.copy_(source)` for each of `pairs()`, 2-D views (rows, cols) of equal shape into `tensors`.
        No destination may overlap anything; the order is undefined. It quantises what goes into an `Fp8Matrix`.

        `pairs` is called when the table is built, and when torch copies: on a CPU, and for tensors of several devices,
        of dtypes other than fp32, bf16 and fp16, of other classes, or with strided rows.
        """
        if not tensors:
            return
        memory = [x for own in tensors for x in ((own.numbers, own.scales) if isinstance(own, Fp8Matrix) else (own,))]
        first = next(x for x in memory if x.dtype != FP8)
        if not use_triton("pack", first, unless=_reason(memory)):
            for source, destination in pairs():
                destination.copy_(source)
            return
        from hpcrl.kernels.pack_triton import copy_all, launches

        places = [first.device, *((x.data_ptr(), x.dtype, x.shape, x.stride()) for x in memory)]
        if places != self._made_for:
            self._launches, self._made_for = launches(pairs(), first.device), places
        copy_all(self._launches)


def _reason(tensors: Sequence[Tensor]) -> str:
    """Return why torch must copy; empty if addresses describe every tensor."""
    device = tensors[0].device
    for x in tensors:
        if x.device != device:
            return f"tensors on {device} and {x.device}"
        if x.dtype not in (*FLOATS, FP8):
            return f"tensors of {x.dtype}"
        if reason := lacks_fp8(x):
            return reason
        if type(x) not in (Tensor, Parameter):
            return f"tensors are {type(x).__name__}"
        if x.numel() and x.size(-1) > 1 and x.stride(-1) != 1:
            return "rows are strided"
    return ""
