"""The passes over memory of masked whitening: sums, squares around a mean, and numbers shifted and scaled."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hpcrl.kernels.dispatch import use_triton

if TYPE_CHECKING:
    from hpcrl.kernels.masked_whiten_triton import InTriton


def masked_values(x: Tensor, mask: Tensor) -> InTorch | InTriton:
    """x, mask: of one shape. What stands where the mask is 0 counts in no sum, whatever it is; else the mask weighs it.

    All is computed in fp64. Torch goes through memory for each of the three methods. Triton reads x and mask once for
    both sums: each tile keeps its squares around its own mean (Chan et al. 1979), which is exact wherever the numbers
    lie, and `result` reads x once more and writes once; without a gradient.
    """
    if use_triton("masked_whiten", x):
        from hpcrl.kernels.masked_whiten_triton import InTriton

        return InTriton(x, mask)
    return InTorch(x, mask)


class InTorch:
    def __init__(self, x: Tensor, mask: Tensor) -> None:
        self._dtype, self._values = x.dtype, x.double()
        self._inside, self._valid = mask.bool(), mask.double()

    def sums(self) -> Tensor:
        """fp64 (2,): of the mask, and of the values by it."""
        return torch.stack([self._valid.sum(), (self._values.masked_fill(~self._inside, 0.0) * self._valid).sum()])

    def squares(self, mean: Tensor) -> Tensor:
        """fp64 (1,): sum of the squared distances from `mean` (), fp64."""
        self._deviation = self._values - mean
        return (self._deviation.masked_fill(~self._inside, 0.0).square() * self._valid).sum().reshape(1)

    def result(self, scale: Tensor) -> Tensor:
        """(x - mean of `squares`) * scale, in the dtype of x; of all numbers, whatever the mask."""
        return (self._deviation * scale).to(self._dtype)
