"""Checksums compose over shards, and notice what a transfer can do wrong."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcrl.kernels.checksum import add_checksum, odd_hashes
from tests.kernels.close import DTYPES

ROWS, COLS = 12, 1500  # more columns than are worked on at once


def checksum(values: torch.Tensor, row: int, col: int, dtype: torch.dtype, scratch_bytes: int = 2**20) -> int:
    total = torch.zeros((), dtype=torch.int64)
    add_checksum(total, values, row, col, dtype, scratch_bytes)
    return int(total) % 2**64


def weights(seed: int = 0) -> torch.Tensor:
    return torch.randn(ROWS, COLS, generator=torch.Generator().manual_seed(seed))


@settings(max_examples=30, deadline=None)
@given(
    rows=st.lists(st.integers(0, ROWS), max_size=3),
    cols=st.lists(st.integers(0, COLS), max_size=3),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    scratch_bytes=st.sampled_from([5000, 2**16, 2**20]),
)
def test_parts_sum_to_the_whole(rows, cols, dtype, scratch_bytes) -> None:
    """However the tensor is cut, whether rounded before or after, and however much is worked on at once."""
    whole = weights()
    rows, cols = sorted({0, *rows, ROWS}), sorted({0, *cols, COLS})
    total = sum(
        checksum(whole[top:bottom, left:right], top, left, dtype, scratch_bytes)
        for top, bottom in zip(rows, rows[1:], strict=False)
        for left, right in zip(cols, cols[1:], strict=False)
    )
    assert total % 2**64 == checksum(whole.to(dtype), 0, 0, dtype)


@given(row=st.integers(0, ROWS - 1), col=st.integers(0, COLS - 1), bit=st.integers(0, 31))
def test_any_bit_counts(row, col, bit) -> None:
    good, bad = weights(), weights()
    bad.view(torch.int32)[row, col] ^= (1 << bit) - (1 << 32) * (bit == 31)
    assert checksum(good, 0, 0, torch.float32) != checksum(bad, 0, 0, torch.float32)


def test_values_in_the_wrong_place_count() -> None:
    good = weights()
    right = checksum(good, 0, 0, torch.float32)
    rows, cols = good[[1, 0, *range(2, ROWS)]], good[:, [1, 0, *range(2, COLS)]]
    for bad in (rows, cols, good.flip(0), good.flip(1), good.roll(1, 0), good.roll(512, 1)):
        assert checksum(bad, 0, 0, torch.float32) != right
    assert checksum(good, 1, 0, torch.float32) != right != checksum(good, 0, 1, torch.float32)


def test_a_vector_is_one_column() -> None:
    vector = torch.randn(100)
    halves = (
        checksum(vector[part].view(50, 1), start, 0, torch.float32)
        for part, start in ((slice(50), 0), (slice(50, None), 50))
    )
    assert sum(halves) % 2**64 == checksum(vector.view(100, 1), 0, 0, torch.float32)


@pytest.mark.parametrize("start", [0, 10**6])
def test_hashes_are_odd_and_differ(start) -> None:
    hashes = odd_hashes(start, start + 10_000, 1, torch.device("cpu"))
    assert bool((hashes % 2 == 1).all()) and hashes.unique().numel() == 10_000
    assert torch.equal(hashes[500:600], odd_hashes(start + 500, start + 600, 1, torch.device("cpu")))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1), (300, 1), (5, 1030), (70, 33)])
def test_the_kernel_has_the_same_sum(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, shape: tuple[int, int], dtype: torch.dtype
) -> None:
    """Of numbers in fp32 that are rounded, whose rows lie apart, far into a tensor; nothing outside is read."""
    wide = torch.full((shape[0], shape[1] + 3), torch.nan, device=device)
    values = wide[:, : shape[1]].normal_()
    totals = torch.full((3,), -5, dtype=torch.int64, device=device)
    add_checksum(totals[1], values, 7, 2**33, dtype)
    monkeypatch.setenv("HPCRL_KERNELS", "torch")
    expected = torch.tensor(-5)
    add_checksum(expected, values.cpu(), 7, 2**33, dtype)
    assert totals.tolist() == [-5, int(expected), -5]
