"""The device's streams, memory and profiler ranges: torch.cuda's functions on a GPU, no-ops on another device.

ROCm's torch has the same functions and the same name of the device, "cuda"; what differs is in `hpcrl.kernels.chips`.

torch is imported by the functions, because the controller uses this file and rank 0 may have no use for torch.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import psutil

from hpcrl.runtime.exits import InputError
from hpcrl.runtime.rank_status import RankStatus
from hpcrl.runtime.spans import spans

if TYPE_CHECKING:
    import torch
    from torch import Tensor


_NO_RANGE = nullcontext()
_OUT_OF_MEMORY = re.compile(r"(cuda|hip).*out of memory", re.IGNORECASE | re.DOTALL)  # torch, CUDA, ROCm and NCCL
HISTORY_ENTRIES = 100_000  # the newest allocations and frees
GIB = 2**30


def synchronize(device: torch.device) -> None:
    """Wait until all work queued on the device has finished."""
    if device.type == "cuda":
        import torch

        torch.cuda.synchronize(device)


def release_cached_memory(device: torch.device) -> None:
    """Return memory that torch's allocator holds and no tensor uses to the device."""
    if device.type == "cuda":
        import torch

        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()


def free_bytes(device: torch.device, ranks_on_node: int) -> int:
    """Free bytes of this rank's GPU, or on the CPU this rank's equal share of the node's free memory."""
    if device.type == "cuda":
        import torch

        return int(torch.cuda.mem_get_info(device)[0])
    return int(psutil.virtual_memory().available) // ranks_on_node


def take_peak_bytes() -> tuple[int, int]:
    """Peak bytes allocated and reserved by torch on the GPU since the last call; 0, 0 without a GPU."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return 0, 0
    peaks = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    torch.cuda.reset_peak_memory_stats()
    return peaks


def record_memory_history(device: torch.device) -> None:
    """Record the Python stack of each allocation, for `dump_memory_history`. Costs 2 to 4 us of host time each."""
    if device.type != "cuda":
        return
    import torch

    if (allocator := torch.cuda.get_allocator_backend()) != "native":
        raise InputError(
            f"run.memory_snapshot=true records torch's native allocator, found {allocator} (PYTORCH_CUDA_ALLOC_CONF); "
            "leave its backend out, or set run.memory_snapshot=false"
        )
    torch.cuda.memory._record_memory_history(max_entries=HISTORY_ENTRIES, stacks="python")


def dump_memory_history(path: Path) -> bool:
    """Write the recorded allocations, for https://pytorch.org/memory_viz. Returns False without a GPU."""
    import torch

    if not torch.cuda.is_available():
        return False
    torch.cuda.memory._dump_snapshot(str(path))
    return True


def is_out_of_memory(error: BaseException) -> bool:
    """Whether torch, CUDA, ROCm or NCCL ran out of GPU memory."""
    return isinstance(error, RuntimeError) and _OUT_OF_MEMORY.search(str(error)) is not None


def annotated(name: str) -> AbstractContextManager[object]:
    """A named range in this rank's trace (`hpcrl.runtime.spans`) and in a profiler."""
    inner = profiler_range(name)
    return spans.span(name, None if inner is _NO_RANGE else inner)


def profiler_range(name: str) -> AbstractContextManager[object]:
    """A named range: of torch's profiler while it records, otherwise of NVTX, for Nsight Systems (on ROCm of roctx, for
    rocprof).

    Both profilers use CUPTI, which serves one of them at a time.
    """
    torch = sys.modules.get("torch")
    if torch is None:
        return _NO_RANGE
    if torch.autograd._profiler_enabled():
        return torch.profiler.record_function(name)
    return torch.cuda.nvtx.range(name) if torch.cuda.is_initialized() else _NO_RANGE


def name_of(device: torch.device) -> str | None:
    """The GPU's product name, or None for another device."""
    if device.type != "cuda":
        return None
    import torch

    return torch.cuda.get_device_name(device)


def has_nccl() -> bool:
    """Whether the world's process group uses NCCL for device tensors."""
    import torch.distributed as dist

    return "nccl" in str(dist.get_backend_config())


class _Memory:
    """Keeps the tensor alive while an array uses its memory."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        shape, data = (tensor.nbytes,), (tensor.data_ptr(), False)
        self.__array_interface__ = {"version": 3, "shape": shape, "typestr": "|u1", "data": data}


def host_bytes(tensor: Tensor) -> np.ndarray:
    """View the memory of a contiguous host tensor of any dtype as uint8 (bytes,), for numpy and MPI.

    `Tensor.numpy` is not used because torch never again resizes a storage that numpy has seen, as
    `hpcrl.engine.offload` does. Raises ValueError for a tensor that is not in host memory.
    """
    if tensor.device.type != "cpu":
        raise ValueError(f"expected a tensor in host memory, found one on {tensor.device}")
    if not tensor.nbytes:
        return np.empty(0, np.uint8)  # its address is 0, for which numpy 2.2 raises
    return np.asarray(_Memory(tensor))


def explain_out_of_memory(
    error: BaseException, rank: int, here: RankStatus, advice: Callable[[], str], snapshot: Path | None
) -> torch.OutOfMemoryError:
    """`error` with the rank, its phase, the memory allocated there, `advice()`, and the path of the memory snapshot.

    Args:
        snapshot: the file to write; None if allocations are not recorded.
    """
    import torch

    allocated, reserved = take_peak_bytes()
    parts = [
        str(error).split(" If reserved")[0],  # the rest is advice that is followed already
        f"rank {rank} ({here.role or 'no role'}, {here.phase}) had at most {allocated / GIB:.2f} GiB allocated and "
        f"{reserved / GIB:.2f} GiB reserved in this phase",
        advice(),
        _snapshot(snapshot),
    ]
    return torch.OutOfMemoryError("; ".join(part for part in parts if part)).with_traceback(error.__traceback__)


def _snapshot(path: Path | None) -> str:
    if path is None:
        return "run.memory_snapshot=true writes a memory snapshot next time"
    try:
        is_written = dump_memory_history(path)
    except (OSError, RuntimeError) as error:
        return f"the memory snapshot could not be written: {error}"
    return f"memory snapshot: {path}, to be opened at https://pytorch.org/memory_viz" if is_written else ""


class MegatronRanges:
    """Replacement of megatron's timers (`config.timers`) that opens a profiler range where a timer would run, with its
    name.

    The schedules start and stop 'forward-compute' and 'backward-compute' once per micro-batch, and 'forward-recv' and
    similar timers for each transfer between pipeline stages.
    """

    def __init__(self) -> None:
        self._ranges: dict[str, _Range] = {}

    def __call__(self, name: str, log_level: int = 0) -> _Range:
        if name not in self._ranges:
            self._ranges[name] = _Range(name)
        return self._ranges[name]


class _Range:
    def __init__(self, name: str) -> None:
        self._name = name
        self._open = ExitStack()

    def start(self, barrier: bool = False) -> None:
        self._open.enter_context(annotated(self._name))

    def stop(self, barrier: bool = False) -> None:
        self._open.close()
