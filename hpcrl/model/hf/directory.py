"""A Hugging Face directory of safetensors files, read into a rank's weights.

Training does not read such directories yet: `model.path` is refused, and only config.json is read in a job, for
TensorRT-LLM.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from hpcrl.launch.exits import InputError
from hpcrl.model.build import copy_boxes
from hpcrl.model.hf.llama import Read, from_hf, shape_from_hf
from hpcrl.model.params import shards
from hpcrl.model.shape import ModelShape

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


def read_shape(folder: Path) -> ModelShape:
    """The shape that config.json of `folder` describes."""
    try:
        return shape_from_hf(read_config(folder), str(folder / CONFIG))
    except KeyError as error:
        raise InputError(
            f"{folder / CONFIG} has no {error}; expected a Llama's, as save_pretrained() writes"
        ) from error


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


class Safetensors:
    """`directory(name)` reads one whole tensor."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        try:
            if (folder / INDEX).exists():
                self._file_of = json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"]
            else:
                with safe_open(folder / SINGLE, "pt") as file:
                    self._file_of = dict.fromkeys(file.keys(), SINGLE)
        except (OSError, ValueError, KeyError, SafetensorError) as error:
            raise InputError(f"{folder}: {error}; expected {SINGLE} or {INDEX} beside config.json") from error

    def __call__(self, name: str) -> Tensor:
        if name not in self._file_of:
            raise InputError(f"{self._folder}: there is no tensor {name}; is this a Llama's directory?")
        path = self._folder / self._file_of[name]
        try:
            with safe_open(path, "pt") as file:
                return file.get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise InputError(f"{path}: {error}; expected {name} in it: copy the directory again") from error


def load_weights(
    shape: ModelShape, read: Read, weights: Mapping[str, Tensor], *, tp_rank: int = 0, tp_size: int = 1
) -> None:
    """Copies this rank's slices of the tensors that `read(their name)` gives into an engine's `weights`, and casts."""
    mine = {shard.name: shard for shard in shards(shape, tp_rank=tp_rank, tp_size=tp_size, pp_rank=0, pp_size=1)}
    for name, whole in from_hf(shape, read):
        shard = mine[name]
        if tuple(whole.shape) != shard.global_shape:
            raise InputError(f"{name} is {tuple(whole.shape)} in the files and {shard.global_shape} by config.json")
        copy_boxes(whole, weights[name], shard)
