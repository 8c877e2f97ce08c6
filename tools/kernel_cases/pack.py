from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from kernel_cases.case import Case
from torch import Tensor

from hpcrl.kernels.pack import RepeatedCopies

LAYERS, GROUPS, HEADS, HEAD, HIDDEN = 32, 8, 4, 128, 4096  # of queries to a group


def cases() -> Iterator[Case]:
    """Queries, keys and values that lie by groups, into q | k | v; and an MLP's weights, cut by columns."""
    rows = GROUPS * (HEADS + 2) * HEAD
    for name, dtype in (("bf16", torch.bfloat16), ("fp32 to bf16", torch.float32)):
        mixed = [torch.randn(rows, HIDDEN, device="cuda").to(dtype) for _ in range(LAYERS)]
        bucket = torch.empty(LAYERS, rows, HIDDEN, device="cuda", dtype=torch.bfloat16)
        nbytes = sum(each.nbytes for each in mixed) + bucket.nbytes
        yield Case(f"pack qkv, {name}", _runs([*mixed, bucket], lambda m=mixed, b=bucket: list(_qkv(m, b))), nbytes)
    wide = [torch.randn(HIDDEN, 4 * HIDDEN, device="cuda").bfloat16() for _ in range(LAYERS)]
    narrow = [torch.empty(HIDDEN, HIDDEN, device="cuda", dtype=torch.bfloat16) for _ in range(LAYERS)]
    cut = lambda: [(one[:, HIDDEN : 2 * HIDDEN], two) for one, two in zip(wide, narrow, strict=True)]  # noqa: E731
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
