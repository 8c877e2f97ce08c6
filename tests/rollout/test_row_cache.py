"""The KV cache on the CPU, and attention over it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hpcrl.model.blocks.block import CachedHeads
from hpcrl.rollout.engines.engine import CacheLayout
from hpcrl.rollout.engines.native.attention import MIN_SAVED, DecodeAttention, NewTokens, cut_by_length, padded_tokens
from hpcrl.rollout.engines.native.kv_cache import Moves
from hpcrl.rollout.engines.native.row_cache import RowCache

HEADS = CachedHeads(2, 3, 8, 8)
LENGTHS = np.array([900, 3, 17, 850, 1, 700])


def filled(heads: CachedHeads, dtype: torch.dtype = torch.float32, num_blocks: int = 400) -> RowCache:
    cache = RowCache(CacheLayout((heads, heads)), num_blocks, 16, len(LENGTHS), 1024, dtype)
    cache.pool.grow(np.arange(len(LENGTHS)), LENGTHS)
    for row, length in enumerate(LENGTHS):
        cache.planes[0].keys[:, row, :, :length] = torch.randn(2, heads.groups, length, heads.key_dim)
        if not heads.value_in_key:
            cache.planes[0].values[:, row, :, :length] = torch.randn(2, heads.groups, length, heads.value_dim)
    return cache


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("heads", [HEADS, CachedHeads(1, 4, 12, 8, value_in_key=True)])
@pytest.mark.parametrize("rows", [np.arange(6), np.array([0, 1]), np.array([0])])
def test_attention_of_a_row_is_that_of_its_own_tokens(heads: CachedHeads, rows: np.ndarray, dtype: torch.dtype) -> None:
    cache = filled(heads, dtype)
    queries = torch.randn(len(rows), heads.groups, heads.queries, heads.key_dim, dtype=dtype)
    keys = torch.randn(len(rows), heads.groups, heads.key_dim, dtype=dtype)
    values = keys[..., : heads.value_dim] if heads.value_in_key else torch.randn_like(keys)
    found = DecodeAttention(NewTokens(cache, rows, LENGTHS[rows] - 1, np.ones_like(rows)))(1, queries, keys, values)
    for row in rows:
        own_keys, own_values = (plane[1, row, :, : LENGTHS[row]].float() for plane in cache.planes[0][2:])
        assert torch.equal(own_keys[:, -1], keys[row].float())  # it was stored
        scores = queries[row].float() @ own_keys.transpose(1, 2) * heads.key_dim**-0.5
        tolerance = 1e-5 if dtype == torch.float32 else 0.03
        torch.testing.assert_close(found[row].float(), scores.softmax(-1) @ own_values, rtol=0, atol=tolerance)


def test_rows_move_with_their_tokens() -> None:
    """In rows that memory is returned from, too."""
    for num_blocks in (400, 200):
        cache = filled(HEADS, num_blocks=num_blocks)
        free = cache.pool.num_free
        before = [cache.planes[0].keys[:, row, :, :length].clone() for row, length in enumerate(LENGTHS)]
        cache.free(np.array([0, 2]))
        cache.exchange(Moves(np.array([4, 5]), np.array([0, 2])))
        names = np.array([4, 1, 5, 3])
        order = np.argsort(-LENGTHS[names], kind="stable")
        cache.reorder(order)
        for row, name in enumerate(names[order]):
            assert torch.equal(cache.planes[0].keys[:, row, :, : LENGTHS[name]], before[name])
            assert cache.pool.count_of[row] == -(-LENGTHS[name] // 16)
        assert cache.pool.num_free == free + sum(-(-LENGTHS[row] // 16) for row in (0, 2))
        long, short = np.flatnonzero(order == 0)[0], np.flatnonzero(order == 1)[0]
        cache.exchange(Moves(np.array([long]), np.array([short])))
        for row, name in ((long, names[1]), (short, names[0])):
            assert torch.equal(cache.planes[0].keys[:, row, :, : LENGTHS[name]], before[name])


@given(st.lists(st.integers(1, 2000), min_size=1, max_size=40))
def test_cuts_cover_all_rows_and_save_what_they_cost(values: list[int]) -> None:
    lengths = np.array(values)
    runs = cut_by_length(lengths)
    assert np.concatenate([np.arange(len(lengths))[run] for run in runs]).tolist() == list(range(len(lengths)))
    assert padded_tokens(lengths) + (len(runs) - 1) * MIN_SAVED <= len(lengths) * lengths.max()
    ordered = np.sort(lengths)[::-1]
    for run in cut_by_length(ordered):  # no single cut more would pay
        inside = ordered[run]
        for place in range(1, len(inside)):
            cut = place * inside[0] + (len(inside) - place) * inside[place]
            assert len(inside) * inside[0] - cut < MIN_SAVED
