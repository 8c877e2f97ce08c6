"""Functions by name, as the YAML names them; and modules that are imported when they are first used."""

from __future__ import annotations

import difflib
from importlib import import_module
from types import ModuleType
from typing import Any, Generic, TypeVar

Entry = TypeVar("Entry")


class UnknownName(ValueError):
    """A name in the config that is not registered; the command line prints it as one line."""

    user_error = True


class Registry(Generic[Entry]):
    """name -> entry. `kind` names the entries in messages; importing `modules` registers the built-in ones."""

    def __init__(self, kind: str, *modules: str) -> None:
        self.kind = kind
        self._modules = modules
        self._entries: dict[str, Entry] = {}

    def add(self, name: str, entry: Entry) -> None:
        if name in self._entries:
            raise ValueError(f"{self.kind} {name!r} is registered already; choose another name")
        self._entries[name] = entry

    def get(self, name: str) -> Entry:
        known = self.entries()
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise UnknownName(f"unknown {self.kind} {name!r}; {hint}there are {', '.join(self.names())}")
        return known[name]

    def names(self) -> list[str]:
        return sorted(self.entries())

    def entries(self) -> dict[str, Entry]:
        for module in self._modules:
            import_module(module)
        return self._entries


class LazyModule(ModuleType):
    """A module that is imported when one of its attributes is first read.

    The files of algorithms declare parameters, which are read on login nodes without torch.
    """

    def __getattr__(self, name: str) -> Any:
        module = import_module(self.__name__)
        self.__dict__.update({key: value for key, value in vars(module).items() if not key.startswith("__")})
        return getattr(module, name)
