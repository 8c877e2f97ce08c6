"""Modules that have moved: an old name raises ImportError with the new one. Those that users' files name still work.

The names are those before the folders were redrawn, in November 2026. `import hpcrl` imports this module.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module, util
from importlib.machinery import ModuleSpec
from types import CodeType, ModuleType

# old folder or module -> new one, below hpcrl; the longest name that fits counts
NAMES: dict[str, str] = {}  # TABLE

# still imported by users' files, or run by `python -m`
KEPT = ("rollout.agent.tools", "telemetry.curves", "telemetry.scalars", "telemetry.summary")


def new_name(old: str) -> str | None:
    """The full new name of the full name of an old module or folder; None if it has not moved."""
    package, *parts = old.split(".")
    for end in range(len(parts), 0, -1):
        new = NAMES.get(".".join(parts[:end]))
        if new is not None and package == __package__:
            return ".".join([package, new, *parts[end:]])
    return None


class OldNames:
    """The last finder of `sys.meta_path`, and the loader of what it finds."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Raises ImportError for a module that has moved."""
        new = new_name(fullname)
        if new is None:
            return None
        old = fullname.partition(".")[2]
        is_folder = any(name.startswith(f"{old}.") for name in (*NAMES, *KEPT))
        if not is_folder and old not in KEPT:
            raise ImportError(f"{fullname} is now {new}", name=fullname)
        return ModuleSpec(fullname, self, is_package=is_folder)  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> None:
        """Python makes an empty module."""

    def exec_module(self, module: ModuleType) -> None:
        """Replace the empty module by the new one. An old folder stays empty: it is imported for its modules only."""
        if module.__spec__ is not None and not module.__spec__.submodule_search_locations is not None:
            sys.modules[module.__name__] = import_module(str(new_name(module.__name__)))

    def get_code(self, fullname: str) -> CodeType | None:
        """The code of the new module, for `python -m`."""
        spec = util.find_spec(str(new_name(fullname)))
        return spec.loader.get_code(spec.name) if spec is not None else None  # type: ignore[union-attr]
