"""Copies of many rectangles of numbers at once, such as those of weights into the buffers in which they travel."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, TypeAlias

from torch import Tensor
from torch.nn import Parameter

from hpcrl.kernels.dispatch import FLOATS, use_triton

if TYPE_CHECKING:
    from hpcrl.kernels.pack_triton import Launch

Pairs: TypeAlias = Iterable[tuple[Tensor, Tensor]]  # (source, destination)


class RepeatedCopies:
    """Copies that are done time and again among tensors that seldom move.

    On a GPU they are one launch for each pair of dtypes and width of access, mostly one in all. It follows a table of
    addresses, strides and sizes, which is made anew where a tensor lies elsewhere than last time: offload, sleep and
    adopted weights bring that about. Nothing here keeps a tensor alive. Each number is read once and written once; the
    table adds less than 0.03% to that, and to memory, beyond small rectangles.
    """

    def __init__(self) -> None:
        self._made_for: list[object] = []
        self._launches: list[Launch] = []

    def run(self, tensors: Sequence[Tensor], pairs: Callable[[], Pairs]) -> None:
        """`destination.copy_(source)` for each of `pairs()`, 2-D views (rows, cols) of the same shape, which are parts
        of `tensors` and nothing else. No destination may overlap anything; the order is undefined.

        `pairs` is called where the table has to be made, and where torch copies: on a CPU, and among tensors of several
        devices, of other dtypes than fp32, bf16 and fp16, of other classes, or with gaps between neighbours in a row.
        """
        if not tensors:
            return
        if not use_triton("pack", tensors[0], unless=_unlike(tensors)):
            for source, destination in pairs():
                destination.copy_(source)
            return
        from hpcrl.kernels.pack_triton import copy_all, launches

        places = [tensors[0].device, *((x.data_ptr(), x.dtype, x.shape, x.stride()) for x in tensors)]
        if places != self._made_for:
            self._launches, self._made_for = launches(pairs(), tensors[0].device), places
        copy_all(self._launches)


def _unlike(tensors: Sequence[Tensor]) -> str:
    """Empty where addresses tell all of every tensor."""
    device = tensors[0].device
    for x in tensors:
        if x.device != device:
            return f"tensors on {device} and {x.device}"
        if x.dtype not in FLOATS:
            return f"tensors of {x.dtype}"
        if type(x) not in (Tensor, Parameter):
            return f"tensors are {type(x).__name__}"
        if x.numel() and x.size(-1) > 1 and x.stride(-1) != 1:
            return "neighbours in a row lie apart"
    return ""
