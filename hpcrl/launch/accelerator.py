"""What only a GPU has: streams to wait for, a caching allocator, pinned memory, NCCL. On another device, no-ops."""

from __future__ import annotations

import psutil
import torch
import torch.distributed as dist


def synchronize(device: torch.device) -> None:
    """Wait until the device has computed everything that it was asked for."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def release_cached_memory(device: torch.device) -> None:
    """Return what torch's allocator holds and no tensor uses."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()


def pins_memory(device: torch.device) -> bool:
    """Whether copies between host and device are faster from pinned host memory."""
    return device.type == "cuda"


def free_bytes(device: torch.device, ranks_on_node: int) -> int:
    """Of a GPU, which belongs to this rank only; of the node's memory an equal share."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return int(psutil.virtual_memory().available) // ranks_on_node


def take_peak_bytes() -> tuple[int, int]:
    """Most bytes that torch had allocated and reserved on the GPU since the last call; 0, 0 without a GPU."""
    if not torch.cuda.is_available():
        return 0, 0
    peaks = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    torch.cuda.reset_peak_memory_stats()
    return peaks


def name_of(device: torch.device) -> str | None:
    """The GPU's name as its maker spells it, None for another device."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else None


def has_nccl() -> bool:
    """Whether device tensors of the world's process group go over NCCL."""
    return "nccl" in str(dist.get_backend_config())
