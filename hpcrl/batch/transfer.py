"""Copies of several host tensors to a device in one transfer, for which the host does not wait."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    import torch
    from torch import Tensor

T = TypeVar("T")
ALIGNMENT = 16  # bytes, of each tensor in the transfer


def to_device(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Return copies on the device of host tensors; on the CPU the tensors themselves."""
    if device.type == "cpu":
        return list(tensors)
    import torch

    sizes = [-(-tensor.nbytes // ALIGNMENT) * ALIGNMENT for tensor in tensors]
    # A copy from pageable memory would wait for all work queued on the device.
    host = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=device.type != "meta")
    for place, tensor in zip(host.split(sizes), tensors, strict=True):
        place[: tensor.nbytes].view(tensor.dtype).view(tensor.shape).copy_(tensor)
    parts = host.to(device, non_blocking=True).split(sizes)
    return [
        part[: tensor.nbytes].view(tensor.dtype).view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)
    ]


def moved(rebuild: Callable[[Callable[[Tensor], Tensor]], T], device: torch.device) -> T:
    """Return `rebuild(move)`, in which `move` returns the copy on the device of a host tensor.

    `rebuild` is called twice, first to collect the tensors; it must move the same ones in the same order.
    """
    tensors: list[Tensor] = []

    def collect(tensor: Tensor) -> Tensor:
        tensors.append(tensor)
        return tensor

    found = rebuild(collect)
    if device.type == "cpu":
        return found
    copies = iter(to_device(tensors, device))
    return rebuild(lambda _: next(copies))
