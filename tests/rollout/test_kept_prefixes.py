"""Conversations with and without a cache across their turns: the same tokens, of which fewer are prefilled."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from hpcrl.model.shape import ModelShape
from hpcrl.rollout.engines.engine import CacheLayout
from hpcrl.rollout.engines.native.engine import NativeEngine
from hpcrl.rollout.engines.native.kept_prefixes import KeptPrefixes
from hpcrl.rollout.engines.native.scheduler import Scheduler
from hpcrl.rollout.protocol import Request, SamplingParams, Trajectory
from tests.mpi.layouts import DEEPSEEK, DELTA, GPT_OSS, HYBRID
from tests.rollout.small_model import SHAPE, draw_weights, make_requests
from tests.rollout.turns import Turns
from tests.strict_device.load import load

CPU = torch.device("cpu")
SHAPES = {
    "full": SHAPE,
    "window": replace(SHAPE, num_layers=3, windows=(6, None, 40)),
    "latent": DEEPSEEK,
    "sinks": GPT_OSS,
    "delta": DELTA,
    "mamba": HYBRID,
}
MAX_LEN = 160
SAMPLING = SamplingParams(MAX_LEN - 40, eos_token_ids=(1, 2, 3, 4))
FREE = SamplingParams(2000, ignore_eos=True)
REQUESTS = [replace(it, prompt_ids=np.minimum(it.prompt_ids, 44)) for it in make_requests(3, 2, longest=40)]


def make_engine(
    shape: ModelShape = SHAPE, device: torch.device = CPU, num_blocks: int | None = None, **options: Any
) -> NativeEngine:
    options = {"max_num_seqs": 7, "max_num_batched_tokens": 128, "max_model_len": MAX_LEN} | options
    if num_blocks is not None:
        layout = CacheLayout.of(shape, 1, options["max_model_len"])
        fixed = options["max_num_seqs"] * layout.sequence_bytes(4)
        options["kv_cache_bytes"] = fixed + num_blocks * layout.block_bytes(4)
    engine = NativeEngine(shape, None, 0, 1, torch.float32, device=device, **options)
    draw_weights(engine)
    for name, weight in engine.weights().items():
        weight.mul_(1.0 if "layernorm" in name else 0.7)  # rounding grows with logits
    return engine


def converse(engine: NativeEngine, sampling: SamplingParams = SAMPLING, **options: Any) -> list[Trajectory]:
    return Turns(REQUESTS, **{"num_turns": 5} | options).run(engine, sampling)


def assert_same(found: list[Trajectory], expected: list[Trajectory]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert one.token_ids.tolist() == other.token_ids.tolist()
        np.testing.assert_allclose(one.log_probs, other.log_probs, rtol=0, atol=1e-5)
        assert (one.routed_experts is None) == (other.routed_experts is None)
        if one.routed_experts is not None:
            assert one.routed_experts.tolist() == other.routed_experts.tolist()


def computed(trajectories: list[Trajectory]) -> int:
    return sum(found.prefill.computed for found in trajectories)


CASES = [("full", "cpu"), ("window", "cpu"), ("latent", "cpu"), ("sinks", "cpu"), ("delta", "cpu"), ("mamba", "cpu")]
ON_DEVICE = [("full", "device"), ("delta", "device")]
SELDOM = [(name, "device") for name in ("window", "latent", "sinks", "mamba")]


def cases(usual: list[tuple[str, ...]], seldom: list[tuple[str, ...]]) -> list[Any]:
    return [*usual, *(pytest.param(*case, marks=pytest.mark.exhaustive) for case in seldom)]


@pytest.mark.parametrize(("name", "on"), cases([*CASES, *ON_DEVICE], SELDOM))
def test_trajectories_are_those_without_a_cache(name: str, on: str) -> None:
    device, sampling = load() if on == "device" else CPU, replace(SAMPLING, routed_experts=name == "latent")
    expected = converse(make_engine(SHAPES[name], device, enable_prefix_caching=False), sampling)
    assert max(found.num_turns for found in expected) == 5 and not any(found.prefill.reused for found in expected)
    found = converse(make_engine(SHAPES[name], device, max_num_seqs=16), sampling)
    assert_same(found, expected)
    assert computed(found) < 0.5 * computed(expected)


@pytest.mark.parametrize("on", ["cpu", "device"])
def test_exact_mode_is_exact(on: str) -> None:
    """Although calls have other numbers of tokens."""
    device = load() if on == "device" else CPU
    plain, cached = (
        converse(make_engine(SHAPE, device, exact=True, enable_prefix_caching=is_on, max_num_seqs=16), num_turns=3)
        for is_on in (False, True)
    )
    assert computed(cached) < 0.6 * computed(plain)
    for one, other in zip(cached, plain, strict=True):
        assert one.log_probs.tobytes() == other.log_probs.tobytes()


def test_ten_turns_of_200_tokens_are_prefilled_once() -> None:
    sizes = {"max_model_len": 2200, "max_num_batched_tokens": 512}
    options = {"num_turns": 10, "limit": 100, "longest": 100}
    prompt = np.random.default_rng(0).integers(5, 45, 100)
    plain, cached = (
        Turns([Request(prompt, "a")], **options).run(make_engine(**sizes, enable_prefix_caching=on), FREE)
        for on in (False, True)
    )
    assert_same(cached, plain)
    tokens = len(prompt) + len(plain[0].token_ids)
    assert tokens == 2000
    assert computed(plain) == sum(range(100, 2000, 200)) - 10  # all but the last token of each turn's context
    assert computed(cached) == 100 - 1 + 9 * 100 <= 1.1 * tokens
    assert cached[0].prefill.reused == computed(plain) - computed(cached)


@pytest.mark.parametrize(
    ("name", "on"), cases([*CASES[:2], *CASES[5:], *ON_DEVICE[:1]], [*CASES[2:5], *ON_DEVICE[1:], *SELDOM])
)
def test_running_sequences_take_the_blocks_and_rows_of_kept_prefixes(
    name: str, on: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was evicted or preempted is prefilled again. Rows are fewer than conversations."""
    device, sampling = load() if on == "device" else CPU, replace(SAMPLING, eos_token_ids=(1,))
    counts = {"evict": 0, "put_back": 0}
    evict, put_back = KeptPrefixes.evict, Scheduler.put_back

    def counted_evict(self: KeptPrefixes, num_blocks: int) -> None:
        before = len(self._of)
        evict(self, num_blocks)
        counts["evict"] += before - len(self._of)

    def counted_put_back(self: Scheduler, sequences: Any) -> None:
        found = list(sequences)
        counts["put_back"] += sum(sequence.num_drawn > 0 for sequence in found)
        put_back(self, found)

    monkeypatch.setattr(KeptPrefixes, "evict", counted_evict)
    monkeypatch.setattr(Scheduler, "put_back", counted_put_back)
    expected = converse(make_engine(SHAPES[name], device, enable_prefix_caching=False), sampling)
    assert counts["evict"] == 0
    counts["put_back"] = 0
    found = converse(make_engine(SHAPES[name], device, num_blocks=5, max_num_seqs=4), sampling)
    assert_same(found, expected)
    assert counts["evict"] > 0 and counts["put_back"] > 0
    assert sum(one.prefill.reused for one in found) > 0


