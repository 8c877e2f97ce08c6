"""The device of this process, and the bridge that lets megatron-core 0.16 run on a CPU.

Megatron names CUDA in four ways: `torch.cuda.current_device()`, `device="cuda"` literals, `.cuda()`, and checks such as
`grad.type() == "torch.cuda.FloatTensor"`. `install` answers the first for good; `cpu_bridge` rewrites the others while
it is entered. It costs about 1.6 us per torch call, so it surrounds construction, optimizer step and checkpoint, never
forward and backward. On a machine with CUDA both do nothing.
"""

from __future__ import annotations

import contextlib
import types
import warnings
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_CPU = torch.device("cpu")
_installed = False


def device() -> torch.device:
    """Where weights and activations of this process live."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else _CPU


def install() -> None:
    """Prepare megatron-core for this machine. Call it before any model is built; calling it again does nothing."""
    global _installed
    if _installed or torch.cuda.is_available():
        return
    _installed = True
    torch.cuda.current_device = lambda: _CPU  # type: ignore[assignment,return-value]
    torch.cuda.synchronize = lambda device=None: None
    with warnings.catch_warnings():
        # "Transformer Engine and Apex are not installed": expected on the CPU, and said by `hpcrl check`.
        warnings.simplefilter("ignore")
        from megatron.core.pipeline_parallel import schedules
    # The schedules make one device="cuda" scalar per call, around all of forward and backward.
    schedules.torch = _TorchOnCpu()  # type: ignore[attr-defined]


def cpu_bridge() -> contextlib.AbstractContextManager[Any]:
    """Context in which torch calls that ask for CUDA get the CPU."""
    return contextlib.nullcontext() if torch.cuda.is_available() else _CudaMeansCpu()


class _CudaMeansCpu(TorchFunctionMode):
    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return func(*args).replace("torch.", "torch.cuda.", 1)
        if "device" in kwargs and _is_cuda(kwargs["device"]):
            kwargs = {**kwargs, "device": _CPU}
        elif func is torch.Tensor.to and len(args) > 1 and _is_cuda(args[1]):
            args = (args[0], _CPU, *args[2:])
        return func(*args, **kwargs)


class _TorchOnCpu(types.ModuleType):
    """The torch module with one factory that takes CUDA for the CPU."""

    def __init__(self) -> None:
        super().__init__("torch")

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    @staticmethod
    def zeros(*size: Any, device: Any = None, **kwargs: Any) -> torch.Tensor:
        return torch.zeros(*size, device=_CPU if _is_cuda(device) else device, **kwargs)


def _is_cuda(device: object) -> bool:
    if isinstance(device, torch.device):
        return device.type == "cuda"
    return isinstance(device, str) and device.startswith("cuda")
