"""Attention over a cache of keys and values, in exact mode, and the store of new ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from hpcrl.kernels.decode_attention import Cut, PagedRows
from hpcrl.kernels.decode_attention import decode_attention as attend
from hpcrl.kernels.store_heads import CacheSlots, HeadWeights
from hpcrl.kernels.store_heads import reference as store_reference
from hpcrl.kernels.store_heads import store_heads as store
from hpcrl.model.blocks.attention import Rope
from hpcrl.model.blocks.rope_angles import rope_cos_sin
from hpcrl.model.exact import PAGE, Tiles, packed_attention, paged_attention, tile_tokens
from kernel_cases import Case

BLOCK = 32  # tokens
DTYPE = torch.bfloat16
DEVICE = torch.device("cuda")
GROUPS, PER_HEAD, HEAD_DIM = 2, 6, 128  # of exact attention
STORED_GROUPS, QUERIES = 8, 4


def decode_attention(divisor: int = 1) -> Iterator[Case]:
    """Rows of equal length beside libraries, which have keys and values in a piece; then rows as a rollout has them,
    few and long, and latent attention.

    Args:
        divisor: divides the rows and lengths.
    """
    yield _decode(divisor, "256 rows of 4k, 8 x 4 x 128", np.full(256, 4096), 8, 4, 128, peers=True)
    yield _decode(divisor, "256 rows up to 8k, 8 x 4 x 128", np.linspace(1, 8192, 256).astype(np.int64), 8, 4, 128)
    yield _decode(divisor, "8 rows of 32k, 8 x 4 x 128", np.full(8, 32768), 8, 4, 128, peers=True)
    yield _decode(divisor, "256 rows of 4k, 8 x 4 x 64", np.full(256, 4096), 8, 4, 64, peers=True)
    yield _decode(divisor, "128 rows of 8k, latent 16 x 576/512", np.full(128, 8192), 1, 16, 576, latent=512)


def _decode(
    divisor: int,
    name: str,
    lengths: np.ndarray,
    groups: int,
    per_head: int,
    width: int,
    *,
    latent: int = 0,
    peers: bool = False,
) -> Case:
    lengths = -(-lengths[::divisor] // divisor)
    counts = -(-lengths // BLOCK)
    blocks = np.random.default_rng(0).permutation(int(counts.sum()))
    keys = torch.randn(len(blocks), groups, width, BLOCK, dtype=DTYPE, device=DEVICE)
    if latent:
        values = keys[:, :, :latent].transpose(2, 3)
    else:
        values = torch.randn(len(blocks), groups, BLOCK, width, dtype=DTYPE, device=DEVICE)
    queries = torch.randn(len(lengths), groups, per_head, width, dtype=DTYPE, device=DEVICE)
    cut = Cut.of(groups, per_head, values.size(-1))
    places = (blocks, counts.cumsum() - counts, lengths, np.array([len(lengths)]))
    table, starts, tokens, num_rows = (torch.from_numpy(part.astype(np.int32)).to(DEVICE) for part in places)
    rows = PagedRows.of(keys, table, starts, tokens, int(counts.max()), cut, num_rows)
    runs: dict[str, Callable[[], object]] = {"hpcrl": lambda: attend(queries, keys, values, rows, scale=width**-0.5)}
    if peers:
        runs |= _decode_peers(queries, int(lengths[0]))
    num_read = int(lengths.sum()) * groups
    read = num_read * (width if latent else 2 * width) * keys.element_size()
    return Case(
        f"decode {name}",
        runs,
        read + queries.nbytes + queries.nbytes // width * values.size(-1),
        2 * num_read * per_head * (width + values.size(-1)),
        only_reads=True,
    )


def _decode_peers(queries: Tensor, length: int) -> dict[str, Callable[[], object]]:
    rows, groups, per_head, width = queries.shape
    keys, values = (torch.randn(rows, groups, length, width, dtype=DTYPE, device=DEVICE) for _ in range(2))

    def products(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        return (queries @ keys.transpose(2, 3) * width**-0.5).softmax(-1) @ values

    compiled = torch.compile(products)
    single = queries.flatten(1, 2).unsqueeze(2)
    runs: dict[str, Callable[[], object]] = {
        "torch eager": lambda: products(queries, keys, values),
        "torch.compile": lambda: compiled(queries, keys, values),
        "torch sdpa": lambda: scaled_dot_product_attention(single, keys, values, enable_gqa=True),
    }
    try:
        from flash_attn import flash_attn_with_kvcache
    except ImportError:
        return runs
    cached = [part.transpose(1, 2).contiguous() for part in (keys, values)]
    one = single.transpose(1, 2).contiguous()
    lengths = torch.full((rows,), length, dtype=torch.int32, device=DEVICE)
    return runs | {"flash_attn": lambda: flash_attn_with_kvcache(one, *cached, cache_seqlens=lengths)}


def exact_attention(sequences: int = 16, length: int = 1024, rows: int = 256, context: int = 2048) -> Iterator[Case]:
    """Attention of exact mode in training and in decode, beside the library's."""
    tokens, heads = sequences * length, GROUPS * PER_HEAD
    query, key, value = (
        torch.randn(tokens, count, HEAD_DIM, device="cuda", dtype=torch.bfloat16) for count in (heads, GROUPS, GROUPS)
    )
    padded = [part.unflatten(0, (sequences, -1)).transpose(1, 2) for part in (query, key, value)]
    runs = {
        "hpcrl": lambda: packed_attention(query, key, value, (length,) * sequences),
        "torch sdpa": lambda: scaled_dot_product_attention(*padded, is_causal=True, enable_gqa=True),
    }
    nbytes = 2 * query.nbytes + key.nbytes + value.nbytes
    yield Case(f"exact attention {sequences} x {length}", runs, nbytes, 2 * tokens * length * heads * HEAD_DIM)
    yield _exact_decode(rows, context)


