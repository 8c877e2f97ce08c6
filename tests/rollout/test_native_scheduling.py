"""What is drawn depends on the request alone: not on who waits, starts again, shares a prompt, or was interrupted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from hpcrl.rollout.engines.engine import CacheLayout
from hpcrl.rollout.engines.native import attention, generate_call
from hpcrl.rollout.engines.native.decoder import Decoder
from hpcrl.rollout.engines.native.engine import NativeEngine
from hpcrl.rollout.engines.native.row_cache import RowCache
from hpcrl.rollout.engines.native.scheduler import Scheduler
from hpcrl.rollout.protocol import Completion, Request, SamplingParams
from tests.rollout.small_model import SHAPE, draw_weights, make_requests

SAMPLING = SamplingParams(100, eos_token_ids=(1,))
MAX_MODEL_LEN = 250
REQUESTS = make_requests(6, 4, longest=140)


def make_engine(num_blocks: int | None = None, **options: Any) -> NativeEngine:
    options = {"max_num_seqs": 16, "max_num_batched_tokens": 512, "max_model_len": MAX_MODEL_LEN} | options
    cache = None if num_blocks is None else num_blocks * CacheLayout.of(SHAPE, 1, 1 << 20).block_bytes(4)
    engine = NativeEngine(SHAPE, None, 0, 1, torch.float32, kv_cache_bytes=cache, **options)
    draw_weights(engine)
    return engine


def assert_same(found: list[Completion], expected: list[Completion]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert one.token_ids.tolist() == other.token_ids.tolist()
        assert one.finish_reason == other.finish_reason
        np.testing.assert_allclose(one.log_probs, other.log_probs, rtol=0, atol=1e-5)


@pytest.fixture(scope="module")
def expected() -> list[Completion]:
    completions = make_engine(enable_prefix_caching=False).generate(REQUESTS, SAMPLING, seed=1, step=2)
    assert len({len(completion.token_ids) for completion in completions}) > 10
    assert {completion.finish_reason for completion in completions} == {"stop", "length"}
    return completions


@pytest.mark.parametrize("num_blocks", [8, 14])
def test_sequences_that_do_not_fit_start_again_with_the_same_result(
    num_blocks: int, expected: list[Completion], monkeypatch: pytest.MonkeyPatch
) -> None:
    put_back: list[int] = []
    original = Scheduler.put_back

    def count(self: Scheduler, sequences: list) -> None:
        put_back.extend(sequence.num_drawn for sequence in sequences)
        original(self, sequences)

    monkeypatch.setattr(Scheduler, "put_back", count)
    assert_same(make_engine(num_blocks).generate(REQUESTS, SAMPLING, seed=1, step=2), expected)
    assert max(put_back) > 0


def test_the_order_of_rows_does_not_matter(expected: list[Completion], monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are sorted by length wherever that saves padding."""
    sorted_rows: list[int] = []
    original = RowCache.reorder

    def reorder(self: RowCache, order: np.ndarray) -> None:
        sorted_rows.append(len(order))
        original(self, order)

    monkeypatch.setattr(RowCache, "reorder", reorder)
    monkeypatch.setattr(attention, "MIN_SAVED", 40)
    monkeypatch.setattr(generate_call, "MAX_PADDING", 1.0)
    assert_same(make_engine(max_num_seqs=7).generate(REQUESTS, SAMPLING, seed=1, step=2), expected)
    assert len(sorted_rows) > 3


@pytest.mark.parametrize("limit", [1, 7, 64])
def test_a_long_prompt_is_prefilled_in_parts(limit: int, expected: list[Completion]) -> None:
    engine = make_engine(max_num_batched_tokens=limit)
    assert_same(engine.generate(REQUESTS, SAMPLING, seed=1, step=2), expected)


def test_a_prompt_is_prefilled_once_for_its_group(expected: list[Completion], monkeypatch: pytest.MonkeyPatch) -> None:
    filled: list[int] = []
    original = Decoder.run

    def count(self: Decoder, token_ids: torch.Tensor, *args: Any, cache_only: bool) -> torch.Tensor:
        filled.append(cache_only * len(token_ids))
        return original(self, token_ids, *args, cache_only=cache_only)

    monkeypatch.setattr(Decoder, "run", count)
    assert_same(make_engine(max_num_seqs=24).generate(REQUESTS, SAMPLING, seed=1, step=2), expected)
    assert sum(filled) == sum(len(request.prompt_ids) - 1 for request in REQUESTS) / 4
    # With fewer rows than samples the others join while one of their group still runs.
    filled.clear()
    assert_same(make_engine(max_num_seqs=3).generate(REQUESTS, SAMPLING, seed=1, step=2), expected)
    assert sum(filled) < sum(len(request.prompt_ids) - 1 for request in REQUESTS) / 2


