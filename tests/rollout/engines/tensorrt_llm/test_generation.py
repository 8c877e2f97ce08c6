"""What is in flight, what ends when, and what ranks are told, with an engine that ends requests when it is told to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from hpcrl.rollout.engines.tensorrt_llm.engine import GenerateCall
from hpcrl.rollout.protocol import Completion, Request, SamplingParams, completed
from tests.rollout.engines.tensorrt_llm.standins import output


class Engine:
    """Draws the sum of the input, then that plus 1, ...; one token of all that run per poll of the first of them."""

    def __init__(self, goes_silent: bool = False) -> None:
        self.limits: list[int] = []
        self.inputs: list[list[int]] = []
        self.drawn: list[list[int]] = []
        self.cancelled: set[int] = set()
        self.goes_silent = goes_silent
        self.most = 0

    def submit(self, token_ids: list[int], arguments: dict[str, Any]) -> int:
        self.inputs.append(token_ids)
        self.limits.append(arguments["max_tokens"])
        self.drawn.append([])
        self.most = max(self.most, sum(len(d) < n for d, n in zip(self.drawn, self.limits, strict=True)))
        return len(self.inputs) - 1

    def poll(self, handle: int) -> Any:
        if handle in self.cancelled:
            return None if self.goes_silent else output(self.drawn[handle], "cancelled")
        self.drawn[handle].append(sum(self.inputs[handle]) + len(self.drawn[handle]))
        return output(self.drawn[handle], "length") if len(self.drawn[handle]) == self.limits[handle] else None

    def cancel(self, handle: int) -> None:
        """What is one token from its end gets there first."""
        if len(self.drawn[handle]) + 1 < self.limits[handle]:
            self.cancelled.add(handle)


def run(engine: Engine, requests: Sequence[Request], max_new_tokens: int = 4, **more: Any) -> list[Completion]:
    sampling = SamplingParams(max_new_tokens=max_new_tokens)
    made = GenerateCall(
        *(engine, lambda news: news, sampling, 0, 0),
        max_in_flight=3,
        max_model_len=16,
        vocab_size=100,
        on_finished=more.pop("on_finished", None),
    )
    return completed(made, requests, **more)


REQUESTS = [Request([start], f"p{start}", max_new_tokens=1 + start % 4) for start in range(8)]


def test_completions_are_in_the_order_of_requests_and_told_as_they_end() -> None:
    engine, told = Engine(), {}
    steps: list[int] = []
    found = run(engine, REQUESTS, on_finished=told.__setitem__, on_step=lambda: steps.append(len(told)))
    assert [done.token_ids.tolist() for done in found] == [
        [start + place for place in range(1 + start % 4)] for start in range(8)
    ]
    assert told == dict(enumerate(found)) and list(told) != sorted(told)
    assert engine.most <= 3 and len(steps) > 1


def test_a_source_is_asked_until_it_says_no_more() -> None:
    class Turns:
        def __init__(self) -> None:
            self.answers: list[list[Request] | None] = [[], [REQUESTS[1]], [], [REQUESTS[2], REQUESTS[3]], None]
            self.idle: list[bool] = []

        def take(self, idle: bool) -> list[Request] | None:
            self.idle.append(idle)
            return self.answers.pop(0)

    turns = Turns()
    found = run(Engine(), [REQUESTS[0]], source=turns)
    assert [done.token_ids[0] for done in found] == [0, 1, 2, 3]
    assert not turns.answers and turns.idle[0] is False and True in turns.idle


def test_nothing_is_asked_of_an_engine_without_requests() -> None:
    assert run(Engine(), []) == []


@pytest.mark.parametrize("goes_silent", [False, True])
def test_an_abort_gives_what_there_is_and_resumes_to_the_same_end(
    monkeypatch: pytest.MonkeyPatch, goes_silent: bool
) -> None:
    monkeypatch.setattr("hpcrl.rollout.engines.tensorrt_llm.engine.CANCEL_SECONDS", 0.1)
    monkeypatch.setattr("hpcrl.rollout.engines.tensorrt_llm.engine.POLL_SECONDS", 0.0)
    calls: list[int] = []  # how many had been told of at each
    told: list[tuple[int, Completion]] = []

    def third_time() -> bool:
        calls.append(len(told))
        return len(calls) == 3

    cut = run(Engine(goes_silent), REQUESTS, on_finished=lambda i, d: told.append((i, d)), should_abort=third_time)
    reasons = [done.finish_reason for done in cut]
    assert set(reasons) == {"length", "abort"}
    assert sorted(told) == [(i, done) for i, done in enumerate(cut) if done.finish_reason == "length"]
    assert len(told) > calls[-1]  # some ended by themselves while the others were cancelled
    lengths = [len(done.token_ids) for done in cut]
    assert 0 in lengths
    assert goes_silent or any(0 < n for n, reason in zip(lengths, reasons, strict=True) if reason == "abort")
    engine = Engine()
    rest = [
        Request(request.prompt_ids, request.uid, prefix_ids=done.token_ids, max_new_tokens=4 - len(done.token_ids))
        for request, done in zip(REQUESTS, cut, strict=True)
        if done.finish_reason == "abort"
    ]
    assert [len(done.token_ids) for done in run(engine, rest)] == [4 - len(request.prefix_ids) for request in rest]
    assert all(ids[1:] == list(request.prefix_ids) for ids, request in zip(engine.inputs, rest, strict=True))


@pytest.mark.parametrize(
    ("request_", "line"),
    [
        (Request(list(range(14)), "long"), "more than max_model_len=16"),
        (Request([1], "full", prefix_ids=np.arange(4, dtype=np.int32)), "may draw 0"),
        (Request([100], "odd"), "expected 0 to 99"),
    ],
)
def test_requests_that_cannot_be_are_refused_before_any_is_submitted(request_: Request, line: str) -> None:
    engine = Engine()
    with pytest.raises(ValueError, match=line):
        run(engine, [REQUESTS[0], request_])
    assert not engine.inputs
