"""Pictures of a micro-batch: positions of their tokens, and where their features go."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from hpcrl.model.blocks.rope import rope_positions
from hpcrl.model.tower import PackedPictures, Pixels
from hpcrl.runtime.exits import InputError

if TYPE_CHECKING:
    from hpcrl.batch.pictures import PictureColumn
    from hpcrl.model.shape import ModelShape


def packed_pictures(
    column: PictureColumn, lengths: Tensor, shape: ModelShape, *, embeds: bool = True
) -> dict[str, Any]:
    """Return the pictures of packed sequences of these `lengths`, and the positions of their tokens, as arguments of
    `pack`; only the positions without `embeds`."""
    vision = shape.vision
    if vision is None:
        raise InputError("the batch has pictures, and the model has no vision tower; use a vision-language model")
    if not len(column.keys):
        return {}
    tokens = column.grids.prod(1, dtype=np.int64) // vision.merge_size**2
    first_features, first_token = tokens.cumsum() - tokens, 0
    positions, at_tokens, at_features = [], [], []
    for row, length in enumerate(lengths.tolist()):
        pictures = column.of_row(row)
        for item, picture in pictures:
            places = np.arange(tokens[item])
            at_tokens.append(first_token + picture.start + places)
            at_features.append(first_features[item] + places)
        positions.append(rope_positions(length, [picture for _, picture in pictures], vision))
        first_token += length
    found: dict[str, Any] = {"rope_positions": torch.from_numpy(np.concatenate(positions, axis=1))}
    if embeds:
        rows, sources = (torch.from_numpy(np.concatenate(parts)) for parts in (at_tokens, at_features))
        values = torch.from_numpy(column.values.values)
        if column.are_features:
            features, pixels = values.view(-1, vision.feature_width), None
        else:
            grids = torch.from_numpy(column.grids.astype(np.int64))
            features, pixels = None, Pixels(values.view(-1, vision.patch_width), grids)
        found["pictures"] = PackedPictures(rows, sources, features, pixels)
    return found


def tokens_of_towers(column: PictureColumn, shape: ModelShape) -> np.ndarray:
    """Return what the tower's work on each sample is worth in tokens of the language model, int64 (N,); 0 where the
    column has features."""
    if column.are_features:
        return np.zeros(len(column), np.int64)
    patches = column.grids.prod(1, dtype=np.int64)
    of_samples = np.array([patches[column.items.row(row)].sum() for row in range(len(column))], np.int64)
    return (shape.tokens_per_patch * of_samples).astype(np.int64)
