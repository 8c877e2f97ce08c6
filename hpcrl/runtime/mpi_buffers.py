"""Tensors as MPI buffers: address, count and datatype, without a copy if the memory is contiguous.

Tensors on a device are copied through the host. With an MPI that has large counts (MPI-4, such as MPICH) messages have
no limit; with Open MPI 5 the limit is 2^31 - 1 elements.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from mpi4py import MPI
from torch import Tensor
from torch.distributed import ReduceOp

from hpcrl.runtime.accelerator import host_bytes

Spec = list  # [array, count or counts, MPI.Datatype], what mpi4py takes for a buffer

# Types of messages that are not reduced, by bytes per element. Counts of elements, not bytes, stay below 2^31 longer.
_CARRIERS = {1: MPI.BYTE, 2: MPI.UINT16_T, 4: MPI.UINT32_T, 8: MPI.UINT64_T, 16: MPI.C_DOUBLE_COMPLEX}

# Types that MPI can reduce. bf16 and fp16 are reduced as fp32, bool as uint8.
_NUMBERS = {
    torch.float64: MPI.DOUBLE,
    torch.float32: MPI.FLOAT,
    torch.int64: MPI.INT64_T,
    torch.int32: MPI.INT32_T,
    torch.int16: MPI.INT16_T,
    torch.int8: MPI.INT8_T,
    torch.uint8: MPI.UINT8_T,
}
_WIRE = {torch.bfloat16: torch.float32, torch.float16: torch.float32, torch.bool: torch.uint8}

_Kind: Any = ReduceOp.RedOpType  # torch's stubs do not list its members
_OPS = {
    _Kind.SUM: MPI.SUM,
    _Kind.AVG: MPI.SUM,
    _Kind.MIN: MPI.MIN,
    _Kind.MAX: MPI.MAX,
    _Kind.PRODUCT: MPI.PROD,
}
_BIT_OPS = {_Kind.BAND: MPI.BAND, _Kind.BOR: MPI.BOR, _Kind.BXOR: MPI.BXOR}
# On uint8 that holds 0 or 1: a sum is "any", a product is "all", so the result is a valid bool at any number of ranks.
_BOOL_OPS = {
    _Kind.SUM: MPI.MAX,
    _Kind.MIN: MPI.MIN,
    _Kind.MAX: MPI.MAX,
    _Kind.PRODUCT: MPI.MIN,
}


def dense(tensor: Tensor) -> Tensor:
    """`tensor` without autograd, contiguous, on the host: its own memory if possible, otherwise a copy."""
    _check_dense(tensor)
    return tensor.detach().cpu().contiguous()


def receive_buffer(target: Tensor) -> Tensor:
    """Contiguous host tensor to receive into for `target`: its own memory if possible, otherwise new memory."""
    _check_dense(target)
    if target.device.type == "cpu" and target.is_contiguous():
        return target.detach()
    return torch.empty(target.shape, dtype=target.dtype)


def copy_result(result: Tensor, target: Tensor) -> None:
    """Copy contiguous `result` (dtype may differ) into `target` unless it is `target`'s own memory."""
    if (result.data_ptr(), result.dtype, result.device) != (target.data_ptr(), target.dtype, target.device):
        target.detach().copy_(result.view(target.shape))


def overlap(a: Tensor, b: Tensor) -> bool:
    """Whether two contiguous tensors share memory. MPI forbids it between send and receive buffers."""
    return a.data_ptr() < b.data_ptr() + b.nbytes and b.data_ptr() < a.data_ptr() + a.nbytes


def flatten(tensors: list[Tensor]) -> Tensor:
    """One new 1-D tensor of all values, in order."""
    return torch.cat([dense(tensor).view(-1) for tensor in tensors])


def copy_parts(whole: Tensor, targets: list[Tensor]) -> None:
    """Copy consecutive parts of 1-D `whole` into `targets`."""
    for part, target in zip(whole.split([target.numel() for target in targets]), targets, strict=True):
        copy_result(part, target)


