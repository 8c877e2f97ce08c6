from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from hpcrl.kernels.decode_attention import (
    MAX_WIDTH,
    NUM_PROGRAMS,
    Cut,
    PagedRows,
    cut_rows,
    decode_attention,
    is_fused,
)
from hpcrl.kernels.decode_attention_triton import cut_rows as fused_cut_rows
from hpcrl.kernels.dispatch import FP8
from hpcrl.model.blocks.block import CachedHeads
from hpcrl.rollout.engines.engine import CacheLayout
from hpcrl.rollout.engines.native.attention import DecodeAttention, NewTokens, PagedAttention
from hpcrl.rollout.engines.native.engine import NativeEngine
from hpcrl.rollout.engines.native.kv_cache import KVCache
from hpcrl.rollout.engines.native.row_cache import RowCache
from hpcrl.rollout.protocol import Completion, Request, SamplingParams
from tests.kernels.close import DTYPES, assert_near
from tests.rollout.small_model import SHAPE, draw_weights

SIZE = 16
# more blocks than fit in a tile, ends inside a block, at its end and in the first
LENGTHS = (1, 16, 150, 33)
WANTED = 20  # parts; the interpreter takes its time for each, with or without tokens


class Shape(NamedTuple):
    groups: int
    per_head: int
    key: int
    value: int
    value_in_key: bool = False


SHAPES = (
    Shape(2, 3, 32, 32),
    Shape(1, 1, 16, 16),
    Shape(2, 4, 80, 48),  # no powers of 2, and not the same
    Shape(1, 33, 8, 512),  # more queries than a program has
    Shape(1, 5, 40, 24, value_in_key=True),
    Shape(1, 16, 96, 64, value_in_key=True),
)


class Cache(NamedTuple):
    queries: Tensor
    keys: Tensor
    values: Tensor
    rows: PagedRows


