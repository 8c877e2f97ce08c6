"""The device of this process, and patches with which megatron-core runs on a CPU.

Megatron refers to CUDA in four ways: `torch.cuda.current_device()`, `device="cuda"` literals, `.cuda()`, and checks
such as `grad.type() == "torch.cuda.FloatTensor"`. `install` replaces the first one permanently; the context
`cpu_bridge` rewrites the others. The context costs about 1.6 us per torch call, so it surrounds construction, optimizer
step and checkpoint, never forward and backward. On a machine with CUDA both do nothing.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from importlib import metadata
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

# Modules that megatron-core 0.16 imports and does not use on a CPU. 0.19 derives classes from classes in them.
OPTIONAL = ("torch.distributed._tensor", "torch.distributed.tensor", "torch.utils.tensorboard", "triton")
UNUSED = ("torch.distributed.checkpoint", "torch.utils.cpp_extension")  # its import fails without these
_CPU = torch.device("cpu")
_in_place_of_cuda = _CPU
_installed = False


def device() -> torch.device:
    """The device of the weights and activations of this process."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else _in_place_of_cuda


@contextlib.contextmanager
def in_place_of_cuda(device: torch.device) -> Iterator[None]:
    """Context in which this process uses `device` if there is no CUDA, for tests of tensors that are not on the CPU."""
    global _in_place_of_cuda
    install()
    before, _in_place_of_cuda = _in_place_of_cuda, device
    make_gather_buffer()
    try:
        yield
    finally:
        _in_place_of_cuda = before
        make_gather_buffer()


def import_megatron() -> None:
    """Import megatron-core. Call it before any other import of the package.

    On the CPU, it imports without torch.compile, which costs a second of imports and needs a C++ compiler at run time,
    and without optional modules such as DTensor, which cost another two seconds. Transformer Engine, whose modules and
    optimizers need CUDA, then stays impossible to import.
    """
    if torch.cuda.is_available():
        return
    sys.modules.setdefault("transformer_engine", None)  # type: ignore[arg-type]  # None: the import fails
    # megatron imports this module, which warns if there is a CUDA toolkit and no GPU, as on a login node
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    optimize_without_dynamo()
    compiler = torch.compile
    torch.compile = lambda function=None, **_: function or (lambda wrapped: wrapped)  # type: ignore[assignment]
    try:
        can_do_without = metadata.version("megatron-core").startswith("0.16.")
        optional, unused = (OPTIONAL, UNUSED) if can_do_without else ((), ())
        with blocked_imports(*optional), empty_modules(*unused):
            import megatron.core

            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # "Apex is not installed", as in `hpcrl.model.build`
                import megatron.core.models.gpt.gpt_layer_specs  # noqa: F401
    finally:
        torch.compile = compiler


def install() -> None:
    """Patch megatron-core for this machine. Call it before any model is built; later calls do nothing."""
    global _installed
    if _installed:
        return
    _installed = True
    if not torch.cuda.is_available():
        _install_on_cpu()
    from megatron.core.tensor_parallel import layers, random

    from hpcrl.kernels.fp32_product import FusedWeightGradient
    from hpcrl.runtime import megatron_versions

    megatron_versions.install()
    if not layers._grad_accum_fusion_available:  # Apex is not installed
        layers._grad_accum_fusion_available = True
        layers.fused_weight_gradient_mlp_cuda = FusedWeightGradient  # type: ignore[attr-defined]
    # no layer draws random numbers, because there is no dropout, so there are no random states to save and restore
    random._CUDA_RNG_STATE_TRACKER, random._CUDA_RNG_STATE_TRACKER_INITIALIZED = _NoRandomStates(), True
    random._get_all_rng_states = lambda: ()  # type: ignore[assignment,return-value]
    random._set_all_rng_states = lambda *states: None
    random._fork_rng = contextlib.nullcontext  # type: ignore[assignment]
    make_gather_buffer()


def make_gather_buffer() -> None:
    """Make an empty buffer, into which sequence parallelism gathers a layer's input. It is no other parallel state."""
    from megatron.core import parallel_state

    parallel_state._GLOBAL_MEMORY_BUFFER = None
    parallel_state._set_global_memory_buffer()


