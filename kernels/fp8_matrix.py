"""Matrices of a rollout engine in 8 bits, and products with them.

A number is float8_e4m3fn and belongs to a row with one fp32 scale: the largest absolute value of the row / 448, the
largest number of the format.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import linear

from hpcrl.kernels.dispatch import FP8, has_fp8, lacks_fp8, use_triton

LARGEST = 448.0
AT_ONCE, AT_ONCE_ON_DEVICE = 2**18, 2**24  # numbers that torch quantises or dequantises at a time
TEMPORARY_BYTES = 11 * AT_ONCE  # at most
MULTIPLE = 16  # of rows and columns, in 8-bit products


def rounded(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Return `values.to(dtype)`; in FP8 what is too large becomes the largest number."""
    return values.clamp(-LARGEST, LARGEST).to(FP8) if dtype == FP8 and values.dtype != FP8 else values.to(dtype)


def row_scales(amax: Tensor) -> Tensor:
    """Return the scales of rows with the largest absolute values `amax` (rows,), fp32."""
    return torch.where(amax > 0, amax / LARGEST, 1.0)


def quantized(values: Tensor, scales: Tensor) -> Tensor:
    """Return `values` (rows, cols) as numbers that are multiplied by `scales` fp32 (rows, 1)."""
    return (values / scales).to(FP8)


@dataclass(frozen=True, eq=False)
class Fp8Matrix:
    """`numbers` FP8 (rows, cols), times `scales` fp32 (rows, 1). dtype: values are rounded to it before they are
    quantised, because they are sent in it, and after they are dequantised."""

    numbers: Tensor
    scales: Tensor
    dtype: torch.dtype

    @classmethod
    def zeros(cls, size: Sequence[int], dtype: torch.dtype, device: torch.device) -> Fp8Matrix:
        """Return a matrix of zeros, or a stack of them.

        Args:
            size: (rows, cols) of a matrix, or (n, rows, cols) of a stack of n.
        """
        return cls(torch.zeros(*size, dtype=FP8, device=device), torch.ones(*size[:-1], 1, device=device), dtype)

    def unbind(self) -> list[Fp8Matrix]:
        """Return views of the matrices of a stack."""
        return [Fp8Matrix(*parts, self.dtype) for parts in zip(self.numbers, self.scales, strict=True)]

    @classmethod
    def of(cls, values: Tensor, scales: Tensor, dtype: torch.dtype) -> Fp8Matrix:
        """Quantise `values` (rows, cols)."""
        return cls(quantized(values.to(dtype), scales), scales, dtype)

    def __len__(self) -> int:
        return len(self.numbers)

    @property
    def shape(self) -> torch.Size:
        return self.numbers.shape

    @property
    def device(self) -> torch.device:
        return self.numbers.device

    def numel(self) -> int:
        return self.numbers.numel()

    @property
    def nbytes(self) -> int:
        return self.numbers.nbytes + self.scales.nbytes

    def part(self, row: int, rows: int, col: int, cols: int) -> Fp8Matrix:
        """Return a view of a rectangle."""
        end = row + rows
        return Fp8Matrix(self.numbers[row:end, col : col + cols], self.scales[row:end], self.dtype)

    def copy_(self, values: Tensor) -> None:
        """Quantise `values` (rows, cols) by the scales that the matrix has, some rows at a time."""
        for rows in self._row_slices():
            self.numbers[rows].copy_(quantized(values[rows].to(self.device, self.dtype), self.scales[rows]))

    def dequantized(self, dtype: torch.dtype | None = None) -> Tensor:
        """Return the matrix (rows, cols), a copy; in its own dtype unless another is given."""
        found = torch.empty(self.shape, dtype=dtype or self.dtype, device=self.device)
        for rows in self._row_slices():
            torch.mul(self.numbers[rows].float(), self.scales[rows], out=found[rows])
        return found

    def _row_slices(self) -> Iterator[slice]:
        rows, cols = self.shape
        step = max(1, (AT_ONCE if self.numbers.is_cpu else AT_ONCE_ON_DEVICE) // max(cols, 1))
        return (slice(first, first + step) for first in range(0, rows, step))


def fp8_linear(x: Tensor, weight: Tensor | Fp8Matrix) -> Tensor:
    """Return `linear(x, weight)`, x (n, cols).

    On GPUs with 8-bit products x is quantised by rows, too, if sizes and dtype allow it. Elsewhere the matrix is
    dequantised for the call.
    """
    if isinstance(weight, Tensor):
        return linear(x, weight)
    rows, cols = weight.shape
    if x.dtype == torch.bfloat16 and not (rows % MULTIPLE or cols % MULTIPLE) and has_fp8(x.device):
        return fp8_product(x, weight)
    return linear(x, weight.dequantized())


def fp8_product(x: Tensor, weight: Fp8Matrix) -> Tensor:
    """Return the product of 8-bit numbers, of x bf16 (n, cols) too, as bf16 (n, rows)."""
    numbers, scales = quantize_rows(x)
    return torch._scaled_mm(numbers, weight.numbers.T, scales, weight.scales.T, out_dtype=torch.bfloat16)


def quantize_rows(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return `values` (rows, cols) in 8 bits: FP8 (rows, cols) and scales fp32 (rows, 1). Moves the values in twice,
    once if they are in a cache, and a byte for each out."""
    reason = lacks_fp8(values, FP8) or ("" if values.stride(1) == 1 else "columns lie apart")
    if use_triton("quantize_rows", values, unless=reason):
        from hpcrl.kernels.fp8_matrix_triton import quantize_rows as fused

        return fused(values)
    scales = row_scales(torch.linalg.vector_norm(values, torch.inf, 1, keepdim=True, dtype=torch.float32))
    rows = Fp8Matrix(torch.empty_like(values, dtype=FP8), scales, values.dtype)
    rows.copy_(values)
    return rows.numbers, scales
