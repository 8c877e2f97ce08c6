"""Random weights that are the same on every rank, the parts of them that ranks hold, and weights for timing only."""

from __future__ import annotations

import math
from zlib import crc32

import torch
from torch import Tensor

from hpcrl.model import build
from hpcrl.model.params import Shard, shards
from hpcrl.model.shape import ModelShape
from hpcrl.runtime import platform
from hpcrl.runtime.layout import Layout

SHAPE = ModelShape(
    num_layers=4,
    hidden_size=256,
    ffn_hidden_size=512,
    num_attention_heads=8,
    num_query_groups=4,
    head_dim=32,
    vocab_size=1000,
)


def whole_weights(shape: ModelShape, seed: int = 0) -> dict[str, Tensor]:
    """Tensors under Megatron's global names, fp32 on the host; norms are 1."""
    generator = torch.Generator().manual_seed(seed)
    return {
        shard.name: 0.02 * torch.randn(shard.global_shape, generator=generator)
        if len(shard.global_shape) > 1
        else torch.ones(shard.global_shape)
        for shard in shards(shape)
    }


def held(
    shape: ModelShape, whole: dict[str, Tensor], layout: Layout, rank: int, device: torch.device, dtype: torch.dtype
) -> dict[str, Tensor]:
    """What `rank` trains under `layout`, by global names; nothing where it has no part in it."""
    if rank not in layout:
        return {}
    table = shards(shape, layout, rank)
    return {shard.name: cut(whole[shard.name], shard).to(device, dtype) for shard in table}


def cut(whole: Tensor, shard: Shard) -> Tensor:
    """A rank's part of a parameter."""
    local = torch.zeros(shard.local_shape)
    source, target = whole.reshape(len(whole), -1), local.view(len(local), -1)
    for box in shard.boxes:
        (top, bottom), (left, right) = box.global_rows, box.global_cols
        part = target[box.local_row : box.local_row + bottom - top, box.local_col : box.local_col + right - left]
        part.copy_(source[top:bottom, left:right])
    return local


initial_weight = build.initial_weight
FEW = 16  # rows


def draw_on_the_device() -> None:
    """Have models of this process drawn by `on_the_device` from now on: the CPU draws 62 million numbers per second,
    those of 8 B weights in two minutes."""
    build.initial_weight = on_the_device


def on_the_device(
    shape: ModelShape, name: str, global_shape: tuple[int, ...], seed: int, initial: float | None = None
) -> Tensor:
    """As `hpcrl.model.build.initial_weight`, but other numbers of the same deviation, on this process's device: the
    same on all ranks."""
    few = initial_weight(shape, name, (min(FEW, global_shape[0]), *global_shape[1:]), seed, initial)
    if few.numel() == math.prod(global_shape):
        return few
    if few.min() == few.max():
        return torch.full(global_shape, float(few.flatten()[0]))
    torch.manual_seed(crc32(name.encode(), seed))
    return torch.empty(global_shape, device=platform.device()).normal_(0.0, float(few.std()))