def _exact_decode(rows: int, context: int) -> Case:
    width = -(-context // PAGE)
    table = np.random.default_rng(0).permutation(rows * width).reshape(rows, width)
    keys = torch.randn(rows * width, GROUPS, HEAD_DIM, PAGE, device="cuda", dtype=torch.bfloat16)
    values = torch.randn(rows * width, GROUPS, PAGE, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
    queries = torch.randn(rows, GROUPS, PER_HEAD, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
    cached, one = np.full(rows, context - 1), np.ones(rows, np.int64)
    tiles = Tiles.of(one, cached, table, tile_tokens(PER_HEAD, keys.dtype), keys.device)
    runs = {"hpcrl": lambda: paged_attention(queries, keys, values, tiles)}
    flops = 4 * rows * context * GROUPS * PER_HEAD * HEAD_DIM
    return Case(f"exact attention of {rows} rows of {context}", runs, keys.nbytes + values.nbytes, flops)


def store_heads(rows: int = 256, blocks: int = 4096) -> Iterator[Case]:
    """A decode step's rows, with a bias and without, and with norms. So few bytes take less than starting a kernel."""
    columns = STORED_GROUPS * (QUERIES + 2) * HEAD_DIM
    mixed = torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16)
    bias, norms = mixed[0].clone(), mixed[:2, :HEAD_DIM].clone()
    cos, sin = rope_cos_sin(torch.arange(rows, device="cuda"), Rope(HEAD_DIM, 1e6))
    keys, values = mixed.new_zeros(2, blocks, STORED_GROUPS, HEAD_DIM * BLOCK)
    chosen = torch.randperm(blocks, device="cuda")[:rows]
    slots = CacheSlots(
        keys.view(blocks, STORED_GROUPS, HEAD_DIM, BLOCK),
        values.view(blocks, STORED_GROUPS, BLOCK, HEAD_DIM),
        chosen,
        chosen % BLOCK,
    )
    moved = 2 * mixed.nbytes + cos.nbytes + sin.nbytes
    for title, weights in {
        "queries, keys and values": HeadWeights(None, None, None, 1e-6),
        "with a bias": HeadWeights(bias, None, None, 1e-6),
        "with norms": HeadWeights(None, *norms, 1e-6),
    }.items():
        given = (mixed, weights, cos, sin, slots)
        runs = {
            "hpcrl": lambda given=given: store(*given),
            "one by one": lambda given=given: store_reference(*given),  # inductor fails on it
        }
        yield Case(title, runs, moved)