def test_a_context_that_does_not_start_with_what_is_kept_is_prefilled_whole() -> None:
    def next_turns(engine: NativeEngine, edit: bool) -> list[Trajectory]:
        turns = Turns(REQUESTS, num_turns=2)
        take = turns.take

        def edited(idle: bool) -> Any:
            ready = take(idle)
            if not edit or not ready:
                return ready
            return [replace(it, prompt_ids=np.append(it.prompt_ids[:-1], 7)) for it in ready]

        turns.take = edited  # type: ignore[method-assign]
        return turns.run(engine, SAMPLING)

    found = {on: next_turns(make_engine(enable_prefix_caching=on), edit=True) for on in (False, True)}
    assert_same(found[True], found[False])
    sharing = sum(len(request.prompt_ids) - 1 for request in REQUESTS) * 2 // 3
    assert sum(one.prefill.reused for one in found[True]) <= sharing  # of groups, whose prompts are equal
    assert sum(one.prefill.reused for one in next_turns(make_engine(), edit=False)) > sharing


def test_nothing_is_kept_over_an_update_of_the_weights() -> None:
    """The next turn is drawn as by an engine that has had no other weights."""
    engine, fresh = make_engine(), make_engine()
    [first] = Turns(REQUESTS[:1], num_turns=1).run(engine, SAMPLING)
    with engine.updating_weights():
        for own, other in zip(engine.weights().values(), fresh.weights().values(), strict=True):
            own.mul_(0.9)
            other.mul_(0.9)
    following = [replace(REQUESTS[0], prefix_ids=np.append(first.token_ids, [7, 8]).astype(np.int32))]
    found, expected = (Turns(following, num_turns=2).run(each, SAMPLING) for each in (engine, fresh))
    assert_same(found, expected)
    assert found[0].prefill == expected[0].prefill
