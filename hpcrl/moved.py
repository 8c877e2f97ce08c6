"""Folders that the package had before November 2026: an import from one raises ModuleNotFoundError with today's place.

Modules that users' files and commands name still work. `import hpcrl` imports this module, also in programs under test,
so it imports nothing that Python has not loaded yet.
"""

from __future__ import annotations

import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import CodeType, ModuleType

# below hpcrl: old folder -> where most of its modules are
FOLDERS = {
    "grid": "runtime",
    "reshard": "engine.refit",
    "checkpoint": "engine.checkpoint",
    "tracing": "observe.trace",
    "report": "observe.report",
    "viewer": "observe.report",
    "telemetry": "observe.record",
    "plan": "forecast.memory",
    "predict": "forecast.time",
    "rollout_source": "run.rollouts",
    "rollout.native": "rollout.engines.native",
    "rollout.tensorrt_llm": "rollout.engines.tensorrt_llm",
    "rollout.agent": "rollout.environments",
    "model.hf": "model",
    "data.sources": "data",
}
COMMANDS = {  # module -> its module today, and what `python -m` of it is now
    "curves": ("observe.report.pictures", "report --out curves.png"),
    "scalars": ("observe.report.tables", "report --scalars"),
    "summary": ("observe.report.tables", "report --text"),
}
KEPT = {  # old module -> new module, which is imported in its place
    "model.blocks.absent": "model.blocks.block",
    "model.blocks.rope": "model.blocks.attention",
    "rollout.agent.tools": "rollout.environments.tools",
    "workers.critic": "workers.actor",
    **{f"{folder}.{name}": COMMANDS[name][0] for folder in ("observe.report", "telemetry") for name in COMMANDS},
}
PROGRAM = """
import sys
from hpcrl.cli import main
print("hpcrl: warning: python -m {old} is now hpcrl {command}", file=sys.stderr)
words = [word.removeprefix("--sft=") for word in sys.argv[1:]]
main([*"{command}".split(), *(word for word in words if word != "--sft")])
"""


def new_name(old: str) -> str | None:
    """The full name of what the old full name of a module names today; None if it is not in an old folder.

    A module keeps its name where it is found below another folder; else the new folder stands for it.
    """
    package, _, inside = old.partition(".")
    folder, _, module = inside.rpartition(".")
    if package == __package__ and inside in KEPT:
        return f"{package}.{KEPT[inside]}"
    if package != __package__ or folder not in FOLDERS:
        return None
    import os

    root, beside = os.path.dirname(__file__), FOLDERS[folder].replace(".", os.sep)
    top = os.path.join(root, beside.split(os.sep)[0])
    walk = () if module == "command" else os.walk(top)  # each command has one of this name
    places = [os.path.relpath(path, root) for path, _, files in walk if f"{module}.py" in files]
    place = min(places, key=lambda path: (path != beside, path), default=None)
    return f"{package}.{FOLDERS[folder]}" if place is None else ".".join([package, *place.split(os.sep), module])


class OldNames:
    """The last finder of `sys.meta_path`, and the loader of what it finds."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Raises ModuleNotFoundError, with the new name, for a module of a folder that has moved."""
        package, _, inside = fullname.partition(".")
        if package != __package__:
            return None
        from importlib.machinery import ModuleSpec

        if inside in FOLDERS:
            return ModuleSpec(fullname, self, is_package=True)  # type: ignore[arg-type]
        if inside in KEPT:
            return ModuleSpec(fullname, self)  # type: ignore[arg-type]
        new = new_name(fullname)
        if new is None:
            return None
        is_module = new.rpartition(".")[2] == fullname.rpartition(".")[2]
        raise ModuleNotFoundError(f"{fullname} is now {'' if is_module else 'in '}{new}", name=fullname)

    def create_module(self, spec: ModuleSpec) -> None:
        """Python makes an empty module."""

    def exec_module(self, module: ModuleType) -> None:
        """Put the new module in the place of an old one. An old folder stays empty: its modules are asked for."""
        from importlib import import_module

        new = KEPT.get(module.__name__.partition(".")[2])
        if new is not None:
            sys.modules[module.__name__] = import_module(f"{__package__}.{new}")

    def get_code(self, fullname: str) -> CodeType | None:
        """The code of the new module, or of the command that has taken its place, for `python -m`."""
        from importlib.util import find_spec

        name = fullname.rpartition(".")[2]
        if name in COMMANDS:
            return compile(PROGRAM.format(old=fullname, command=COMMANDS[name][1]), fullname, "exec")
        spec = find_spec(new_name(fullname) or fullname)
        return spec.loader.get_code(spec.name) if spec is not None else None  # type: ignore[union-attr]


sys.meta_path.append(OldNames())  # type: ignore[arg-type]
