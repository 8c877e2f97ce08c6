"""Conversations whose answers are random tokens and take a few steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from hpcrl.rollout.engines.native.engine import NativeEngine
from hpcrl.rollout.environments.conversation import Answer, Conversation
from hpcrl.rollout.protocol import Completion, Request, SamplingParams, Trajectory


@dataclass(eq=False)
class Turns:
    """A `RequestSource` of conversations of `num_turns`. An answer has up to `longest` tokens, 5 to 44. limit: of the
    tokens of a turn."""

    requests: Sequence[Request]
    num_turns: int
    longest: int = 12
    limit: int | None = None
    _waiting: list[tuple[int, int]] = field(default_factory=list)  # calls of `take` from now, and number
    _num_open: int = 0

    def __post_init__(self) -> None:
        self.requests = [replace(request, max_new_tokens=self.limit) for request in self.requests]
        self._conversations = [Conversation(request) for request in self.requests]
        self._number_of = list(range(len(self.requests)))  # by index of the engine's request
        self._num_open = len(self.requests)

    def ended(self, index: int, done: Completion) -> None:
        number = self._number_of[index]
        conversation = self._conversations[number]
        conversation.add_turn(done)
        generator = np.random.default_rng((number, conversation.num_turns))
        count = self.longest if self.limit else generator.integers(1, self.longest + 1)
        if conversation.num_turns == self.num_turns or conversation.num_tokens + count >= self._most:
            self._num_open -= 1
            return
        conversation.add_answer(Answer(generator.integers(5, 45, count).astype(np.int32)))
        self._waiting.append((int(generator.integers(1, 9)), number))

    def take(self, idle: bool) -> Sequence[Request] | None:
        if not self._num_open:
            return None
        self._waiting = [(calls - 1, number) for calls, number in self._waiting]
        ready = [number for calls, number in self._waiting if calls <= 0 or idle]
        self._waiting = [(calls, number) for calls, number in self._waiting if number not in ready]
        self._number_of += ready
        return [self._conversations[number].next_request() for number in ready]

    def run(self, engine: NativeEngine, sampling: SamplingParams) -> list[Trajectory]:
        self._most = sampling.max_new_tokens
        engine.generate(self.requests, sampling, seed=1, step=2, source=self, on_finished=self.ended)
        return [conversation.trajectory("stop", 0, ()) for conversation in self._conversations]
