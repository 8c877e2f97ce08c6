"""Short notes between ranks from any thread, where MPI is for the main thread alone."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed import Store


class KeyValueStore:
    """Texts by key in rank 0's store, over a connection of its own, which one thread uses at a time."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._lock = threading.Lock()

    def set(self, key: str, text: str) -> None:
        with self._lock:
            self._store.set(key, text)

    def get(self, key: str) -> str | None:
        """The text, or None where nobody has posted it yet. Does not wait."""
        with self._lock:
            return self._store.get(key).decode() if self._store.check([key]) else None

    def delete(self, key: str) -> None:
        with self._lock:
            self._store.delete_key(key)
