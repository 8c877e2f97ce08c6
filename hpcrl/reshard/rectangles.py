"""Moving the values of rectangles between local tensors and flat buffers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from hpcrl.reshard.buckets import Part
from hpcrl.reshard.planner import Move
from hpcrl.runtime.accelerator import host_bytes

Weights = Mapping[str, Tensor]

CPU = torch.device("cpu")


def source_part(weights: Weights, move: Move) -> Tensor:
    """The (rows, cols) view of the sender's local tensor, a 1-D one taken as (n, 1)."""
    return _rectangle(weights[move.name], move.src_row, move.src_col, move)


def destination_part(weights: Weights, move: Move) -> Tensor:
    """The (rows, cols) view of the receiver's local tensor."""
    return _rectangle(weights[move.dst_name], move.dst_row, move.dst_col, move)


def pack(parts: Sequence[Part], source: Weights, buffer: Tensor, dtype: torch.dtype) -> None:
    """Values of `parts`, rounded to `dtype`, into `buffer` (bytes,) uint8."""
    for part in parts:
        copy(source_part(source, part.move), _in_buffer(part, buffer, dtype))


def unpack(parts: Sequence[Part], buffer: Tensor, destination: Weights, dtype: torch.dtype) -> None:
    """Values of `parts` from `buffer` (bytes,) uint8 to where they belong."""
    for part in parts:
        copy(_in_buffer(part, buffer, dtype), destination_part(destination, part.move))


def copy(source: Tensor, destination: Tensor) -> None:
    """As `destination.copy_(source)`. What is contiguous goes through memcpy, which does not read what it overwrites
    where the machine's caches are small against the size; torch's own loop always does."""
    plain = source.is_contiguous() and destination.is_contiguous() and source.dtype == destination.dtype
    if plain and source.device == destination.device == CPU:
        np.copyto(host_bytes(destination), host_bytes(source))
    else:
        destination.copy_(source)


def _in_buffer(part: Part, buffer: Tensor, dtype: torch.dtype) -> Tensor:
    move = part.move
    return buffer[part.offset : part.offset + move.nbytes].view(dtype).view(move.rows, move.cols)


def _rectangle(tensor: Tensor, row: int, col: int, move: Move) -> Tensor:
    return tensor.view(tensor.size(0), -1)[row : row + move.rows, col : col + move.cols]
