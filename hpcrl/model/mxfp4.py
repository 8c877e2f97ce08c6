"""Weights of 4 bits with an exponent for each 32 of them: MXFP4 of the OCP Microscaling Formats 1.0, section 5.3.2, as
the files of GPT-OSS have them."""

from __future__ import annotations

from collections.abc import Container
from typing import TYPE_CHECKING, Any

from hpcrl.runtime.exits import InputError

if TYPE_CHECKING:
    from torch import Tensor


BLOCKS, SCALES = "_blocks", "_scales"  # suffixes of the two tensors of a weight
GROUP = 32  # numbers with one exponent
BIAS = 127  # of exponents
POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # then the same with the other sign


def weight_of(name: str, names: Container[str]) -> str:
    """Return the weight that the tensor `name` of a file is a part of; its own name if it is whole."""
    weight = name.removesuffix(BLOCKS).removesuffix(SCALES)
    return weight if weight + BLOCKS in names and weight + SCALES in names else name


class Mxfp4Slice:
    """A weight (experts, in, out) of two tensors in uint8, which is read like a slice of a safetensors file.

    blocks: (experts, out, in / 32, 16), each byte with two numbers, of which the first has the lower bits. scales:
    (experts, out, in / 32).
    """

    def __init__(self, name: str, blocks: Any, scales: Any) -> None:
        self._blocks, self._scales = blocks, scales
        sizes, dtypes = (blocks.get_shape(), scales.get_shape()), {blocks.get_dtype(), scales.get_dtype()}
        if dtypes != {"U8"} or len(sizes[0]) != 4 or sizes[0][3] != GROUP // 2 or sizes[0][:3] != sizes[1]:
            raise InputError(
                f"{name}: blocks of {sizes[0]} and scales of {sizes[1]} in {' and '.join(sorted(dtypes))}; expected "
                f"U8 (experts, rows, groups, {GROUP // 2}) and (experts, rows, groups): copy the directory again"
            )

    def get_shape(self) -> list[int]:
        experts, rows, groups, _ = self._blocks.get_shape()
        return [experts, groups * GROUP, rows]

    def __getitem__(self, place: tuple[int, slice, slice]) -> Tensor:
        """Return a part of one expert's matrix, fp32; only the groups that it needs are read. The second slice may have
        a step, which slices of files do not have."""
        import torch

        number, inner, outer = place
        first, last = inner.start // GROUP, -(-inner.stop // GROUP)
        read = number, slice(outer.start, outer.stop), slice(first, last)
        blocks, scales = (part[read][:: outer.step or 1] for part in (self._blocks, self._scales))
        numbers = torch.tensor((*POSITIVE, *(-number for number in POSITIVE)))
        of_bytes = torch.stack((numbers.repeat(16), numbers.repeat_interleave(16)), -1)
        values = torch.nn.functional.embedding(blocks.int(), of_bytes)  # (rows, groups, 16, 2)
        factors = torch.ldexp(torch.ones(scales.shape), scales.int() - BIAS)
        values = values.mul_(factors[..., None, None]).flatten(1)
        return values[:, inner.start - first * GROUP : inner.stop - first * GROUP].T
