"""Offload of weights, gradients and optimizer state to host memory between the phases of their role.

Tensors and megatron's views of its buffers stay valid objects: only the storages under them are emptied and filled
again. Read an offloaded tensor only inside `Offload.on_device`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from megatron.core.distributed import DistributedDataParallel
from torch import Tensor, UntypedStorage

from hpcrl.config.roles import HOST_BLOCK, Part
from hpcrl.engine.optim import optimizer_tensors
from hpcrl.runtime import accelerator, platform

if TYPE_CHECKING:
    from megatron.core.optimizer.optimizer import MegatronOptimizer


class HostMemory:
    """Host memory that grows to the largest request and is kept, because pinning takes long; pinned memory is copied at
    the speed of the bus.

    It is allocated in blocks of a power of two, because torch rounds pinned memory up to one: 33 GiB in one piece would
    take 64.
    """

    def __init__(self, *, pinned: bool) -> None:
        self._pinned = pinned
        self.blocks: list[Tensor] = []  # uint8 (HOST_BLOCK,)

    @property
    def nbytes(self) -> int:
        return HOST_BLOCK * len(self.blocks)

    def places(self, sizes: Iterable[int]) -> Iterator[list[Tensor]]:
        """Yield for each of `sizes`, in bytes, its own memory: consecutive parts of blocks, uint8. Equal sizes get
        equal places on each call."""
        block = start = 0
        for size in sizes:
            parts = []
            while size > 0:
                if block == len(self.blocks):
                    self.blocks.append(torch.empty(HOST_BLOCK, dtype=torch.uint8, pin_memory=self._pinned))
                part = self.blocks[block][start : start + size]
                parts.append(part)
                size -= len(part)
                block, start = (block, start + len(part)) if start + len(part) < HOST_BLOCK else (block + 1, 0)
            yield parts


class Offloadable:
    """Storages that are all on the device or all offloaded.

    Args:
        storages: the storages, evaluated on each unload, because an optimizer makes state at its first step.
        host: keeps their content; None: the content is lost.
        drop: called at each unload, frees what is made again from the content.
    """

    def __init__(
        self,
        storages: Callable[[], Sequence[UntypedStorage]],
        host: HostMemory | None,
        drop: Callable[[], None] = lambda: None,
    ) -> None:
        self._storages = storages
        self.host = host
        self._drop = drop
        self.is_unloaded = False
        self._unloaded: list[tuple[UntypedStorage, int]] = []  # with their sizes in bytes

    def unload(self) -> None:
        self.is_unloaded = True
        self._drop()
        self._unloaded = [(storage, storage.nbytes()) for storage in self._storages()]
        for content, copy in self._with_copies():
            copy.copy_(content, non_blocking=True)
        for storage, _ in self._unloaded:
            storage.resize_(0)

    def load(self) -> None:
        for storage, size in self._unloaded:
            storage.resize_(size)
        for content, copy in self._with_copies():
            content.copy_(copy, non_blocking=True)
        self._unloaded, self.is_unloaded = [], False

    def _with_copies(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield parts of the storages, uint8, with their places on the host."""
        if self.host is None:
            return
        places = self.host.places(size for _, size in self._unloaded)
        for (storage, _), place in zip(self._unloaded, places, strict=True):
            content = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
            yield from zip(content.split([len(part) for part in place]), place, strict=True)


class Offload:
    """The parts of one role's model that are offloaded except while they are in use."""

    def __init__(self, parts: Mapping[Part, Offloadable], device: torch.device) -> None:
        self._parts = parts
        self._device = device

    @property
    def host_bytes(self) -> int:
        """Host memory that is kept for offloaded parts."""
        return sum(part.host.nbytes for part in self._parts.values() if part.host)

    @contextmanager
    def on_device(self, *names: Part) -> Iterator[None]:
        """Context in which these parts are on the device; parts that it loaded are offloaded at its end.

        After an exception they stay on the device.
        """
        loaded = [part for name, part in self._parts.items() if name in names and part.is_unloaded]
        for part in loaded:
            part.load()
        yield
        self._unload(loaded)

    def unload(self) -> None:
        """Offload all parts for the first time, after the model is built."""
        self._unload(self._parts.values())

    def _unload(self, parts: Collection[Offloadable]) -> None:
        for part in parts:
            part.unload()
        if parts:
            # Other roles, and TensorRT-LLM, allocate blocks of other sizes.
            accelerator.release_cached_memory(self._device)


def storages_of(tensors: Iterable[Tensor], exclude: Iterable[UntypedStorage] = ()) -> list[UntypedStorage]:
    """Return the distinct storages under `tensors`, in their order, except those in `exclude`."""
    found = {storage._cdata: storage for storage in (tensor.untyped_storage() for tensor in tensors)}
    known = {storage._cdata for storage in exclude}
    return [storage for address, storage in found.items() if address not in known]


def offload_of(
    chunks: Sequence[torch.nn.Module],
    models: Sequence[torch.nn.Module],
    optimizer: MegatronOptimizer | None,
    names: Collection[Part],
) -> Offload:
    """Return the offload of a model's `chunks`, of megatron's wrappers `models` around them, which have the gradients,
    and of its optimizer."""
    device = platform.device()

    def parameters() -> list[UntypedStorage]:
        return storages_of(parameter.data for chunk in chunks for parameter in chunk.parameters())

    def gradients() -> list[UntypedStorage]:
        return storages_of(
            buffer.grad_data
            for model in models
            if isinstance(model, DistributedDataParallel)
            for buffer in (*model.buffers, *model.expert_parallel_buffers)
        )

    def state() -> list[UntypedStorage]:
        if optimizer is None:
            return []
        # fp32 weights belong to both the optimizer and the parameters; count them as parameters.
        return storages_of(optimizer_tensors(optimizer), exclude=[*parameters(), *gradients()])

    def drop_8bit_copies() -> None:
        """Free the 8-bit weights of Transformer Engine's layers, which the next pass makes again."""
        for module in (module for chunk in chunks for module in chunk.modules()):
            getattr(module, "_fp8_workspaces", {}).clear()

    pinned = device.type == "cuda"
    parts: dict[Part, Offloadable] = {
        "parameters": Offloadable(parameters, HostMemory(pinned=pinned), drop_8bit_copies),
        "gradients": Offloadable(gradients, None),  # each step zeroes them first
        "optimizer": Offloadable(state, HostMemory(pinned=pinned)),
    }
    return Offload({name: part for name, part in parts.items() if name in names}, device)
