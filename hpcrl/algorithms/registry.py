"""Functions by name, as the YAML names them."""

from __future__ import annotations

import difflib
from typing import Generic, TypeVar

Entry = TypeVar("Entry")


class UnknownName(ValueError):
    """A name that the user wrote and nobody registered; the command line prints it as one line."""

    user_error = True


class Registry(Generic[Entry]):
    """name -> entry; `kind` says in messages what the entries are."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._entries: dict[str, Entry] = {}

    def add(self, name: str, entry: Entry) -> None:
        if name in self._entries:
            raise ValueError(f"{self.kind} {name!r} is registered already; give this one another name")
        self._entries[name] = entry

    def get(self, name: str) -> Entry:
        if name not in self._entries:
            near = difflib.get_close_matches(name, self._entries, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise UnknownName(f"unknown {self.kind} {name!r}; {hint}there are {', '.join(self.names())}")
        return self._entries[name]

    def names(self) -> list[str]:
        return sorted(self._entries)
