"""Attention of one query token per sequence over a paged KV cache (PagedAttention, Kwon et al. 2023, arXiv:2309.06180).

Sequences are cut into parts, so that a few long ones occupy a GPU too (flash decoding).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from hpcrl.kernels.dispatch import use_triton

MAX_WIDTH = 512  # of a value, and of a key's largest power of 2
NUM_PROGRAMS = 4096  # target number of programs: some dozen per multiprocessor of a GPU
MIN_PART_TOKENS = 256  # minimum tokens of a part, because its output is moved as well
WIDE = 2048  # numbers of a KV head's output; for a multiple of it there are fewer parts


class Cut(NamedTuple):
    """Rows are cut into about `wanted` parts in total, at most one more per row, of `least` tokens or more."""

    wanted: int
    least: int

    @classmethod
    def of(cls, groups: int, per_head: int, value_dim: int) -> Cut:
        """Choose the cut for `groups` KV heads with `per_head` queries each."""
        times = max(1, per_head * value_dim // WIDE)
        return cls(max(1, NUM_PROGRAMS // (groups * times)), MIN_PART_TOKENS * min(times, 4))


class PagedRows(NamedTuple):
    """Places of n rows' tokens.

    Row i has `lengths[i]` tokens, at least 1, in the blocks `blocks[starts[i]]`, `blocks[starts[i] + 1]` and so on, all
    full except the last. The kernels use `parts` int32 (m, 4): the place in `blocks` of a part's first block, its row,
    its tokens (0: skip), and 0; and `parts_of` int32 (n, 2): a row's first part and its number of parts. `blocks` is
    int32 (any,); `starts` and `lengths` are int64 (n,), on the host.
    """

    blocks: Tensor
    starts: np.ndarray
    lengths: np.ndarray
    parts: Tensor
    parts_of: Tensor

    @classmethod
    def of(
        cls, blocks: np.ndarray, starts: np.ndarray, lengths: np.ndarray, size: int, cut: Cut, device: torch.device
    ) -> PagedRows:
        """Cut rows, of blocks of `size` tokens, into parts of similar length; only the lengths matter."""
        longest = max(cut.least, -(-int(lengths.sum()) // cut.wanted))
        counts = -(-lengths // longest)
        tokens = size * -(-lengths // (size * counts))  # of a part, except the last of a row
        counts = -(-lengths // tokens)
        firsts = counts.cumsum() - counts
        rows = np.arange(len(lengths)).repeat(counts)
        begins = (np.arange(len(rows)) - firsts[rows]) * tokens[rows]
        taken = np.minimum(tokens[rows], lengths[rows] - begins)
        parts = np.stack([starts[rows] + begins // size, rows, taken, np.zeros_like(rows)], 1)
        arrays = blocks, parts, np.stack([firsts, counts], 1)
        found = [torch.from_numpy(array.astype(np.int32)).to(device) for array in arrays]
        return cls(found[0], starts, lengths, found[1], found[2])


def decode_attention(queries: Tensor, keys: Tensor, values: Tensor, rows: PagedRows, scale: float) -> Tensor:
    """Return softmax(scale q k) v over the tokens of a row, for each row and each of its queries.

    queries: (n, KV heads, queries of a head, key_dim); keys: (blocks, KV heads, key_dim, block size), contiguous;
    values: (blocks, KV heads, block size, value_dim), contiguous, or the view of the first columns of the keys,
    `keys[:, :, :value_dim].transpose(2, 3)`, which are then read once. All fp32, bf16 or fp16, as is the result (n, KV
    heads, queries of a head, value_dim), computed in fp32. Blocks must be finite after a row's last token. No gradient.

    Moves the keys and values of all rows once, and for each part an output in fp32 twice; 2 (key_dim + value_dim)
    operations per query and token.
    """
    if is_fused(keys, values):
        from hpcrl.kernels.decode_attention_triton import decode_attention as fused

        return fused(queries, keys, values, rows, scale)
    return reference(queries, keys, values, rows, scale)


def is_fused(keys: Tensor, values: Tensor) -> bool:
    """Whether the kernels support such a cache."""
    return use_triton("decode_attention", keys, unless=_reason(keys, values))


def _reason(keys: Tensor, values: Tensor) -> str:
    size, width = keys.size(-1), max(first_width(keys, values), values.size(-1))
    if size < 16 or size & (size - 1):
        return f"blocks of {size} tokens are not a power of 2 of at least 16"
    return f"heads of {width} are wider than {MAX_WIDTH}" if width > MAX_WIDTH else ""


def values_are_keys(keys: Tensor, values: Tensor) -> bool:
    return values.data_ptr() == keys.data_ptr()


def first_width(keys: Tensor, values: Tensor) -> int:
    """Return how many columns of a key are one matrix: those that are also its value, else the largest power of 2."""
    return values.size(-1) if values_are_keys(keys, values) else 1 << (keys.size(-2).bit_length() - 1)


def reference(queries: Tensor, keys: Tensor, values: Tensor, rows: PagedRows, scale: float) -> Tensor:
    outputs = []
    for query, start, length in zip(queries.float(), rows.starts.tolist(), rows.lengths.tolist(), strict=True):
        blocks = rows.blocks[start : start - -length // keys.size(-1)]
        key = keys[blocks].float().permute(1, 2, 0, 3).flatten(2)[..., :length]
        value = values[blocks].float().transpose(0, 1).flatten(1, 2)[:, :length]
        outputs.append((query @ key * scale).softmax(-1) @ value)
    return torch.stack(outputs).to(queries.dtype)
