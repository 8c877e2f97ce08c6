"""A mixture of experts by grouped products: one launch for all experts, whose numbers of tokens the host does not read.

Not yet run on a GPU.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hpcrl.kernels.layers import swiglu

ALIGNMENT = 16  # bytes, of the strides of a grouped product


class Experts(NamedTuple):
    """Weights of E experts of a layer, without a copy: fc1 (E, 2 ffn, hidden), or (E, ffn, hidden) without a gate, and
    fc2 (E, hidden, ffn), and biases of their outputs (E, 2 ffn) and (E, hidden), from the last expert to the first if
    `is_reversed`."""

    fc1: Tensor
    fc2: Tensor
    is_reversed: bool
    fc1_bias: Tensor | None = None
    fc2_bias: Tensor | None = None

    @classmethod
    def of(
        cls,
        fc1: Sequence[Tensor],
        fc2: Sequence[Tensor],
        fc1_bias: Sequence[Tensor] = (),
        fc2_bias: Sequence[Tensor] = (),
    ) -> Experts | None:
        """None if their device or dtype has no grouped product, or they are not at equal distances in one memory, as
        they are in a stack and, in reverse order, in megatron's buffers."""
        if not _has_grouped_product(fc1[0].device, fc1[0].dtype):
            return None
        found: list[Any] = [
            _stacked(weights) if weights else (None, None) for weights in (fc1, fc2, fc1_bias, fc2_bias)
        ]
        if None in found or len({is_reversed for _, is_reversed in found} - {None}) > 1:
            return None
        (first, is_reversed), (second, _), *of_biases = found
        return cls(first, second, is_reversed, *(stack for stack, _ in of_biases))


def mixture(
    x: Tensor, weights: Tensor, ids: Tensor, experts: Experts, activate: Callable[[Tensor], Tensor] = swiglu
) -> Tensor:
    """Return the sum of each token's experts by `weights` (n, topk), without gradients. x: (n, hidden); ids: int64
    (n, topk). With a gate 6 n topk ffn hidden operations; moves the weights of the experts that have tokens."""
    num_experts = len(experts.fc1)
    flat = num_experts - 1 - ids.flatten() if experts.is_reversed else ids.flatten()
    by_expert, places = flat.sort(stable=True)
    ends = torch.searchsorted(by_expert, torch.arange(num_experts, device=flat.device), right=True, out_int32=True)
    inner = _grouped_product(x[places // ids.size(1)], experts.fc1.transpose(1, 2), ends)
    if experts.fc1_bias is not None:
        inner = inner + experts.fc1_bias[by_expert]
    outputs = _grouped_product(activate(inner), experts.fc2.transpose(1, 2), ends)
    if experts.fc2_bias is not None:
        outputs = outputs + experts.fc2_bias[by_expert]
    weighted = x.new_empty(len(places), x.size(1))
    weighted[places] = outputs
    return (weighted.unflatten(0, weights.shape) * weights.unsqueeze(-1).to(x.dtype)).sum(1)


def _stacked(weights: Sequence[Tensor]) -> Any:
    """Return a view of all weights by their places in memory, and whether these are in reverse order; None if there is
    none."""
    first, size = weights[0], weights[0].element_size()
    if len({weight.untyped_storage().data_ptr() for weight in weights}) > 1:
        return None
    places = [int(weight.storage_offset()) for weight in weights]
    distances = {later - earlier for earlier, later in zip(places, places[1:], strict=False)} or {first.numel()}
    if len(distances) > 1 or not all(weight.is_contiguous() for weight in weights):
        return None
    (distance,) = distances
    unaligned = any(number * size % ALIGNMENT for number in (distance, first.stride(0), min(places)))
    if first.dim() == 2 and unaligned:
        return None
    strides = (abs(distance), *first.stride())
    return first.as_strided((len(weights), *first.shape), strides, min(places)), distance < 0


def _grouped_product(a: Tensor, b: Tensor, ends: Tensor) -> Tensor:
    """Return the rows of `a` (n, k) times their group's matrix of `b` (groups, k, m); `ends` int32 (groups,)."""
    return torch.nn.functional.grouped_mm(a, b, offs=ends)


@functools.cache
def _has_grouped_product(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether torch has it: from 2.10 on, for bf16 on GPUs, and for fp32 too on CPUs."""
    a, b = torch.ones(16, 16, device=device, dtype=dtype), torch.ones(2, 16, 16, device=device, dtype=dtype)
    try:
        found = _grouped_product(a, b, torch.tensor([8, 16], dtype=torch.int32, device=device))
    except (AttributeError, TypeError, RuntimeError):
        return False
    return bool((found == 16).all())
