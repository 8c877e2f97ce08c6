"""Attention of one query token per sequence over a paged KV cache (PagedAttention, Kwon et al. 2023, arXiv:2309.06180).

Sequences are cut into parts, so that a few long ones occupy a GPU too (flash decoding).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from hpcrl.kernels.dispatch import lacks_fp8, use_triton

MAX_WIDTH = 512  # of a value, and of a key's largest power of 2
NUM_PROGRAMS = 4096  # target number of programs: some dozen per multiprocessor of a GPU
# Minimum tokens of a part, because its output is moved as well. Parts of 64 tokens, where there are few, were no faster
# on an H200.
MIN_PART_TOKENS = 256
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
    """Places of n rows' tokens, all int32 on the device, so that decoding launches without the host.

    Row i has `lengths[i]` tokens, at least 1, in the blocks `blocks[starts[i]]`, `blocks[starts[i] + 1]` and so on, at
    most `width`, all full except the last. The kernels use `parts` (m, 4): the place in `blocks` of a part's first
    block, its row, its tokens (0: skip), and 0; and `parts_of` (n, 2): a row's first part and its number of parts.
    """

    blocks: Tensor
    starts: Tensor
    lengths: Tensor
    width: int
    parts: Tensor
    parts_of: Tensor

    @classmethod
    def of(
        cls, keys: Tensor, blocks: Tensor, starts: Tensor, lengths: Tensor, width: int, cut: Cut, num_rows: Tensor
    ) -> PagedRows:
        """Cut rows, whose blocks hold the tokens of `keys`, into parts of similar length; only the lengths matter.

        Rows from `num_rows` (1,) on must be equal to the first one, whose parts they share. There are always n +
        `cut.wanted` parts.
        """
        if use_triton("cut_rows", keys):
            from hpcrl.kernels.decode_attention_triton import cut_rows as fused

            parts, parts_of = fused(starts, lengths, keys.size(-1), cut, num_rows)
        else:
            parts, parts_of = cut_rows(starts, lengths, keys.size(-1), cut, num_rows)
        return cls(blocks, starts, lengths, width, parts, parts_of)


def cut_rows(starts: Tensor, lengths: Tensor, size: int, cut: Cut, num_rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return `parts` and `parts_of` of `PagedRows`. Takes 16 bytes per part."""
    n = len(lengths)
    rows = torch.arange(n, dtype=torch.int32, device=lengths.device)
    is_real = rows < num_rows
    lengths = lengths * is_real
    longest = _ceil(lengths.sum(dtype=torch.int32), cut.wanted).clamp(min=cut.least)
    counts = _ceil(lengths, longest)
    tokens = _ceil(lengths, size * counts.clamp(min=1)) * size  # of a part, except the last of a row
    counts = _ceil(lengths, tokens.clamp(min=1))
    ends = counts.cumsum(0, dtype=torch.int32)
    firsts = ends - counts
    numbers = torch.arange(n + cut.wanted, dtype=torch.int32, device=lengths.device)
    owners = torch.searchsorted(ends, numbers, right=True, out_int32=True).clamp_(max=n - 1)
    first, of_part, length, start = torch.stack([firsts, tokens, lengths, starts]).index_select(1, owners)
    begins = (numbers - first) * of_part
    taken = (length - begins).minimum(of_part).clamp_(min=0)
    parts = torch.stack([start + begins // size, owners, taken, torch.zeros_like(owners)], 1)
    parts_of = torch.stack([firsts, counts], 1)
    return parts, torch.where(is_real[:, None], parts_of, parts_of[:1])


def _ceil(x: Tensor, unit: Tensor | int) -> Tensor:
    return (x + (unit - 1)) // unit


def decode_attention(
    queries: Tensor, keys: Tensor, values: Tensor, rows: PagedRows, scale: float, sinks: Tensor | None = None
) -> Tensor:
    """Return softmax(scale q k) v over the tokens of a row, for each row and each of its queries.

    Queries, keys and values are fp32, bf16 or fp16, as is the result (n, KV heads, queries of a head, value_dim),
    computed in fp32; or keys and values float8_e4m3fn, which are converted to the dtype of the queries (not yet run on
    a GPU). Blocks must be finite after a row's last token. No gradient.

    Moves the keys and values of all rows once, and for each part an output in fp32 twice; 2 (key_dim + value_dim)
    operations per query and token.

    Args:
        queries: (n, KV heads, queries of a head, key_dim).
        keys: (blocks, KV heads, key_dim, block size), contiguous.
        values: (blocks, KV heads, block size, value_dim), contiguous, or the view of the first columns of the keys,
            `keys[:, :, :value_dim].transpose(2, 3)`, which are then read once.
        sinks: (KV heads, queries of a head), the score of one more key whose value is 0. Not yet run on a GPU with
            them.
    """
    if is_fused(keys, values):
        from hpcrl.kernels.decode_attention_triton import decode_attention as fused

        return fused(queries, keys, values, rows, scale, sinks)
    return reference(queries, keys, values, rows, scale, sinks)


def is_fused(keys: Tensor, values: Tensor) -> bool:
    """Whether the kernels support such a cache."""
    return use_triton("decode_attention", keys, unless=_reason(keys, values))


def _reason(keys: Tensor, values: Tensor) -> str:
    size, width = keys.size(-1), max(first_width(keys, values), values.size(-1))
    if size < 16 or size & (size - 1):
        return f"blocks of {size} tokens are not a power of 2 of at least 16"
    return f"heads of {width} are wider than {MAX_WIDTH}" if width > MAX_WIDTH else lacks_fp8(keys)


def values_are_keys(keys: Tensor, values: Tensor) -> bool:
    return values.data_ptr() == keys.data_ptr()


def first_width(keys: Tensor, values: Tensor) -> int:
    """Return how many columns of a key are one matrix: those that are also its value, else the largest power of 2."""
    return values.size(-1) if values_are_keys(keys, values) else 1 << (keys.size(-2).bit_length() - 1)


def reference(
    queries: Tensor, keys: Tensor, values: Tensor, rows: PagedRows, scale: float, sinks: Tensor | None = None
) -> Tensor:
    """Gathers all rows, padded to `width` blocks."""
    places = rows.starts[:, None] + torch.arange(rows.width, dtype=torch.int32, device=keys.device)
    blocks = rows.blocks[places.clamp_(max=len(rows.blocks) - 1)]
    key = keys[blocks].permute(0, 2, 3, 1, 4).flatten(3).float()
    value = values[blocks].transpose(1, 2).flatten(2, 3).float()
    is_after = torch.arange(key.size(-1), device=keys.device) >= rows.lengths[:, None]
    scores = (queries.float() @ key * scale).masked_fill_(is_after[:, None, None], -torch.inf)
    return (softmax_with(scores, sinks) @ value).to(queries.dtype)


def softmax_with(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """Return the softmax of `scores` (..., tokens) and `sinks`, which fit in (...), without the sinks' weights."""
    if sinks is None:
        return scores.softmax(-1)
    column = sinks.to(scores.dtype).unsqueeze(-1).expand(*scores.shape[:-1], 1)
    return torch.cat((scores, column), -1).softmax(-1)[..., :-1]
