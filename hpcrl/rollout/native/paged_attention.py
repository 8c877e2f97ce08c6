"""Decode attention as a Triton kernel, for CUDA: the blocks of a row are read where they are.

Its numbers were checked with Triton's interpreter on a CPU; nobody has run it on a GPU yet.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hpcrl.rollout.native.attention import LOG2_E, MASKED, NewTokens

SMALLEST_DOT = 16  # Triton's products have at least so many rows


class PagedAttention:
    """One token of each of rows 0..n-1, as `DecodeAttention`. `head_dim` must be a power of 2.

    `blocks` int32 (blocks in use,) are those of row 0 in the order of its tokens, then those of row 1, and so on;
    `starts` int32 (n,) is where a row's begin and `lengths` int32 (n,) how many tokens it has, the new one included.
    """

    def __init__(self, new: NewTokens) -> None:
        self.new = new
        pool, device = new.cache.pool, new.cache.device
        by_row = np.lexsort((pool.order_of[: pool.extent], pool.row_of[: pool.extent]))[pool.num_holes :]
        starts = np.searchsorted(pool.row_of[by_row], new.rows)
        self.blocks, self.starts, self.lengths = (
            torch.from_numpy(array.astype(np.int32)).to(device) for array in (by_row, starts, new.starts + 1)
        )

    def __call__(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        self.new.store(layer, keys, values)
        cache = self.new.cache
        rows, heads, per_head, head_dim = queries.shape
        queries, outputs = queries.contiguous(), torch.empty(queries.shape, dtype=queries.dtype, device=queries.device)
        _kernel()[(rows, heads)](
            queries,
            cache.keys[layer],
            cache.values[layer],
            outputs,
            self.blocks,
            self.starts,
            self.lengths,
            LOG2_E * head_dim**-0.5,
            HEADS=heads,
            PER_HEAD=per_head,
            ROWS=max(SMALLEST_DOT, 1 << (per_head - 1).bit_length()),
            WIDTH=head_dim,
            SIZE=cache.block_size,
            MASKED=MASKED,
        )
        return outputs


@functools.cache
def _kernel() -> Any:
    """Made at first use, as Triton is not on machines without a GPU."""
    import triton  # type: ignore[import-not-found]
    import triton.language as tl  # type: ignore[import-not-found]

    # Triton looks names up in the module's globals.
    globals()["tl"] = tl

    @triton.jit
    def decode(  # type: ignore[no-untyped-def]
        queries,
        keys,
        values,
        outputs,
        blocks,
        starts,
        lengths,
        scale,
        HEADS: tl.constexpr,
        PER_HEAD: tl.constexpr,
        ROWS: tl.constexpr,
        WIDTH: tl.constexpr,
        SIZE: tl.constexpr,
        MASKED: tl.constexpr,
    ):
        """Online softmax over the blocks of one row and one KV head."""
        row, head = tl.program_id(0), tl.program_id(1)
        length, start = tl.load(lengths + row), tl.load(starts + row)
        of_query, of_width, of_place = tl.arange(0, ROWS), tl.arange(0, WIDTH), tl.arange(0, SIZE)
        places = ((row * HEADS + head) * PER_HEAD + of_query[:, None]) * WIDTH + of_width[None, :]
        real = of_query[:, None] < PER_HEAD
        query = tl.load(queries + places, mask=real, other=0.0)
        maxima = tl.full((ROWS,), MASKED, tl.float32)
        sums = tl.zeros((ROWS,), tl.float32)
        total = tl.zeros((ROWS, WIDTH), tl.float32)
        for number in range(tl.cdiv(length, SIZE)):
            block = tl.load(blocks + start + number).to(tl.int64)
            item = (block * HEADS + head) * WIDTH * SIZE
            key = tl.load(keys + item + of_width[:, None] * SIZE + of_place[None, :])
            scores = tl.dot(query, key, input_precision="ieee") * scale
            scores = tl.where(number * SIZE + of_place[None, :] < length, scores, MASKED)
            new_maxima = tl.maximum(maxima, tl.max(scores, 1))
            weights = tl.exp2(scores - new_maxima[:, None])
            kept = tl.exp2(maxima - new_maxima)
            value = tl.load(values + item + of_place[:, None] * WIDTH + of_width[None, :])
            sums = sums * kept + tl.sum(weights, 1)
            total = total * kept[:, None] + tl.dot(weights.to(value.dtype), value, input_precision="ieee")
            maxima = new_maxima
        tl.store(outputs + places, (total / sums[:, None]).to(outputs.dtype.element_ty), mask=real)

    return decode
