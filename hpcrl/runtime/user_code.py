"""Import of the user's Python files: samplers, losses, reward functions, tools."""

from __future__ import annotations

import importlib.util
import logging
import os
import sys
from hashlib import blake2b
from types import ModuleType

from hpcrl.runtime.exits import InputError

log = logging.getLogger(__name__)

PREFIX = "hpcrl_user_"  # of the modules' names


def has_imported() -> bool:
    """Whether this process has imported a file of the user's."""
    return any(name.startswith(PREFIX) for name in sys.modules)


def import_file(path: str | os.PathLike[str]) -> ModuleType:
    """Import a Python file, once in a process, and return its module. The file may import from its own folder.

    Raises ImportError if there is no such file, and any exception of the file itself.
    """
    file = os.path.realpath(path)
    name = f"{PREFIX}{blake2b(os.fsencode(file), digest_size=8).hexdigest()}"
    if name in sys.modules:
        return sys.modules[name]
    if not os.path.isfile(file):
        raise ImportError("no such file; name a Python file")
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ImportError("not a Python file; expected one that ends in .py")
    if os.path.dirname(file) not in sys.path:
        sys.path.insert(0, os.path.dirname(file))
    sys.modules[name] = module = importlib.util.module_from_spec(spec)  # dataclasses look up their module here
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def import_named(key: str, path: str) -> ModuleType | None:
    """Import a file that the config names under `key`, as `import_file` does.

    Returns None, with a warning, if the file needs torch, which is not installed here. Raises InputError, one line, for
    any other failure.
    """
    try:
        return import_file(path)
    except Exception as error:  # the file is the user's
        if isinstance(error, ModuleNotFoundError) and (error.name or "").split(".")[0] == "torch":
            log.warning("%s: %s needs torch, which is not installed here: its parameters are unchecked", key, path)
            return None
        raise InputError(f"{key}: {path} cannot be loaded: {type(error).__name__}: {error}; correct the file") from None
