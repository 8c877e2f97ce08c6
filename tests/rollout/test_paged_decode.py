"""Decoding on a device that is not the CPU: the CPU's tokens, and what a step asks of the host."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from hpcrl.model.blocks.block import CachedHeads, CachedState
from hpcrl.model.shape import ModelShape
from hpcrl.rollout.engines.engine import CacheLayout
from hpcrl.rollout.engines.native.attention import PagedAttention
from hpcrl.rollout.engines.native.engine import NativeEngine
from hpcrl.rollout.engines.native.kv_cache import KVCache
from hpcrl.rollout.engines.native.paged_decode import graph_size
from hpcrl.rollout.engines.native.scheduler import Scheduler
from hpcrl.rollout.protocol import Completion, Request, SamplingParams
from tests.rollout.small_model import SHAPE, draw_weights, make_requests
from tests.rollout.test_native_scheduling import Later
from tests.strict_device.load import Counts, load

CPU = torch.device("cpu")
EXPERTS = replace(SHAPE, num_experts=4, moe_topk=2, moe_ffn_hidden_size=24)
SAMPLING = SamplingParams(50, temperature=0.8, eos_token_ids=(1, 2))
REQUESTS = make_requests(5, 3, longest=70)


@pytest.fixture(scope="module")
def device() -> torch.device:
    return load()


def make_engine(device: torch.device, shape: ModelShape = SHAPE, num_blocks: int | None = None) -> NativeEngine:
    cache = None if num_blocks is None else num_blocks * CacheLayout.of(shape, 1, 1 << 20).block_bytes(4)
    engine = NativeEngine(
        shape,
        None,
        0,
        1,
        torch.float32,
        max_num_seqs=7,
        max_num_batched_tokens=128,
        max_model_len=130,
        kv_cache_bytes=cache,
        device=device,
    )
    draw_weights(engine)
    return engine


def generate(
    device: torch.device, shape: ModelShape = SHAPE, num_blocks: int | None = None, **sampling: Any
) -> list[Completion]:
    engine = make_engine(device, shape, num_blocks)
    return engine.generate(REQUESTS, replace(SAMPLING, **sampling), seed=1, step=2)


def assert_same(found: list[Completion], expected: list[Completion]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert one.token_ids.tolist() == other.token_ids.tolist()
        assert one.finish_reason == other.finish_reason
        np.testing.assert_allclose(one.log_probs, other.log_probs, rtol=0, atol=1e-5)
        assert (one.routed_experts is None) == (other.routed_experts is None)
        if one.routed_experts is not None:
            assert one.routed_experts.tolist() == other.routed_experts.tolist()


@pytest.fixture(scope="module")
def expected() -> list[Completion]:
    completions = generate(CPU)
    assert {completion.finish_reason for completion in completions} == {"stop", "length"}
    return completions


def test_ids_without_a_token_are_never_drawn(device: torch.device) -> None:
    requests = [Request(np.array([1, 2, number]), str(number)) for number in range(15)]
    for decoding in (device, CPU):
        engine = make_engine(decoding, replace(SHAPE, tokenizer_size=15))
        for sampling in ({}, {"top_k": 10}, {"top_p": 0.9}, {"temperature": 0.0}):
            found = engine.generate(requests, replace(SAMPLING, **sampling), seed=1, step=2)
            assert max(completion.token_ids.max() for completion in found) == 14


def test_preempted_sequences_draw_the_same(
    device: torch.device, expected: list[Completion], monkeypatch: pytest.MonkeyPatch
) -> None:
    preempted: list[int] = []
    original = Scheduler.put_back

    def count(self: Scheduler, sequences: list) -> None:
        preempted.extend(sequence.num_drawn for sequence in sequences)
        original(self, sequences)

    monkeypatch.setattr(Scheduler, "put_back", count)
    assert_same(generate(device, num_blocks=8), expected)
    assert max(preempted) > 0


@pytest.mark.parametrize(
    ("shape", "sampling"),
    [(EXPERTS, {"routed_experts": True}), (SHAPE, {"top_k": 5, "top_p": 0.9}), (SHAPE, {"temperature": 0.0})],
)
def test_tokens_and_experts_are_those_of_the_cpu(
    device: torch.device, shape: ModelShape, sampling: dict[str, Any]
) -> None:
    assert_same(generate(device, shape, **sampling), generate(CPU, shape, **sampling))


def test_requests_may_come_and_be_aborted(device: torch.device, expected: list[Completion]) -> None:
    """Requests come while others run. An aborted sequence has drawn a part of the same tokens."""
    found = make_engine(device).generate([], SAMPLING, seed=1, step=2, source=Later(REQUESTS))
    assert_same(found, expected)
    calls = iter(range(60))
    parts = make_engine(device).generate(REQUESTS, SAMPLING, seed=1, step=2, should_abort=lambda: next(calls) > 40)
    reasons = {part.finish_reason for part in parts}
    assert "abort" in reasons and len(reasons) > 1
    for part, whole in zip(parts, expected, strict=True):
        assert part.token_ids.tolist() == whole.token_ids[: len(part.token_ids)].tolist()
        assert part.finish_reason in ("abort", whole.finish_reason)


@pytest.mark.parametrize("shape", [SHAPE, EXPERTS], ids=["dense", "experts"])
def test_rows_of_a_graph_that_no_sequence_has_change_nothing(device: torch.device, shape: ModelShape) -> None:
    engine = make_engine(device, shape)
    paged = engine._paged
    assert paged is not None
    paged._graphs = paged._run  # type: ignore[assignment]  # not captured, but with a graph's number of rows
    sizes = {graph_size(rows) for rows in range(1, 8)}
    assert sizes == {1, 2, 4, 8}
    assert_same(engine.generate(REQUESTS, SAMPLING, seed=1, step=2), generate(CPU, shape))


def test_sizes_of_graphs() -> None:
    assert [graph_size(rows) for rows in range(1, 17)] == [1, 2, 4, 4, *[8] * 4, *[16] * 8]
    assert [graph_size(rows) for rows in (17, 32, 33, 48, 49, 500)] == [32, 32, 48, 48, 64, 512]


def counts_of_steps(device: torch.device, rows: int, layers: int, shape: ModelShape) -> list[Counts]:
    """Of steps in which no sequence joins or ends; every 32nd token needs a new block."""
    engine = make_engine(device, replace(shape, num_layers=layers))
    assert not engine._decoder.needs_host
    requests = [Request(np.arange(1, 20 + row), f"file:{row}:0") for row in range(rows)]
    after: list[Counts] = []
    engine.generate(
        requests, SamplingParams(40, ignore_eos=True), seed=0, step=0, on_step=lambda: after.append(Counts.now())
    )
    # The first step reads no tokens, the last one its own as well.
    steps = [late.since(early) for early, late in pairwise(after)][-40:]
    assert [step.synchronisations for step in (steps[0], steps[-1])] == [0, 2]
    return steps[1:-1]


@pytest.mark.parametrize("shape", [SHAPE, EXPERTS, replace(EXPERTS, num_experts=8)], ids=["dense", "4", "8"])
def test_a_step_takes_one_transfer_each_way_and_its_launches_do_not_depend_on_rows(
    device: torch.device, shape: ModelShape
) -> None:
    sizes = (1, 1), (7, 1), (7, 2)
    by_size = {(rows, layers): counts_of_steps(device, rows, layers, shape) for rows, layers in sizes}
    for (rows, _), steps in by_size.items():
        for step in steps:
            # The wait is for the tokens of the step before, after this one was launched.
            assert (step.to_host, step.bytes_to_host, step.synchronisations) == (1, 8 * rows, 1)
            assert step.to_device <= 1 and step.bytes_to_device <= 8 * rows
        # Most steps need nothing from the host.
        assert sum(step.to_device for step in steps) <= 2 * rows
    launches = {size: min(step.launches for step in steps) for size, steps in by_size.items()}
    assert launches[1, 1] == launches[7, 1]
    assert launches[7, 2] - launches[7, 1] < (50 if shape is SHAPE else 70)


def test_a_row_without_cached_tokens_has_no_state_of_an_earlier_one() -> None:
    heads, state = CachedHeads(groups=1, queries=2, key_dim=16, value_dim=16), CachedState(((2, 3),))
    cache = KVCache(CacheLayout((heads, state)), 4, 32, 3, torch.float32, torch.device("cpu"))
    cache.states[1][0].fill_(torch.nan)
    numbers = torch.arange(3, dtype=torch.int32)
    cached, num_rows = torch.tensor([0, 5, 1], dtype=torch.int32), torch.tensor([3], dtype=torch.int32)
    attention = PagedAttention(cache, numbers, numbers, 1, cached, num_rows, numbers)
    (found,) = attention.states(1)
    assert (found[0] == 0).all() and found[1:].isnan().all()
