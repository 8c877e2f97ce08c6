"""Environments whose agent is a program of its own: it draws turns of the model from an OpenAI-compatible endpoint."""

from __future__ import annotations

import asyncio
import inspect
import mmap
import os
import tempfile
import threading
from collections.abc import Awaitable, Mapping, Sequence
from queue import SimpleQueue
from typing import Any, NamedTuple, TypeAlias

from hpcrl.rollout.environments.chat_completions import answer_of, completion_of, is_same
from hpcrl.rollout.environments.chat_server import ChatServer, PendingRequest
from hpcrl.rollout.environments.environment import Environment, Message, Schema, Step, Turn

END_SECONDS = 3.0  # for a program to end after its trajectory has
MAX_NEW_MESSAGES = 64  # between two turns; more begin a new conversation

Result: TypeAlias = "float | None | tuple[float | None, Mapping[str, float | str]]"

_has_warned = mmap.mmap(-1, 1)  # shared with the processes that are forked for trajectories


class Ended(NamedTuple):
    """The end of the program: what it returned or raised."""

    result: Result = None
    error: BaseException | None = None


class AgentEnvironment(Environment):
    """Base class of agents that are written with an OpenAI client. The user writes `run`.

    The program runs in a thread of the trajectory's process. Each of its requests is a turn of the model: one whose
    messages continue the conversation, or else the first of a new conversation. Requests at the same time are answered
    one after the other. Sampling is that of the job: parameters of requests have no effect.

    unix_socket: listen on the Unix socket `socket_path` in place of a port of the node. seed: that of `reset`.
    """

    unix_socket: bool = False
    socket_path: str | None = None
    seed: int = 0
    _pending: PendingRequest
    _messages: list[Message]
    _tools: list[Schema]

    def run(self, record: dict[str, Any], base_url: str, api_key: str) -> Result | Awaitable[Result]:
        """Carry out the task of the row, with an OpenAI client for this URL and key. May be `async def`.

        Return the reward of the trajectory, which is on its last turn, or the reward and the info of `Step`. What it
        raises ends the trajectory with an error, unless the response had no more room for a turn: then the request was
        answered with the error `context_length_exceeded`, and the reward is 0.
        """
        raise NotImplementedError

    def reset(self, record: dict[str, Any], seed: int) -> Step:
        self.seed = seed
        if self.unix_socket:
            self.socket_path = os.path.join(tempfile.gettempdir(), "agent.socket")
        self._events: SimpleQueue[PendingRequest | Ended] = SimpleQueue()
        self._server = ChatServer(self._events.put, self.socket_path)
        self._program = threading.Thread(target=self._run, args=(record,), daemon=True)
        self._program.start()
        self._number = self._num_calls = 0
        event = self._events.get()
        if isinstance(event, Ended):
            raise event.error or RuntimeError("the program ended before its first request")
        return self._begin(event)

    def step(self, turn: Turn) -> Step:
        answer = answer_of(turn, self._tools, self._num_calls)
        self._number += 1
        self._num_calls += len(answer.get("tool_calls", ()))
        self._messages = [*self._messages, answer]
        self._pending.answer(completion_of(answer, turn, self._pending.request.model, self._number))
        event, has_room = self._events.get(), True
        while turn.is_last and isinstance(event, PendingRequest):
            event.reject("the response has no room for another turn", "context_length_exceeded")
            event, has_room = self._events.get(), False
        if isinstance(event, PendingRequest):
            return self._continue(event)
        if event.error is not None:
            if has_room:
                raise event.error
            return Step(done=True)
        reward, info = event.result if isinstance(event.result, tuple) else (event.result, {})
        return Step(done=True, reward=reward, info=info)

    def close(self) -> None:
        self._server.end()
        self._program.join(END_SECONDS)

    def _run(self, record: dict[str, Any]) -> None:
        try:
            result: Any = self.run(record, self._server.base_url, self._server.api_key)
            self._events.put(Ended(asyncio.run(result) if inspect.iscoroutine(result) else result))
        except BaseException as error:  # raised by `reset` or `step`
            self._events.put(Ended(error=error))

    def _begin(self, pending: PendingRequest) -> Step:
        self._pending, self._messages, self._tools = pending, pending.request.messages, pending.request.tools
        if pending.request.ignored and not _has_warned[0]:
            _has_warned[0] = 1
            names = ", ".join(pending.request.ignored)
            print(f"{type(self).__name__}: sampling is that of the job; parameters without effect: {names}")
        return Step(self._messages, new_conversation=True, tools=self._tools)

    def _continue(self, pending: PendingRequest) -> Step:
        """What the model reads next: the messages after those that it has read and written."""
        known, sent = self._messages, pending.request.messages
        new: Sequence[Message] = sent[len(known) :]
        tools: Sequence[Schema] = pending.request.tools
        extends = tools == self._tools and all(map(is_same, sent, known)) and 0 < len(new) <= MAX_NEW_MESSAGES
        step = self._begin(pending)
        return Step(new) if extends and all(it["role"] != "assistant" for it in new) else step