@pytest.mark.parametrize("steps", [0, 3, 40])
@pytest.mark.parametrize("num_blocks", [None, 20])
def test_an_aborted_generation_goes_on_as_if_nothing_had_happened(
    steps: int, num_blocks: int | None, expected: list[Completion]
) -> None:
    engine = make_engine(num_blocks)
    done, told, asked = {}, [], 0

    def should_abort() -> bool:
        nonlocal asked
        asked += 1
        return asked > steps

    parts = engine.generate(
        REQUESTS, SAMPLING, seed=1, step=2, on_finished=lambda index, _: told.append(index), should_abort=should_abort
    )
    assert told == [index for index, part in enumerate(parts) if part.finish_reason != "abort"] or steps
    assert set(told) == {index for index, part in enumerate(parts) if part.finish_reason != "abort"}
    again = [
        Request(request.prompt_ids, request.uid, request.sample_index, prefix_ids=part.token_ids)
        for request, part in zip(REQUESTS, parts, strict=True)
        if part.finish_reason == "abort"
    ]
    assert again
    rest = iter(engine.generate(again, SAMPLING, seed=1, step=2))
    for index, part in enumerate(parts):
        done[index] = part
        if part.finish_reason == "abort":
            more = next(rest)
            ids, log_probs = (
                np.concatenate([getattr(part, name), getattr(more, name)]) for name in ("token_ids", "log_probs")
            )
            done[index] = Completion(ids, log_probs, more.finish_reason)
    assert_same([done[index] for index in range(len(REQUESTS))], expected)


class Later:
    """Gives some requests at each call, whatever the engine does, and then waits until it is idle to end."""

    def __init__(self, requests: Sequence[Request]) -> None:
        self.requests = list(requests)
        self.idle: list[bool] = []

    def take(self, idle: bool) -> Sequence[Request] | None:
        self.idle.append(idle)
        if not self.requests:
            return None if idle else ()
        count = 3 if len(self.idle) % 4 == 0 or idle else 0
        taken, self.requests = self.requests[:count], self.requests[count:]
        return taken


@pytest.mark.parametrize("first", [0, 5])
def test_requests_may_come_while_others_run(first: int, expected: list[Completion]) -> None:
    source = Later(REQUESTS[first:])
    found = make_engine().generate(REQUESTS[:first], SAMPLING, seed=1, step=2, source=source)
    assert_same(found, expected)
    assert source.idle[0] == (first == 0)
    assert source.idle[-1]


def test_each_request_has_its_own_limit(expected: list[Completion]) -> None:
    limits = np.random.default_rng(0).integers(1, 40, len(expected))
    requests = [
        Request(request.prompt_ids, request.uid, request.sample_index, max_new_tokens=int(limit))
        for request, limit in zip(REQUESTS, limits, strict=True)
    ]
    for found, whole, limit in zip(
        make_engine().generate(requests, SAMPLING, seed=1, step=2), expected, limits, strict=True
    ):
        assert found.token_ids.tolist() == whole.token_ids[:limit].tolist()


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (Request([1], "a", prefix_ids=np.arange(100)), "may draw 0 more"),
        (Request([1], "a", max_new_tokens=0), "may draw 0 more"),
        (Request([1], "a", max_new_tokens=MAX_MODEL_LEN), "max_model_len"),
        (Request([1], "a", prefix_ids=np.array([50])), "0 to 49"),
    ],
)
def test_a_request_that_cannot_be_is_refused(request_: Request, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_engine().generate([request_], SAMPLING, seed=0, step=0)


def test_adopted_weights_are_those_of_others(expected: list[Completion]) -> None:
    engine = make_engine()
    others = {name: weight.clone() for name, weight in engine.weights().items()}
    for weight in engine.weights().values():
        weight.zero_()
    for name, weight in others.items():
        engine.adopt(name, weight)
    assert all(
        engine.weights()[name] is not None and engine.weights()[name].data_ptr() == weight.data_ptr()
        for name, weight in others.items()
    )
    assert_same(engine.generate(REQUESTS, SAMPLING, seed=1, step=2), expected)
    with pytest.raises(ValueError, match="copy it instead"):
        engine.adopt("decoder.final_layernorm.weight", torch.zeros(3))


def test_weights_do_not_change_under_a_generation() -> None:
    engine = make_engine()

    def update() -> None:
        with engine.updating_weights():
            pass

    update()
    with pytest.raises(RuntimeError, match="abort"):
        engine.generate(REQUESTS[:1], SAMPLING, seed=0, step=0, on_step=update)
    update()