def raw(tensor: Tensor, counts: int | list[int] | None = None) -> Spec:
    """MPI buffer over a contiguous tensor of any dtype, for traffic that is not reduced.

    `counts` in elements: per rank for the calls that end in v, of one rank's part for gathers; default all elements.
    """
    return [host_bytes(tensor), tensor.numel() if counts is None else counts, _CARRIERS[tensor.element_size()]]


@dataclass(frozen=True)
class Reduction:
    """One reduce operation on one dtype: the dtype that MPI reduces, and the conversion of the result."""

    dtype: torch.dtype
    wire: torch.dtype
    op: MPI.Op
    divisor: int

    @staticmethod
    def of(reduce_op: ReduceOp, dtype: torch.dtype, ranks: int) -> Reduction:
        """Raise ValueError for an operation without meaning (AVG of bool) or without MPI operation (PREMUL_SUM)."""
        kind = getattr(reduce_op, "op", reduce_op)
        wire = _WIRE.get(dtype, dtype)
        ops = _BOOL_OPS if dtype is torch.bool else _OPS if dtype.is_floating_point else _OPS | _BIT_OPS
        if kind not in ops or wire not in _NUMBERS:
            raise ValueError(
                f"mpi_host cannot reduce {dtype} with {kind}; it takes SUM, AVG (not of bool), MIN, MAX, PRODUCT, and "
                "BAND, BOR, BXOR of integers, on float64, float32, bfloat16, float16, int64/32/16/8, uint8 and bool"
            )
        return Reduction(dtype, wire, ops[kind], ranks if kind == _Kind.AVG else 1)

    def to_wire(self, tensor: Tensor) -> Tensor:
        """Contiguous tensor of the wire dtype, in `tensor`'s own memory where possible."""
        tensor = dense(tensor)
        return tensor.view(self.wire) if self.dtype is torch.bool else tensor.to(self.wire)

    def receive_buffer(self, target: Tensor) -> Tensor:
        """Contiguous tensor of the wire dtype to receive into, in `target`'s own memory where possible."""
        place = receive_buffer(target)
        if self.dtype is torch.bool:
            return place.view(self.wire)
        return place if self.dtype is self.wire else torch.empty_like(place, dtype=self.wire)

    def from_wire(self, wire: Tensor, target: Tensor) -> None:
        """Copy the reduced `wire` to `target`. AVG divides before rounding to the dtype; integers round toward zero."""
        if self.divisor > 1:
            wire.div_(self.divisor, rounding_mode=None if wire.is_floating_point() else "trunc")
        copy_result(wire.view(torch.bool) if self.dtype is torch.bool else wire, target)

    def spec(self, wire: Tensor, count: int | None = None) -> Spec:
        """MPI buffer over a contiguous tensor of the wire dtype; `count` elements per rank, default all of them."""
        return [host_bytes(wire), wire.numel() if count is None else count, _NUMBERS[self.wire]]


def row_counts(tensor: Tensor, splits: list[int], ranks: int) -> list[int]:
    """Elements per rank of a tensor split along its first dimension: `splits` rows, or equal parts if that is empty."""
    rows = tensor.shape[0] if tensor.dim() else 1
    if splits is None or len(splits) == 0:
        if rows % ranks:
            raise ValueError(f"{rows} rows do not split evenly over {ranks} ranks; pass the split sizes")
        splits = [rows // ranks] * ranks
    if len(splits) != ranks or sum(splits) != rows:
        raise ValueError(f"split sizes {splits} must be {ranks} numbers that add up to {rows} rows")
    width = math.prod(tensor.shape[1:])
    return [split * width for split in splits]


def _check_dense(tensor: Tensor) -> None:
    if tensor.layout is not torch.strided:
        raise ValueError(f"mpi_host takes dense tensors, found layout {tensor.layout}; call .to_dense() first")
