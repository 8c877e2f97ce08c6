"""Live tensor bytes, counted: every storage that a torch operation gave back and that is still held."""

from __future__ import annotations

import gc
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Counts the storages that operations give back while it is entered, backward passes included, but for those under
    the tensors `apart`.

    A storage counts once, whatever views it has, with the size that it has when it is asked for. What an operation
    allocates and frees inside itself is not seen.
    """

    def __init__(self, apart: Iterable[Tensor] = ()) -> None:
        super().__init__()
        # Address of a storage -> weak reference to it, which keeps the address taken.
        self._apart = {each.untyped_storage()._cdata: each.untyped_storage()._weak_ref() for each in apart}
        self._made: dict[int, int] = {}
        self._bound = 0  # bytes at most now: those of the last count and all made since, freed or not
        self.peak = 0  # bytes at once at most
        self.largest = 0  # bytes of the largest storage

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                storage = leaf.untyped_storage()
                if storage._cdata not in self._apart and storage._cdata not in self._made:
                    self._made[storage._cdata] = storage._weak_ref()
                    self.largest = max(self.largest, storage.nbytes())
                    self._bound += storage.nbytes()
        if self._bound > self.peak:
            self.peak = max(self.peak, self.live())
        return result

    def live(self) -> int:
        """Bytes now."""
        total = 0
        for address, weak in list(self._made.items()):
            storage = torch.UntypedStorage._new_with_weak_ptr(weak)
            if storage is None:
                torch.UntypedStorage._free_weak_ref(weak)
                del self._made[address]
            else:
                total += storage.nbytes()
        self._bound = total
        return total

    def restart_peak(self) -> None:
        self.peak = self.live()


def all_tensors() -> list[Tensor]:
    """Of this process, as far as Python knows them."""
    return [each for each in gc.get_objects() if issubclass(type(each), Tensor)]
