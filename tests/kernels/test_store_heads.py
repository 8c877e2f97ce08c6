from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from hpcrl.kernels.dispatch import FP8
from hpcrl.kernels.fp8_matrix import rounded
from hpcrl.kernels.layers import apply_rope, rms_norm
from hpcrl.kernels.store_heads import CacheSlots, HeadWeights, store_heads
from hpcrl.model.blocks.attention import Rope
from hpcrl.model.blocks.rope_angles import rope_cos_sin
from tests.kernels.close import DTYPES, assert_near, poisoned

TOKENS, BLOCKS, SIZE, EPS = 5, 7, 16, 1e-5


class Shape(NamedTuple):
    groups: int
    per_head: int
    head_dim: int


SHAPES = (Shape(2, 6, 32), Shape(1, 1, 8), Shape(3, 3, 80))  # the last has no powers of 2


def made(shape: Shape, dtype: torch.dtype, device: torch.device, *, bias: bool, norm: bool):
    columns = shape.groups * (shape.per_head + 2) * shape.head_dim
    # Rows that lie apart, as in a wider product.
    mixed = torch.randn(TOKENS, columns + 16, device=device).to(dtype)[:, :columns]
    norms = [1 + 0.1 * torch.randn(shape.head_dim, device=device).to(dtype) for _ in range(2)] if norm else [None] * 2
    weights = HeadWeights(torch.randn(columns, device=device).to(dtype) if bias else None, *norms, EPS)
    angles = rope_cos_sin(torch.tensor([0, 3, 50, 1000, 7], device=device), Rope(shape.head_dim, 500.0))
    keys = poisoned((BLOCKS, shape.groups, shape.head_dim, SIZE), dtype, device)
    values = poisoned((BLOCKS, shape.groups, SIZE, shape.head_dim), dtype, device)
    blocks, offsets = (torch.tensor(part, device=device) for part in ((6, 0, 2, 2, 5), (15, 0, 3, 4, 9)))
    return mixed, weights, *angles, CacheSlots(keys, values, blocks, offsets)


def one_by_one(mixed: Tensor, weights: HeadWeights, cos: Tensor, sin: Tensor, shape: Shape) -> list[Tensor]:
    """Queries, keys and values by the operations that training runs; in fp64 where nothing is rounded in between."""
    if weights.bias is not None:
        mixed = mixed + weights.bias
    heads = mixed.view(TOKENS, shape.groups, -1, shape.head_dim)
    found = []
    for part, norm in ((heads[:, :, :-2], weights.query_norm), (heads[:, :, -2:-1], weights.key_norm)):
        normed = part if norm is None else rms_norm(part, norm, EPS)
        found.append(apply_rope(normed.double(), cos[:, None].double(), sin[:, None].double()))
    return [found[0], found[1].squeeze(2), heads[:, :, -1]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_cache_in_8_bits(device: torch.device, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    """What the kernel computes in `dtype` is rounded to 8 bits, 448 at most."""
    given = made(SHAPES[0], dtype, device, bias=True, norm=False)
    given[0][0, ::3] *= 1000
    slots = given[-1]
    in_8_bits = slots._replace(keys=slots.keys.to(FP8), values=slots.values.to(FP8))
    store_heads(*given)
    assert float(slots.keys.nan_to_num().abs().max()) > 500
    found = store_heads(*given[:-1], in_8_bits)
    for plane, its in ((slots.keys, in_8_bits.keys), (slots.values, in_8_bits.values)):
        assert torch.equal(rounded(plane, FP8).float().nan_to_num(), its.float().nan_to_num())
    monkeypatch.setenv("HPCRL_KERNELS", "torch")
    assert_near(store_heads(*given[:-1], in_8_bits), found.double(), dtype)
    assert torch.equal(rounded(slots.values, FP8).float().nan_to_num(), in_8_bits.values.float().nan_to_num())


@pytest.mark.parametrize("bias, norm", [(False, False), (True, False), (False, True), (True, True)])
@pytest.mark.parametrize(
    ("dtype", "shape"), [*((torch.float32, each) for each in SHAPES), *((each, SHAPES[0]) for each in DTYPES[1:])]
)
def test_queries_are_returned_and_the_rest_is_in_its_place(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, shape: Shape, bias: bool, norm: bool
) -> None:
    given = made(shape, dtype, device, bias=bias, norm=norm)
    slots = given[-1]
    found = store_heads(*given)
    assert found.dtype == dtype and found.is_contiguous()
    stored = slots.keys[slots.blocks, :, :, slots.offsets], slots.values[slots.blocks, :, slots.offsets]
    monkeypatch.setenv("HPCRL_KERNELS", "torch")
    for ours, exact in zip((found, *stored), one_by_one(*given[:-1], shape), strict=True):
        assert_near(ours, exact, dtype)
    for plane in (slots.keys, slots.values):  # and nothing else is touched
        assert int((~plane.isnan()).sum()) == TOKENS * shape.groups * shape.head_dim
    again = made(shape, dtype, device, bias=bias, norm=norm)
    again = (*given[:-1], again[-1])
    assert_near(store_heads(*again), found.double(), dtype)
    assert_near(again[-1].keys.nan_to_num(), slots.keys.nan_to_num().double(), dtype)
    assert torch.equal(again[-1].values.nan_to_num(), slots.values.nan_to_num())
