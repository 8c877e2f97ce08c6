"""What a replica's ranks hear of an engine that only the first one talks to; and the refusal on all ranks alike.

The engine is a stand-in: nobody has run TensorRT-LLM here.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from hpcrl.rollout.engines.tensorrt_llm import declaration
from hpcrl.rollout.engines.tensorrt_llm.engine import GenerateCall
from hpcrl.rollout.protocol import Request, SamplingParams, completed
from hpcrl.runtime.exits import InputError
from hpcrl.runtime.world import World

pytestmark = pytest.mark.ci_world(2)


class Engine:
    """Ends request after request, the newest first, with its prompt's first token."""

    def __init__(self) -> None:
        self.open: list[list[int]] = []

    def submit(self, token_ids: list[int], arguments: dict[str, Any]) -> list[int]:
        self.open.append(token_ids)
        return token_ids

    def poll(self, handle: list[int]) -> Any:
        if not self.open or handle is not self.open[-1]:
            return None
        token = self.open.pop()[0]
        entry = {token: SimpleNamespace(logprob=-float(token))}
        return SimpleNamespace(token_ids=[token], logprobs=[entry], finish_reason="length")

    def cancel(self, handle: list[int]) -> None:
        raise AssertionError("nothing is aborted here")


class Turns:
    """A later request for every two that are answered; the same on all ranks, as a source must be."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.left = [[Request([7], "later")], [], [Request([8], "last")]]

    def take(self, idle: bool) -> Sequence[Request] | None:
        return self.world.broadcast_object(self.left.pop(0) if self.left else None)


@pytest.mark.world(2, 4)
def test_every_rank_hears_the_same(world: World) -> None:
    engine = Engine() if world.rank == 0 else None
    told: list[int] = []
    steps: list[int] = []
    made = GenerateCall(
        engine,
        world.broadcast_object,
        SamplingParams(1),
        seed=0,
        trainer_step=0,
        max_in_flight=2,
        max_model_len=8,
        vocab_size=100,
        on_finished=lambda index, done: told.append(index),
    )
    requests = [Request([token], str(token)) for token in range(5)]
    found = completed(made, requests, source=Turns(world), on_step=lambda: steps.append(1))
    assert [done.token_ids.tolist() for done in found] == [[0], [1], [2], [3], [4], [7], [8]]
    assert [float(done.log_probs[0]) for done in found] == [0.0, -1.0, -2.0, -3.0, -4.0, -7.0, -8.0]
    heard = world.all_gather_object((told, len(steps)))
    assert sorted(told) == list(range(7)) and all(each == heard[0] for each in heard)


def test_without_the_package_all_ranks_refuse_together(world: World) -> None:
    with pytest.raises(InputError) as caught:
        declaration.import_on_all_ranks(world.comm)
    assert caught.value.everywhere
    assert len(set(world.all_gather_object(str(caught.value)))) == 1
