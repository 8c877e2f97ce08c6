"""Weights on their way: packed for a refit, and their checksums."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from hpcrl.kernels.checksum import add_checksum
from hpcrl.kernels.pack import RepeatedCopies
from kernel_cases import Case

GROUPS, HEADS, HEAD = 8, 4, 128  # heads: of queries to a group


def checksum(rows: int = 17920, cols: int = 1536) -> Iterator[Case]:
    """A weight of the rollout, and that of the actor in fp32, which is rounded first."""
    total = torch.zeros((), dtype=torch.int64, device="cuda")
    for dtype in (torch.bfloat16, torch.float32):
        values = torch.randn(rows, cols, device="cuda", dtype=dtype)
        runs = {"hpcrl": lambda values=values: add_checksum(total, values, 0, 0, torch.bfloat16)}
        yield Case(f"checksum of {str(dtype).removeprefix('torch.')}", runs, values.nbytes, only_reads=True)


def pack(layers: int = 32, hidden: int = 4096) -> Iterator[Case]:
    """Queries, keys and values that lie by groups, into q | k | v; and an MLP's weights, cut by columns."""
    rows = GROUPS * (HEADS + 2) * HEAD
    for name, dtype in (("bf16", torch.bfloat16), ("fp32 to bf16", torch.float32)):
        mixed = [torch.randn(rows, hidden, device="cuda").to(dtype) for _ in range(layers)]
        bucket = torch.empty(layers, rows, hidden, device="cuda", dtype=torch.bfloat16)
        nbytes = sum(each.nbytes for each in mixed) + bucket.nbytes
        yield Case(f"pack qkv, {name}", _runs([*mixed, bucket], lambda m=mixed, b=bucket: list(_qkv(m, b))), nbytes)
    wide = [torch.randn(hidden, 4 * hidden, device="cuda").bfloat16() for _ in range(layers)]
    narrow = [torch.empty(hidden, hidden, device="cuda", dtype=torch.bfloat16) for _ in range(layers)]
    cut = lambda: [(one[:, hidden : 2 * hidden], two) for one, two in zip(wide, narrow, strict=True)]  # noqa: E731
    yield Case("pack columns, bf16", _runs([*wide, *narrow], cut), 2 * sum(each.nbytes for each in narrow))


def _qkv(mixed: list[Tensor], bucket: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    sizes = (HEADS * HEAD, HEAD, HEAD)
    for each, place in zip(mixed, bucket, strict=True):
        parts = place.split([GROUPS * size for size in sizes])
        for group, block in enumerate(each.chunk(GROUPS)):
            for part, its, size in zip(parts, block.split(sizes), sizes, strict=True):
                yield its, part[group * size : (group + 1) * size]


def _runs(tensors: list[Tensor], pairs: Callable[[], list[tuple[Tensor, Tensor]]]) -> dict[str, Callable[[], object]]:
    copies, its = RepeatedCopies(), pairs()
    sources, destinations = ([pair[side] for pair in its] for side in (0, 1))

    def eager() -> None:
        for source, destination in its:
            destination.copy_(source)

    return {
        "hpcrl": lambda: copies.run(tensors, pairs),
        "torch eager": eager,
        "torch foreach": lambda: torch._foreach_copy_(destinations, sources),
    }
