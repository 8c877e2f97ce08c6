from __future__ import annotations

from collections.abc import Iterator

import torch
from kernel_cases.case import Case

from hpcrl.kernels.store_heads import CacheSlots, HeadWeights, reference, store_heads
from hpcrl.model.blocks.attention import Rope
from hpcrl.model.blocks.rope_angles import rope_cos_sin

ROWS, GROUPS, QUERIES, HEAD_DIM, BLOCKS, SIZE = 256, 8, 4, 128, 4096, 32


def cases() -> Iterator[Case]:
    """A decode step's rows, with a bias and without, and with norms. So few bytes take less than starting a kernel."""
    columns = GROUPS * (QUERIES + 2) * HEAD_DIM
    mixed = torch.randn(ROWS, columns, device="cuda", dtype=torch.bfloat16)
    bias, norms = mixed[0].clone(), mixed[:2, :HEAD_DIM].clone()
    cos, sin = rope_cos_sin(torch.arange(ROWS, device="cuda"), Rope(HEAD_DIM, 1e6))
    keys, values = mixed.new_zeros(2, BLOCKS, GROUPS, HEAD_DIM * SIZE)
    blocks = torch.randperm(BLOCKS, device="cuda")[:ROWS]
    slots = CacheSlots(
        keys.view(BLOCKS, GROUPS, HEAD_DIM, SIZE), values.view(BLOCKS, GROUPS, SIZE, HEAD_DIM), blocks, blocks % SIZE
    )
    moved = 2 * mixed.nbytes + cos.nbytes + sin.nbytes
    for title, weights in {
        "queries, keys and values": HeadWeights(None, None, None, 1e-6),
        "with a bias": HeadWeights(bias, None, None, 1e-6),
        "with norms": HeadWeights(None, *norms, 1e-6),
    }.items():
        given = (mixed, weights, cos, sin, slots)
        runs = {
            "hpcrl": lambda given=given: store_heads(*given),
            "one by one": lambda given=given: reference(*given),  # inductor fails on it
        }
        yield Case(title, runs, moved)
