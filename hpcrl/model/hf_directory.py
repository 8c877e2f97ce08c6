"""A Hugging Face directory's safetensors files: each rank reads the slices that it needs, and writes whole tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from hpcrl.model.architecture import shape_from_yaml, with_training
from hpcrl.model.families.config_json import CONFIG, read_shape
from hpcrl.model.hf_files import INDEX, SINGLE, differing, slices, stack_of
from hpcrl.model.params import Shard
from hpcrl.model.shape import ModelShape
from hpcrl.runtime.exits import InputError
from hpcrl.sandbox.foreign_files import named, read_json

if TYPE_CHECKING:
    from hpcrl.config.schema import ModelConfig

# Fields of a shape in which a directory's model may differ: its weights mean the same
NOT_WEIGHTS = ("max_position_embeddings", "windows", "init_std", "family", "tokenizer_size")


def shape_of(model: ModelConfig, num_tokens: int) -> ModelShape:
    """Return the shape described by a section `model:`, from its Hugging Face directory if it names one.

    `num_tokens`: ids of the tokenizer; 0: not known. Raises InputError also if the directory's files do not fit the
    shape.
    """
    if model.path is None:
        shape = shape_from_yaml(model, num_tokens)
    else:
        folder = Path(model.path)
        shape = read_shape(folder)
        if shape.vocab_size < num_tokens:
            raise InputError(
                f"{folder / CONFIG}: vocab_size={shape.vocab_size} is below the tokenizer's {num_tokens}; use the "
                "tokenizer of this model"
            )
        Safetensors(folder).check(shape)
    if model.softmax_vocab == "tokenizer" and num_tokens:
        shape = replace(shape, tokenizer_size=num_tokens)
    return with_training(shape, model)


def open_weights(folder: Path, shape: ModelShape) -> Safetensors:
    """Open a directory with a model of this `shape`. Raises InputError for a model that computes something else."""
    found = read_shape(folder)
    for field in fields(ModelShape):
        found_value, expected = getattr(found, field.name), getattr(shape, field.name)
        if field.name not in NOT_WEIGHTS and found_value != expected:
            raise InputError(
                f"{folder / CONFIG} describes another model: {field.name} is {found_value}, expected {expected}"
            )
    shape.check_windows(found, str(folder / CONFIG))
    source = Safetensors(folder)
    source.check(shape)
    return source


class Safetensors:
    """The tensors of a directory's memory-mapped files."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._open: dict[str, Any] = {}
        try:
            if (folder / INDEX).exists():
                found = read_json(folder / INDEX, folder)["weight_map"]
                self._file_of = {str(name): str(file) for name, file in found.items()}
            else:
                self._file_of = dict.fromkeys(self._file(SINGLE).keys(), SINGLE)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError) as error:
            raise InputError(f"{folder}: {error}; expected {SINGLE} or {INDEX} beside {CONFIG}") from error

    def check(self, shape: ModelShape) -> None:
        """Raise InputError if the files do not fit this model, from their headers: no tensor is read."""
        problems = list(differing(shape, {name: tuple(self._slice(name).get_shape()) for name in self._file_of}))
        if problems:
            more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
            raise InputError(f"{self._folder}: {problems[0]}{more}; copy the directory again, or fix {CONFIG}")

    @torch.no_grad()
    def load(self, shape: ModelShape, shards: list[Shard], weights: Mapping[str, Tensor]) -> None:
        """Read a rank's parts of Megatron parameters into `weights`, by global names; padding rows become 0."""
        for shard in shards:
            out = weights[shard.name].view(shard.local_shape[0], -1)
            out.zero_()
            for hf_name, box in slices(shape, shard):
                name, number = stack_of(hf_name)
                source = self._slice(name)
                rows, cols = slice(*box.global_rows), slice(*box.global_cols)
                with self._named(name):
                    size, height = tuple(source.get_shape()), rows.stop - rows.start
                    if number is not None and size[1:] == shard.global_shape:
                        values = source[number, rows, cols]
                    elif number is not None:
                        values = source[number, cols, rows].T
                    else:
                        values = source[rows, cols] if len(size) == 2 else source[rows].reshape(height, -1)[:, cols]
                height, width = values.shape
                out[box.local_row : box.local_row + height, box.local_col : box.local_col + width].copy_(values)

    def _slice(self, name: str) -> Any:
        if name not in self._file_of:
            raise InputError(f"{self._folder}: no tensor {name}; copy the directory again")
        with self._named(name):
            return self._file(self._file_of[name]).get_slice(name)

    def _file(self, name: str) -> Any:
        if name not in self._open:
            path = self._folder / name
            if Path(name).name != name or not path.exists():  # the index is untrusted
                raise FileNotFoundError(f"no file {name} in {self._folder}")
            with named(path, self._folder) as opened:
                self._open[name] = safe_open(opened, "pt")
        return self._open[name]

    @contextmanager
    def _named(self, tensor: str) -> Iterator[None]:
        """Context that converts errors into an InputError with the name of the file."""
        try:
            yield
        except (OSError, SafetensorError) as error:
            path, reason = self._folder / self._file_of[tensor], " ".join(str(error).split())
            raise InputError(f"{path}: {reason}; expected {tensor} in it: copy the directory again") from error


def whole_tensors(parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of a file by name, from those of its `hf_shards`: matrices of a stacked tensor become one."""
    found: dict[str, list[Tensor]] = {}
    for name, part in parts.items():
        stack, number = stack_of(name)
        found.setdefault(stack, []).append(part if number is None else part.T)
    return {name: torch.stack(each) if name not in parts else each[0] for name, each in found.items()}
