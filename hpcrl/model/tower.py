"""The vision tower: transformers' module, its pictures divided over ranks, and features at the tokens.

A tower's features of a picture are (tokens, width): those for the embeddings, and after them those that are added to
the hidden states after the first decoder layers (DeepStack, Meng et al. 2024, arXiv:2406.04334).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch import Tensor
from torch.overrides import TorchFunctionMode

from hpcrl.batch.packing import balanced_assignment
from hpcrl.batch.ragged import ON_HOST

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from hpcrl.model.shape import ModelShape
    from hpcrl.model.vision import Vision


class WithoutRandomNumbers(TorchFunctionMode):
    """Context in which functions of `torch.nn.init` that draw leave tensors as they are."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.nn.init.normal_, torch.nn.init.uniform_, torch.nn.init.kaiming_uniform_):
            return kwargs["tensor"]
        return func(*args, **(kwargs or {}))


def build_tower(shape: ModelShape, dtype: torch.dtype) -> torch.nn.Module:
    """Build the tower on the default device; matrices get their values later."""
    from transformers.models.qwen2_5_vl import configuration_qwen2_5_vl, modeling_qwen2_5_vl
    from transformers.models.qwen3_vl import configuration_qwen3_vl, modeling_qwen3_vl

    assert shape.vision is not None
    options = {**shape.vision.tower}
    options.pop("model_type", None)
    if shape.family == "qwen2_5_vl":
        module, config = (
            modeling_qwen2_5_vl.Qwen2_5_VisionTransformerPretrainedModel,
            configuration_qwen2_5_vl.Qwen2_5_VLVisionConfig(**options),
        )
    else:
        options.setdefault("deepstack_visual_indexes", [])  # the class has others where the model has none
        module, config = modeling_qwen3_vl.Qwen3VLVisionModel, configuration_qwen3_vl.Qwen3VLVisionConfig(**options)
    with WithoutRandomNumbers():  # those of 700 million weights take seconds
        return module._from_config(config, dtype=dtype)


def encode(tower: torch.nn.Module, patches: Tensor, grids: Tensor, *, one_by_one: bool = False) -> Tensor:
    """Return features (tokens, width) of pictures, end to end.

    Args:
        patches: (P, patch width).
        grids: int64 (n, 3).
        one_by_one: encode one after the other, so that the features of a picture do not depend on the others, because
            matrix products round by their shapes.
    """
    if one_by_one and len(grids) > 1:
        parts = zip(patches.split(grids.prod(1).tolist()), grids.split(1), strict=True)
        return torch.cat([encode(tower, its_patches, grid) for its_patches, grid in parts])
    first = next(tower.parameters())
    output = tower(patches.to(first.dtype), grid_thw=grids)
    return torch.cat([output.pooler_output, *getattr(output, "deepstack_features", ())], dim=-1)


def divide(grids: np.ndarray, num_ranks: int) -> list[list[int]]:
    """Divide pictures over ranks, balanced by patches: numbers of the pictures of each rank, ascending."""
    rank_of = balanced_assignment(grids.prod(axis=1, dtype=np.int64), num_ranks)
    return [np.flatnonzero(rank_of == rank).tolist() for rank in range(num_ranks)]


def successive(numbers: list[int], patches: np.ndarray, most: int | None) -> list[list[int]]:
    """Divide the numbers of pictures into successive shares of at most `most` patches, or of one picture."""
    shares: list[list[int]] = []
    held = 0
    for number in numbers:
        held += int(patches[number])
        if not shares or (most is not None and held > most):
            shares.append([])
            held = int(patches[number])
        shares[-1].append(number)
    return shares


@dataclass(frozen=True)
class Division:
    """Ranks that divide pictures. is_split: each has a part of the features' gradient, rather than all of it."""

    group: ProcessGroup
    is_split: bool


def encode_divided(
    tower: torch.nn.Module,
    vision: Vision,
    grids: np.ndarray,
    pixels: Callable[[list[int]], Pixels],
    divisions: Sequence[Division],
    *,
    one_by_one: bool = False,
    max_patches: int | None = None,
) -> Tensor:
    """Return features (tokens, width) of all pictures, on every rank. Collective over the product of the groups; each
    picture is encoded by one rank.

    Args:
        grids: integers (n, 3).
        pixels: a function that returns the patches of this rank's pictures, given their numbers.
        one_by_one: as in `encode`.
        max_patches: the most patches on the device at a time, unless one picture has more.
    """
    sizes = [division.group.size() for division in divisions]
    num_ranks, mine = math.prod(sizes), 0
    for division, size in zip(divisions, sizes, strict=True):
        mine = mine * size + division.group.rank()
    parts = divide(grids, num_ranks)
    tokens = np.prod(grids, axis=1, dtype=np.int64) // vision.merge_size**2
    like = next(tower.parameters())
    if len(parts[mine]):
        shares = successive(parts[mine], grids.prod(axis=1, dtype=np.int64), max_patches)
        encoded = [
            encode(tower, own.patches.to(like.device), own.grids.to(like.device), one_by_one=one_by_one)
            for own in map(pixels, shares)
        ]
        features = torch.cat(encoded) if len(encoded) > 1 else encoded[0]
    else:  # a constant that has the tower's gradient, because every rank takes part in the collectives
        features = like.new_zeros(0, vision.feature_width) + sum(
            it.sum() * 0 for it in tower.parameters() if it.requires_grad
        )
    if num_ranks == 1:
        return features
    longest = max(int(tokens[part].sum()) for part in parts)
    gathered = torch.cat([features, features.new_zeros(longest - len(features), vision.feature_width)])
    for division in reversed(divisions):
        if division.group.size() > 1:
            gathered = gather_from_sequence_parallel_region(gathered, division.is_split, division.group)
    # Row of each token after gathering in rank order.
    rows = np.empty(int(tokens.sum()), np.int64)
    starts = tokens.cumsum() - tokens
    for rank, part in enumerate(parts):
        places = np.concatenate([np.arange(starts[it], starts[it] + tokens[it]) for it in part] or [rows[:0]])
        rows[places.astype(np.int64)] = rank * longest + np.arange(len(places))
    return gathered.index_select(0, torch.from_numpy(rows).to(gathered.device))


@dataclass(frozen=True)
class Pixels:
    """Pictures to encode. patches: fp32 (P, patch width), of all pictures end to end. grids: int64 (n, 3)."""

    patches: Tensor
    grids: Tensor

    def take(self, numbers: Sequence[int]) -> Pixels:
        sizes = self.grids.prod(1).tolist()
        parts = self.patches.split(sizes)
        return Pixels(torch.cat([parts[it] for it in numbers]), self.grids[list(numbers)])


@dataclass(frozen=True)
class PackedPictures:
    """The pictures of packed tokens, of which a rank has some; their contents stay on the host.

    rows: int64 (F,), this rank's placeholder tokens. sources: int64 (F,), the row of each among the features of the
    distinct pictures, end to end. features: (tokens, width), or None: to be computed from `pixels`.
    """

    rows: Tensor
    sources: Tensor
    features: Tensor | None = field(metadata=ON_HOST)
    pixels: Pixels | None = field(metadata=ON_HOST)

    def within(self, first: int, stop: int) -> PackedPictures:
        """Those of the tokens [first, stop), counted from `first`."""
        kept = ((self.rows >= first) & (self.rows < stop)).nonzero().squeeze(1)
        return replace(self, rows=self.rows[kept] - first, sources=self.sources[kept])
