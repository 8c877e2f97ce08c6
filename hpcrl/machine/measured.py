"""Machine files that `hpcrl check --job --machine` writes."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from hpcrl.config import yaml_core
from hpcrl.config.yaml_core import ConfigError
from hpcrl.machine.machine_file import Machine
from hpcrl.sandbox.new_files import draft_of

DIGITS = 3  # that measurements are good for


def check_target(path: str, option: str = "--machine") -> None:
    """Raise ConfigError, one line, if a machine file cannot be written there. option: that names it."""
    target = Path(path)
    if target.suffix not in (".yaml", ".yml"):
        raise ConfigError(f"{option}: found {path!r}, expected the name of a YAML file, such as machine.yaml")
    if target.is_dir():
        raise ConfigError(f"{option}: {path} is a folder; name a file in it")
    if not target.parent.is_dir():
        raise ConfigError(f"{option}: there is no folder {target.parent}; create it, or name another file")
    try:
        with tempfile.TemporaryFile(dir=target.parent):
            pass
    except OSError as error:
        raise ConfigError(f"{option}: {target.parent} cannot be written to: {error.strerror}") from None


def save(path: str, figures: Mapping[str, Any]) -> str:
    """Write the machine file of measured figures, and return its name. An existing file is replaced atomically.

    Raises ConfigError, one line, if the figures are no machine, or if the file cannot be written.
    """
    target = Path(path)
    machine = {"name": target.stem, **_rounded(figures)}
    text = yaml_core.dump(machine)
    try:
        Machine.model_validate(yaml_core.parse(text, path).plain())
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        raise ConfigError(f"measured {key}={first['input']!r}: {first['msg']}; measure again") from None
    try:
        with draft_of(target) as draft:
            draft.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--machine: {path} cannot be written: {error.strerror}") from None
    return path


def _rounded(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _rounded(inner) for key, inner in value.items()}
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value
