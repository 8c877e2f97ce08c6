"""Weights, gradients and optimizer state that leave the device between the phases in which their role computes.

Tensors stay what they are, and so do megatron's views of its buffers: only the storages under them are emptied, and
filled again. A tensor that is away must not be read; whoever needs it asks `Offload.on_device` for it.
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
    """Host memory that grows to what was asked for at once, and is kept, since pinning it takes long; copies to and
    from pinned memory run at the speed of the bus.

    It comes in blocks of a power of two, for torch rounds pinned memory up to one: 33 GiB in one piece would take 64.
    """

    def __init__(self, *, pinned: bool) -> None:
        self._pinned = pinned
        self.blocks: list[Tensor] = []  # uint8 (HOST_BLOCK,)

    @property
    def nbytes(self) -> int:
        return HOST_BLOCK * len(self.blocks)

    def places(self, sizes: Iterable[int]) -> Iterator[list[Tensor]]:
        """For each of `sizes`, in bytes, a place of its own: parts of blocks, uint8, which follow one another. The same
        sizes have the same places every time."""
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
    """Storages that are all on the device, or all away.

    storages: those to be emptied, asked anew each time, since an optimizer makes state at its first step. host: keeps
    their content; None: it is lost, and they come back with whatever is in the memory.
    """

    def __init__(self, storages: Callable[[], Sequence[UntypedStorage]], host: HostMemory | None) -> None:
        self._storages = storages
        self.host = host
        self.is_away = False
        self._away: list[tuple[UntypedStorage, int]] = []  # with their sizes in bytes

    def leave(self) -> None:
        self.is_away = True
        self._away = [(storage, storage.nbytes()) for storage in self._storages()]
        for content, copy in self._with_copies():
            copy.copy_(content, non_blocking=True)
        for storage, _ in self._away:
            storage.resize_(0)

    def come_back(self) -> None:
        for storage, size in self._away:
            storage.resize_(size)
        for content, copy in self._with_copies():
            content.copy_(copy, non_blocking=True)
        self._away, self.is_away = [], False

    def _with_copies(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Parts of the storages, uint8, and their places on the host."""
        if self.host is None:
            return
        places = self.host.places(size for _, size in self._away)
        for (storage, _), place in zip(self._away, places, strict=True):
            content = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
            yield from zip(content.split([len(part) for part in place]), place, strict=True)


class Offload:
    """The parts of one role's model that are away unless they are asked for."""

    def __init__(self, parts: Mapping[Part, Offloadable], device: torch.device) -> None:
        self._parts = parts
        self._device = device

    @property
    def host_bytes(self) -> int:
        """Host memory that is kept for what is away."""
        return sum(part.host.nbytes for part in self._parts.values() if part.host)

    @contextmanager
    def on_device(self, *names: Part) -> Iterator[None]:
        """Inside it these parts are there; those that come for it leave at its end. An exception leaves them there."""
        coming = [part for name, part in self._parts.items() if name in names and part.is_away]
        for part in coming:
            part.come_back()
        yield
        self._send_away(coming)

    def leave(self) -> None:
        """For the first time, once the model is built."""
        self._send_away(self._parts.values())

    def _send_away(self, parts: Collection[Offloadable]) -> None:
        for part in parts:
            part.leave()
        if parts:
            # Other roles, and TensorRT-LLM, allocate blocks of other sizes.
            accelerator.release_cached_memory(self._device)


def storages_of(tensors: Iterable[Tensor], apart: Iterable[UntypedStorage] = ()) -> list[UntypedStorage]:
    """The distinct storages under `tensors`, in their order, without those `apart`."""
    found = {storage._cdata: storage for storage in (tensor.untyped_storage() for tensor in tensors)}
    known = {storage._cdata for storage in apart}
    return [storage for address, storage in found.items() if address not in known]


def offload_of(
    chunks: Sequence[torch.nn.Module],
    models: Sequence[torch.nn.Module],
    optimizer: MegatronOptimizer | None,
    names: Collection[Part],
) -> Offload:
    """Of a model's `chunks`, megatron's wrappers `models` around them, which have the gradients, and its optimizer."""
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
        # Weights in fp32 are the optimizer's own, and a part of the parameters here.
        return storages_of(optimizer_tensors(optimizer), apart=[*parameters(), *gradients()])

    def kept(storages: Callable[[], list[UntypedStorage]]) -> Offloadable:
        return Offloadable(storages, HostMemory(pinned=accelerator.pins_memory(device)))

    parts: dict[Part, Offloadable] = {
        "parameters": kept(parameters),
        "gradients": Offloadable(gradients, None),  # each step zeroes them first
        "optimizer": kept(state),
    }
    return Offload({name: part for name, part in parts.items() if name in names}, device)
