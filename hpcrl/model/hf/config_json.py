"""config.json of a Hugging Face directory; without torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hpcrl.model.hf.families import shape_from_hf
from hpcrl.model.shape import ModelShape
from hpcrl.runtime.exits import InputError

CONFIG = "config.json"


def read_shape(folder: Path) -> ModelShape:
    """The shape that config.json of `folder` describes."""
    return shape_from_hf(read_config(folder), str(folder / CONFIG))


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of `folder`."""
    path = folder / CONFIG
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read ({error}); name a directory that save_pretrained() made") from error
    if not isinstance(config, dict):
        raise InputError(f"{path} has no keys; name a directory that save_pretrained() made")
    return config