def make(shape: Shape, dtype: torch.dtype, device: torch.device, least: int = 64) -> Cache:
    """Rows with their blocks in no order; memory that no block uses is NaN."""
    lengths = np.array(LENGTHS)
    counts = -(-lengths // SIZE)
    num_blocks = int(counts.sum()) + 3
    order = np.random.default_rng(0).permutation(num_blocks)
    blocks, unused = order[:-3], order[-3:]
    keys = torch.randn(num_blocks, shape.groups, shape.key, SIZE, device=device).to(dtype)
    values = torch.randn(num_blocks, shape.groups, SIZE, shape.value, device=device).to(dtype)
    for plane in (keys, values):
        plane[torch.from_numpy(unused)] = float("nan")
    if shape.value_in_key:
        values = keys[:, :, : shape.value].transpose(2, 3)
    queries = torch.randn(len(lengths), shape.groups, shape.per_head, shape.key, device=device).to(dtype)
    places = blocks, counts.cumsum() - counts, lengths, np.array([len(lengths)])
    table, starts, tokens, num_rows = (torch.from_numpy(part.astype(np.int32)).to(device) for part in places)
    rows = PagedRows.of(keys, table, starts, tokens, int(counts.max()), Cut(WANTED, least), num_rows)
    return Cache(queries, keys, values, rows)


def exact(cache: Cache, scale: float, sinks: Tensor | None = None) -> Tensor:
    """One token at a time."""
    outputs = []
    for query, start, length in zip(cache.queries.double(), cache.rows.starts, cache.rows.lengths, strict=True):
        places = [(int(cache.rows.blocks[start + token // SIZE]), token % SIZE) for token in range(length)]
        keys = torch.stack([cache.keys[block, :, :, offset] for block, offset in places]).double()
        values = torch.stack([cache.values[block, :, offset] for block, offset in places]).double()
        weights = torch.einsum("hqd,thd->hqt", query, keys) * scale
        if sinks is not None:
            weights = torch.cat([weights, sinks.double().unsqueeze(-1)], -1)
        weights = weights.softmax(-1)[..., :length]
        outputs.append(torch.einsum("hqt,thd->hqd", weights, values))
    return torch.stack(outputs)


@pytest.mark.parametrize(
    ("dtype", "shape"),
    [*((torch.float32, shape) for shape in SHAPES), *((dtype, SHAPES[i]) for dtype in DTYPES[1:] for i in (0, 4))],
)
def test_it_is_attention(
    device: torch.device, dtype: torch.dtype, shape: Shape, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = make(shape, dtype, device)
    scale = shape.key**-0.5
    found = decode_attention(*cache, scale=scale)
    assert found.dtype == dtype
    assert_near(found, exact(cache, scale), dtype)
    monkeypatch.setenv("HPCRL_KERNELS", "torch")
    assert_near(found, decode_attention(*cache, scale=scale), dtype, factor=2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [SHAPES[2], SHAPES[5]])
def test_keys_and_values_in_8_bits(
    device: torch.device, dtype: torch.dtype, shape: Shape, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The numbers that the cache has are computed with as in the dtype of the queries."""
    cache, scale = make(shape, dtype, device), shape.key**-0.5
    keys, values = cache.keys.to(FP8), cache.values.to(FP8)
    if shape.value_in_key:
        values = keys[:, :, : shape.value].transpose(2, 3)
    expected = exact(cache._replace(keys=keys.float(), values=values.float()), scale)
    cache = cache._replace(keys=keys, values=values)
    assert is_fused(keys, values)
    assert_near(decode_attention(*cache, scale=scale), expected, dtype)
    monkeypatch.setenv("HPCRL_KERNELS", "torch")
    assert_near(decode_attention(*cache, scale=scale), expected, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sink_is_one_more_score_without_a_value(
    device: torch.device, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where it is far from the scores, on either side."""
    cache = make(SHAPES[0], dtype, device)
    sinks = torch.tensor([[-200.0, -1.0, 0.0], [1.0, 3.0, 40.0]], device=device).to(dtype)
    expected = exact(cache, 0.2, sinks)
    assert_near(decode_attention(*cache, scale=0.2, sinks=sinks), expected, dtype)
    monkeypatch.setenv("HPCRL_KERNELS", "torch")
    assert_near(decode_attention(*cache, scale=0.2, sinks=sinks), expected, dtype)


def test_it_does_not_matter_how_rows_are_cut(device: torch.device) -> None:
    """Into more parts, too, than are put together at once."""
    cache = make(SHAPES[0], torch.float32, device)
    whole = decode_attention(*make_cut(cache, 1000), scale=0.3)
    parts = make_cut(cache, 1)
    assert parts.rows.parts_of[:, 1].max() > 4
    assert_near(decode_attention(*parts, scale=0.3), whole, torch.float32)


def make_cut(cache: Cache, least: int) -> Cache:
    rows = cache.rows
    num_rows = rows.lengths.new_tensor([len(LENGTHS)])
    cut = PagedRows.of(cache.keys, rows.blocks, rows.starts, rows.lengths, rows.width, Cut(WANTED, least), num_rows)
    return cache._replace(rows=cut)


def test_large_scores(device: torch.device) -> None:
    """Of either sign, in one part and over parts: a softmax that picks one token, or none before the last part."""
    cache = make(Shape(1, 2, 16, 16), torch.float32, device)
    cache.keys.mul_(300)
    assert_near(decode_attention(*cache, scale=1.0), exact(cache, 1.0), torch.float32)
    cache.keys.nan_to_num_(0.0).abs_().mul_(-1e6)
    cache.queries.abs_()
    assert_near(decode_attention(*cache, scale=1.0), exact(cache, 1.0), torch.float32)


def test_rows_that_repeat_the_first(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a captured graph is given for fewer rows than it has."""
    cache = make(SHAPES[0], torch.float32, device)
    rows, num_rows = cache.rows, cache.rows.lengths.new_tensor([len(LENGTHS)])
    starts, lengths = (torch.cat([part, part[:1].expand(2)]) for part in (rows.starts, rows.lengths))
    padded = PagedRows.of(cache.keys, rows.blocks, starts, lengths, rows.width, Cut(WANTED, 64), num_rows)
    queries = torch.cat([cache.queries, cache.queries[:1].expand(2, -1, -1, -1)])
    for choice in ("triton", "torch"):
        monkeypatch.setenv("HPCRL_KERNELS", choice)
        expected = decode_attention(*cache, scale=1.0)
        found = decode_attention(queries, cache.keys, cache.values, padded, scale=1.0)
        assert_near(found, torch.cat([expected, expected[:1].expand(2, -1, -1, -1)]), torch.float32)
    assert padded.parts_of[4:].tolist() == padded.parts_of[:1].tolist() * 2


@pytest.mark.parametrize("shape", [(8, 4, 128), (1, 16, 512), (1, 128, 512), (128, 1, 64)])
def test_parts_hold_each_token_once_and_stay_in_bounds(device: torch.device, shape: tuple[int, int, int]) -> None:
    """The kernel and torch cut in the same way."""
    generator = np.random.default_rng()
    cut = Cut.of(*shape)
    for number in range(50):
        lengths = generator.integers(1, 10 ** generator.integers(1, 6), generator.integers(1, 300))
        counts = -(-lengths // SIZE)
        starts = counts.cumsum() - counts
        num_rows = generator.integers(1, len(lengths) + 1)
        lengths[num_rows:] = lengths[0]
        starts[num_rows:] = starts[0]
        arrays = starts, lengths, np.array([num_rows])
        given = [torch.from_numpy(array.astype(np.int32)) for array in arrays]
        parts, parts_of = cut_rows(*given[:2], SIZE, cut, given[2])
        if number < 5:
            on_device = [part.to(device) for part in given]
            fused, fused_of = fused_cut_rows(*on_device[:2], SIZE, cut, on_device[2])
            assert torch.equal(fused.cpu(), parts * (parts[:, 2:3] > 0)) and torch.equal(fused_of.cpu(), parts_of)
        assert len(parts) == len(lengths) + cut.wanted
        assert parts_of[num_rows:].tolist() == parts_of[:1].tolist() * (len(lengths) - num_rows)
        for row, (first, count) in enumerate(parts_of[:num_rows].tolist()):
            place = starts[row]
            for start, owner, tokens, _ in parts[first : first + count].tolist():
                assert (start, owner) == (place, row)
                assert tokens > 0
                place += -(-tokens // SIZE)
            taken = parts[first : first + count, 2]
            assert taken.sum() == lengths[row]
            assert (taken[:-1] % SIZE == 0).all()
        assert parts[:, 2].sum() == lengths[:num_rows].sum()
    assert cut.wanted <= NUM_PROGRAMS


def test_what_the_kernel_does_not_take_goes_to_torch(device: torch.device, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "hpcrl.kernels.dispatch")
    values = torch.zeros(1, 1, 16, 2 * MAX_WIDTH, device=device)
    assert not is_fused(torch.zeros(1, 1, 8, 16, device=device), values)
    assert "torch, heads of 1024 are wider than 512" in caplog.text
    assert not is_fused(torch.zeros(1, 1, 8, 24, device=device), values[..., :8])


@pytest.mark.slow
@pytest.mark.parametrize("heads", [CachedHeads(2, 3, 32, 32), CachedHeads(1, 4, 40, 24, value_in_key=True)])
def test_what_the_engine_has_in_its_place_on_the_cpu(
    device: torch.device, heads: CachedHeads, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And with a row that repeats the first one, as a graph has."""
    monkeypatch.setattr("hpcrl.kernels.decode_attention.NUM_PROGRAMS", 16)
    layout = CacheLayout((heads, heads))
    cache = KVCache(layout, 40, SIZE, 5, torch.float32, device)
    for plane in cache.planes[0].owned:
        plane.normal_()
    # Blocks in no order: rows grow in turns, and one goes.
    lengths = np.array([20, 33, 1, 64, 50])
    table = np.zeros((5, 4), np.int32)
    for tokens in range(1, 65):
        rows = np.flatnonzero(lengths >= tokens)
        blocks = cache.pool.grow(rows, np.full(len(rows), tokens))
        table[cache.pool.row_of[blocks], cache.pool.order_of[blocks]] = blocks
    cache.pool.release(np.array([4]))
    same = RowCache(layout, 40, SIZE, 4, 64, torch.float32)
    for row in range(4):
        for plane, number in ((same.planes[0].keys, 0), (same.planes[0].values, 1)):
            [span] = cache.spans(row, int(lengths[row]), 64)
            found = cache.read(1, span)[number]
            plane[1, row, :, : found.size(1)] = found
    rows = np.arange(4)
    new = NewTokens(same, rows, lengths[:4] - 1, np.ones_like(rows))
    queries = torch.randn(4, heads.groups, heads.queries, heads.key_dim)
    keys = torch.randn(4, heads.groups, heads.key_dim)
    values = keys[..., : heads.value_dim] if heads.value_in_key else torch.randn_like(keys)
    expected = DecodeAttention(new)(1, queries, keys, values)
    assert PagedAttention.fits(layout, SIZE, torch.float32, device)
    arrays = table.ravel(), 4 * np.array([0, 1, 2, 3, 0]), lengths[[0, 1, 2, 3, 0]] - 1, np.array([4])
    places, starts, cached, num_rows = (torch.from_numpy(array.astype(np.int32)).to(device) for array in arrays)
    paged = PagedAttention(cache, places, starts, 4, cached, num_rows)
    found = paged(1, *(torch.cat([part, part[:1]]).to(device) for part in (queries, keys, values)))
    assert_near(found.cpu(), torch.cat([expected, expected[:1]]), torch.float32)


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [pytest.param(0.0, marks=pytest.mark.exhaustive), 1.0])
def test_a_generation_draws_what_it_draws_without_kernels(
    device: torch.device, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows cross blocks of the cache and are cut, end at different times, and others take their places."""
    monkeypatch.setattr("hpcrl.kernels.decode_attention.MIN_PART_TOKENS", 1)
    monkeypatch.setattr("hpcrl.kernels.decode_attention.NUM_PROGRAMS", 16)
    generator = np.random.default_rng(1)
    prompts = [generator.integers(0, SHAPE.vocab_size, length) for length in (31, 3, 34)]
    requests = [Request(prompt, f"file:{len(prompt)}:0", sample) for prompt in prompts for sample in range(2)]
    sampling = SamplingParams(6, temperature=temperature, eos_token_ids=(13, 15, 29))

    def generate() -> list[Completion]:
        engine = NativeEngine(
            SHAPE, None, 0, 1, torch.float32, max_num_seqs=4, max_num_batched_tokens=64, max_model_len=40, device=device
        )
        draw_weights(engine)
        return engine.generate(requests, sampling, seed=0, step=0)

    found = generate()
    monkeypatch.setenv("HPCRL_KERNELS", "torch")
    expected = generate()
    lengths = [len(completion.token_ids) for completion in expected]
    assert max(lengths[:2]) == 6 and len(set(lengths)) > 2
    for one, other in zip(found, expected, strict=True):
        assert one.token_ids.tolist() == other.token_ids.tolist()
        assert one.finish_reason == other.finish_reason
        np.testing.assert_allclose(one.log_probs, other.log_probs, rtol=0, atol=1e-5)
