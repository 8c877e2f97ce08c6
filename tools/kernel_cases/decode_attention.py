from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import torch
from kernel_cases.case import Case
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from hpcrl.kernels.decode_attention import Cut, PagedRows, decode_attention

SIZE = 32  # tokens of a block
DTYPE = torch.bfloat16
DEVICE = torch.device("cuda")
DIVISOR = 1  # of rows and lengths


def cases() -> Iterator[Case]:
    """Rows of equal length beside libraries, which have keys and values in a piece; then rows as a rollout has them,
    few and long, and latent attention."""
    yield _case("256 rows of 4k, 8 x 4 x 128", np.full(256, 4096), 8, 4, 128, peers=True)
    yield _case("256 rows up to 8k, 8 x 4 x 128", np.linspace(1, 8192, 256).astype(np.int64), 8, 4, 128)
    yield _case("8 rows of 32k, 8 x 4 x 128", np.full(8, 32768), 8, 4, 128, peers=True)
    yield _case("256 rows of 4k, 8 x 4 x 64", np.full(256, 4096), 8, 4, 64, peers=True)
    yield _case("128 rows of 8k, latent 16 x 576/512", np.full(128, 8192), 1, 16, 576, latent=512)


def _case(
    name: str, lengths: np.ndarray, groups: int, per_head: int, width: int, *, latent: int = 0, peers: bool = False
) -> Case:
    lengths = -(-lengths[::DIVISOR] // DIVISOR)
    counts = -(-lengths // SIZE)
    blocks = np.random.default_rng(0).permutation(int(counts.sum()))
    keys = torch.randn(len(blocks), groups, width, SIZE, dtype=DTYPE, device=DEVICE)
    if latent:
        values = keys[:, :, :latent].transpose(2, 3)
    else:
        values = torch.randn(len(blocks), groups, SIZE, width, dtype=DTYPE, device=DEVICE)
    queries = torch.randn(len(lengths), groups, per_head, width, dtype=DTYPE, device=DEVICE)
    cut = Cut.of(groups, per_head, values.size(-1))
    places = (blocks, counts.cumsum() - counts, lengths, np.array([len(lengths)]))
    table, starts, tokens, num_rows = (torch.from_numpy(part.astype(np.int32)).to(DEVICE) for part in places)
    rows = PagedRows.of(keys, table, starts, tokens, int(counts.max()), cut, num_rows)
    runs: dict[str, Callable[[], object]] = {
        "hpcrl": lambda: decode_attention(queries, keys, values, rows, scale=width**-0.5)
    }
    if peers:
        runs |= _peers(queries, int(lengths[0]))
    num_read = int(lengths.sum()) * groups
    read = num_read * (width if latent else 2 * width) * keys.element_size()
    return Case(
        f"decode {name}",
        runs,
        read + queries.nbytes + queries.nbytes // width * values.size(-1),
        2 * num_read * per_head * (width + values.size(-1)),
        only_reads=True,
    )


def _peers(queries: Tensor, length: int) -> dict[str, Callable[[], object]]:
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
