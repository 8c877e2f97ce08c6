"""Program of the process that forks environments: calls them, on requests from a pipe, and checks what they return."""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from multiprocessing.connection import Connection
from typing import Any, ClassVar, NamedTuple

from hpcrl.rewards.score_worker import number_or_text
from hpcrl.rollout.environments.environment import Environment, Message, Schema, Step, load_environment
from hpcrl.rollout.environments.tool_worker import MAX_CHARACTERS, bounded
from hpcrl.runtime.exits import InputError
from hpcrl.sandbox import worker
from hpcrl.sandbox.forked_children import FIRST, LAST, ChildLimits, ForkedChildren
from hpcrl.sandbox.worker import Outcome, Ready, describe, use_one_thread

ROLES = ("user", "tool", "system")
MAX_MESSAGES = 64  # of one step
MAX_INFO = 64  # entries
MAX_TEXT = 4096  # characters of a name
MAX_SCHEMAS = 2**20  # characters of the schemas of tools, as JSON
MAX_REWARD = 1e30  # of one turn; a sum of them stays finite
MORE_PROCESSES = 1024  # of the process that forks, beyond those that its children may have


class Started(NamedTuple):
    """What `reset` returned. tools: schemas; None: those of the row's prompt. state: see `Stepped`."""

    messages: list[Message]
    tools: list[Schema] | None
    state: int


class Stepped(NamedTuple):
    """What `step` returned. state: a number of 31 bits, not 0, of the environment's state before the next turn."""

    step: Step
    state: int


@dataclass(frozen=True)
class EnvironmentSource:
    """The class `name` of the file `path`, made with `kwargs`. most: environments at the same time; at_once: of these,
    how many run a step."""

    path: str
    name: str
    kwargs: Mapping[str, Any]
    limits: ChildLimits
    most: int
    at_once: int
    topic: ClassVar[str] = "rollout.multi_turn.environment"

    def serve(self, pipe: Connection, memory_limit_mb: int | None, log: str | None) -> None:
        most = self.most * self.limits.processes + MORE_PROCESSES
        worker.supervise(lambda: self._work(pipe), log, most)

    def load_error(self, why: str) -> InputError:
        return InputError(f"{self.topic}.path={self.path}: {why}")

    def _work(self, pipe: Connection) -> None:
        use_one_thread()
        try:
            kind = load_environment(self.path, self.name)
            check_arguments = inspect.signature(kind).bind
            check_arguments(**self.kwargs)
        except BaseException as error:  # user code may raise SystemExit too
            expected = (
                f"a class of this name that extends hpcrl.api.Environment and takes the keys of {self.topic}.kwargs"
            )
            why = f"cannot load {self.name!r}: {describe(error)}; expected a Python file with {expected}"
            pipe.send(Ready(why=why))
            return
        try:
            kind.check()
        except BaseException as error:
            pipe.send(Ready(why=f"{self.name} cannot run here: {' '.join(str(error).split())}"))
            return
        ForkedChildren(pipe, lambda: Served(kind, self.kwargs).answer, self.limits, self.at_once).run()


@dataclass
class Served:
    """An environment in its process."""

    kind: type[Environment]
    kwargs: Mapping[str, Any]
    environment: Environment | None = None

    def answer(self, request: Mapping[str, Any]) -> Outcome:
        """The outcome of one request; what the environment raises is raised."""
        if request.get(FIRST):
            self.environment = self.kind(**self.kwargs)
            return Outcome("ok", self._start(self.environment, request["record"], request["seed"]))
        assert self.environment is not None
        if request.get(LAST):
            self.environment.close()
            return Outcome("ok", None)
        step = checked(self.environment.step(request["turn"]))
        return Outcome("ok", Stepped(step, self._state(self.environment, step.messages)))

    def _start(self, environment: Environment, record: dict[str, Any], seed: int) -> Started:
        environment.record = record
        found: Any = environment.reset(record, seed)
        messages, tools = found if isinstance(found, tuple) and len(found) == 2 else (found, None)
        if tools is None:
            tools = [tool.schema for tool in environment.tools.values()] or None
        elif not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
            raise TypeError(f"reset returned tools of type {type(tools).__name__}; expected a list of schemas")
        schemas = json.dumps(tools)
        if len(schemas) > MAX_SCHEMAS:
            raise ValueError(f"reset returned schemas of {len(schemas)} characters; expected at most {MAX_SCHEMAS}")
        found = checked_messages(messages, "reset")
        return Started(found, json.loads(schemas), self._state(environment, found))

    @staticmethod
    def _state(environment: Environment, messages: Sequence[Message]) -> int:
        """The number of `state`, or else of the messages that the model reads next."""
        state = environment.state
        said = [[message["role"], message["content"]] for message in messages]
        text = json.dumps(said) if state is None else str(state)
        return int.from_bytes(blake2b(text.encode(errors="replace"), digest_size=4).digest(), "little") >> 1 or 1


def checked(step: Any) -> Step:
    """Return the step with values of the right types. Raises TypeError or ValueError for others."""
    if not isinstance(step, Step):
        raise TypeError(f"step returned a {type(step).__name__}; expected a Step")
    reward = None if step.reward is None else float(step.reward)
    if reward is not None and not abs(reward) <= MAX_REWARD:
        raise ValueError(f"the reward is {reward}; expected a finite number, or None")
    info = {str(key)[:MAX_TEXT]: number_or_text(value) for key, value in list(dict(step.info).items())[:MAX_INFO]}
    return Step(checked_messages(step.messages, "step"), bool(step.done), reward, info)


def checked_messages(messages: Any, what: str) -> list[Message]:
    """Return the messages with bounded texts. Raises TypeError for what is no list of messages."""
    if not isinstance(messages, Sequence) or isinstance(messages, str):
        raise TypeError(f"{what} returned messages of type {type(messages).__name__}; expected a list of messages")
    found: list[Message] = []
    messages = messages[:MAX_MESSAGES]
    for message in messages:
        role = message.get("role") if isinstance(message, Mapping) else None
        if role not in ROLES or not isinstance(message.get("content"), str):
            raise TypeError(
                f"{what} returned the message {str(message)[:80]}; expected {{'role': {' or '.join(ROLES)}, "
                "'content': text}"
            )
        names = {key: str(message[key])[:MAX_TEXT] for key in ("name", "tool_call_id") if key in message}
        # Values of exact types: the rank has not loaded the classes of the user's file.
        content = bounded("".join((message["content"],)), MAX_CHARACTERS // len(messages))
        found.append({"role": ROLES[ROLES.index(role)], "content": content, **names})
    return found