def _install_on_cpu() -> None:
    torch.cuda.current_device = device  # type: ignore[assignment,return-value]
    torch.cuda.synchronize = lambda device=None: None
    torch.cuda.current_stream = lambda device=None: None  # type: ignore[assignment,return-value]  # read, not used
    with warnings.catch_warnings():
        # "Transformer Engine and Apex are not installed": expected on the CPU, and shown by `hpcrl check`.
        warnings.simplefilter("ignore")
        from megatron.core.pipeline_parallel import schedules
        from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
    # The schedules make one device="cuda" scalar per call, around all of forward and backward.
    schedules.torch = _TorchWithoutCuda()  # type: ignore[attr-defined]
    # Otherwise the constructor of megatron's dispatcher, which is not used, makes a CUDA stream.
    MoEAlltoAllTokenDispatcher.cuda_dtoh_stream = object()


def cpu_bridge() -> contextlib.AbstractContextManager[Any]:
    """Context in which torch calls with a CUDA device use the device of this process."""
    return contextlib.nullcontext() if torch.cuda.is_available() else _CudaMeansDevice(_in_place_of_cuda)


@contextlib.contextmanager
def meta_bridge() -> Iterator[None]:
    """Context in which torch creates all tensors on the meta device, whatever device is requested."""
    with torch.device("meta"), _AllIsMeta():
        yield


class _NoRandomStates:
    """Replaces megatron's `CudaRNGStatesTracker`. Transformer Engine calls the methods other than `fork`."""

    def fork(self, name: str = "") -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def is_initialized(self) -> bool:
        return False

    def get_states(self) -> dict[str, torch.Tensor]:
        return {}

    def set_states(self, states: dict[str, torch.Tensor]) -> None:
        pass


class _CudaMeansDevice(TorchFunctionMode):
    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.cuda:
            return args[0].to(self._device)
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return f"torch.cuda.{func(*args).rpartition('.')[2]}"
        if "device" in kwargs and _is_cuda(kwargs["device"]):
            kwargs = {**kwargs, "device": self._device}
        elif func is torch.Tensor.to and len(args) > 1 and _is_cuda(args[1]):
            args = (args[0], self._device, *args[2:])
        return func(*args, **kwargs)


class _AllIsMeta(TorchFunctionMode):
    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.cuda:
            return args[0]
        return func(*args, **({**kwargs, "device": "meta"} if kwargs.get("device") is not None else kwargs))


class _TorchWithoutCuda(types.ModuleType):
    """The torch module, with a `zeros` that uses the device of this process in place of CUDA."""

    def __init__(self) -> None:
        super().__init__("torch")

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    @staticmethod
    def zeros(*size: Any, device: Any = None, **kwargs: Any) -> torch.Tensor:
        return torch.zeros(*size, device=_in_place_of_cuda if _is_cuda(device) else device, **kwargs)


def _is_cuda(device: object) -> bool:
    if isinstance(device, torch.device):
        return device.type == "cuda"
    return isinstance(device, str) and device.startswith("cuda")


@contextlib.contextmanager
def blocked_imports(*names: str) -> Iterator[None]:
    """Context in which these modules cannot be imported, unless they are loaded already."""
    kept_out = [name for name in names if name not in sys.modules]
    sys.modules.update(dict.fromkeys(kept_out))  # type: ignore[arg-type]  # None: the import fails
    try:
        yield
    finally:
        for name in kept_out:
            sys.modules.pop(name, None)


@contextlib.contextmanager
def empty_modules(*names: str) -> Iterator[None]:
    """Context in which these modules are modules whose every name is None, unless they are loaded already."""
    stand_ins = {name: _EmptyModule(name) for name in names if name not in sys.modules}
    sys.modules.update(stand_ins)
    try:
        yield
    finally:
        for name, stand_in in stand_ins.items():
            del sys.modules[name]
            package, _, last = name.rpartition(".")
            if vars(sys.modules[package]).get(last) is stand_in:
                delattr(sys.modules[package], last)


class _EmptyModule(types.ModuleType):
    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


def optimize_without_dynamo() -> None:
    """Keep torch's optimizers from importing torch._dynamo, which takes a second and only marks what not to trace.

    Call it before an optimizer is created. Nothing is compiled on the CPU.
    """
    for method in vars(torch.optim.Optimizer).values():
        if function := getattr(method, "__wrapped__", None):
            function.__dynamo_disable = function  # torch._disable_dynamo reads this first
    for optimizer in (torch.optim.Adam, torch.optim.SGD):
        if step := getattr(optimizer.step, "__wrapped__", None):
            optimizer.step = _step_without_dynamo(step)  # type: ignore[method-assign]


def _step_without_dynamo(step: Callable[..., Any]) -> Callable[..., Any]:
    """As torch's `_use_grad_for_differentiable`, without its graph breaks."""

    @functools.wraps(step)
    def without_dynamo(optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        with torch.set_grad_enabled(optimizer.defaults["differentiable"]):
            return step(optimizer, *args, **kwargs)

    return without_dynamo
