"""Exact mode's kernels: a token's numbers have the same bits for any number of tokens beside it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from hpcrl.kernels.layers import apply_rope, rms_norm, swiglu
from hpcrl.model.exact import (
    PAGE,
    Tiles,
    exact_linear,
    exact_log_probs,
    exact_log_softmax,
    packed_attention,
    paged_attention,
    tile_tokens,
)
from tests.kernels.close import assert_near

DTYPES = (torch.float32, torch.bfloat16)


def assert_equal_in_any_batch(function: Callable[[Tensor], Tensor], x: Tensor, seed: int) -> Tensor:
    """Some rows of `x` in any order, at random numbers of rows, once one row."""
    generator = np.random.default_rng(seed)
    whole = function(x)
    assert not whole.isnan().any()
    for rows in (1, *generator.integers(2, len(x), 4)):
        some = torch.from_numpy(generator.permutation(len(x))[:rows]).to(x.device)
        assert torch.equal(function(x[some]), whole[some])
    return whole


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("columns", "outputs"), [(100, 70), (64, 128), (7, 3), (300, 33)])
def test_a_product(device: torch.device, dtype: torch.dtype, columns: int, outputs: int) -> None:
    x, weight = (torch.randn(count, columns, device=device).to(dtype) for count in (200, outputs))
    expected = x.double() @ weight.double().T
    found = assert_equal_in_any_batch(lambda x: exact_linear(x, weight, torch.float32), x, outputs)
    assert_near(found, expected, torch.float32)
    moved = weight.new_empty(weight.numel() + 5)[5:].view_as(weight).copy_(weight)
    assert torch.equal(exact_linear(x.unsqueeze(1), moved).squeeze(1), found.to(dtype))


def test_gradients_of_a_product(device: torch.device) -> None:
    x, weight = (torch.randn(count, 40, device=device).bfloat16().requires_grad_() for count in (20, 30))
    grad = torch.randn(20, 30, device=device)
    found = torch.autograd.grad(exact_linear(x, weight, torch.float32), (x, weight), grad)
    assert_near(found[0], grad.double() @ weight.double(), x.dtype)
    assert_near(found[1], grad.double().T @ x.double(), x.dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [24, 300])
def test_norm_activation_and_rotation(device: torch.device, dtype: torch.dtype, width: int) -> None:
    x, weight = torch.randn(60, width, device=device).to(dtype), torch.randn(width, device=device).to(dtype)
    assert_equal_in_any_batch(lambda x: rms_norm(x, weight, 1e-5), x, width)
    assert_equal_in_any_batch(swiglu, x, width)
    angles = torch.randn(60, width // 4, device=device)

    def rotated(rows: Tensor) -> Tensor:
        of_rows = angles[rows]
        return apply_rope(x[rows].unflatten(1, (2, -1)), of_rows.cos(), of_rows.sin())

    assert_equal_in_any_batch(rotated, torch.arange(60, device=device), width)


@pytest.mark.parametrize("vocab_size", [37, 2100])
def test_log_probs(device: torch.device, vocab_size: int) -> None:
    logits = 3 * torch.randn(40, vocab_size + 5, device=device)
    ids = torch.randint(vocab_size, (40, 1), device=device)
    found = assert_equal_in_any_batch(
        lambda rows: exact_log_probs(logits[rows], ids[rows], vocab_size, 0.7), torch.arange(40, device=device), 0
    )
    assert_near(found, exact_log_softmax(logits.double(), vocab_size, 0.7).gather(1, ids), torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("groups", "per_head", "width"), [(2, 3, 24), (1, 6, 16), (2, 1, 64)])
def test_attention(device: torch.device, dtype: torch.dtype, groups: int, per_head: int, width: int) -> None:
    """Sequences packed as in training; each alone; and from a cache with other blocks, where a part is prefilled and
    the rest decoded, in batches of random sequences."""
    lengths = (70, 1, 33, PAGE * 4)
    total = sum(lengths)
    queries, keys, values = (
        torch.randn(total, heads, width, device=device).to(dtype) for heads in (groups * per_head, groups, groups)
    )
    packed = packed_attention(queries, keys, values, lengths)
    by_sequence = [part.split(lengths) for part in (queries, keys, values, packed)]
    for query, key, value, found in zip(*by_sequence, strict=True):
        assert torch.equal(packed_attention(query, key, value, (len(query),)), found)
        assert_near(found, expected_attention(query, key, value), dtype)
    cache = Cache(by_sequence, PAGE, device)
    generator = np.random.default_rng(0)
    sizes = np.array(lengths)
    for cached in (0 * sizes, sizes // 3, sizes - 1):
        chosen = generator.permutation(len(sizes))[: generator.integers(1, 5)]
        new = sizes[chosen] - cached[chosen]
        for tokens in (new, np.minimum(new, 1)):
            found = cache.attend(chosen, cached[chosen], tokens, per_head)
            for sequence, start, count, part in zip(
                chosen, cached[chosen], tokens, found.split(tokens.tolist()), strict=True
            ):
                assert torch.equal(part, by_sequence[3][sequence][start : start + count])


def expected_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    times = query.size(1) // key.size(1)
    query, key, value = (
        query.double(),
        key.double().repeat_interleave(times, 1),
        value.double().repeat_interleave(times, 1),
    )
    scores = torch.einsum("ihd,jhd->hij", query, key) * query.size(-1) ** -0.5
    scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf)
    return torch.einsum("hij,jhd->ihd", scores.softmax(-1), value)


class Cache:
    """Blocks in any order, with what others left in the places without a token."""

    def __init__(self, by_sequence: list[tuple[Tensor, ...]], page: int, device: torch.device) -> None:
        self._queries, keys, values, _ = by_sequence
        counts = [-(-len(key) // page) for key in keys]
        blocks = np.random.default_rng(1).permutation(sum(counts))
        self._table = np.zeros((len(keys), max(counts)), np.int64)
        shape = (len(blocks), *keys[0].shape[1:])
        self._keys = torch.full((*shape, page), 3.0, dtype=keys[0].dtype, device=device)
        self._values = self._keys.transpose(2, 3).clone()
        for number, (key, value) in enumerate(zip(keys, values, strict=True)):
            own, blocks = blocks[: counts[number]], blocks[counts[number] :]
            self._table[number, : len(own)] = own
            for place in range(len(key)):
                self._keys[own[place // page], :, :, place % page] = key[place]
                self._values[own[place // page], :, place % page] = value[place]

    def attend(self, chosen: np.ndarray, cached: np.ndarray, tokens: np.ndarray, per_head: int) -> Tensor:
        queries = torch.cat(
            [
                self._queries[number][start : start + count]
                for number, start, count in zip(chosen, cached, tokens, strict=True)
            ]
        ).unflatten(1, (-1, per_head))
        sizes = tile_tokens(per_head, queries.dtype), queries.device
        tiles = Tiles.of(tokens, cached, self._table[chosen], *sizes)
        return paged_attention(queries, self._keys, self._values, tiles).flatten(1, 2)
