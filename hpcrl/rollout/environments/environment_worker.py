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
MAX_PROMPT_MESSAGES = 1024  # of a new conversation
MAX_PROMPT_CHARACTERS = 2**20
MAX_INFO = 64  # entries
MAX_TEXT = 4096  # characters of a name
NAMES = {"name": MAX_TEXT, "tool_call_id": MAX_TEXT, "reasoning_content": MAX_PROMPT_CHARACTERS}  # texts of a message
MAX_SCHEMAS = 2**20  # characters of the schemas of tools, as JSON
MAX_REWARD = 1e30  # of one turn; a sum of them stays finite
MORE_PROCESSES = 1024  # of the process that forks, beyond those that its children may have


class Started(NamedTuple):
    """What `reset` returned. tools: schemas; None: those of the row's prompt. state: see `Stepped`. is_prompt: the
    messages take the place of the row's prompt."""

    messages: list[Message]
    tools: list[Schema] | None
    state: int
    is_prompt: bool = False


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
        is_prompt = isinstance(found, Step) and found.new_conversation
        if isinstance(found, Step):
            messages, tools = found.messages, found.tools
        else:
            messages, tools = found if isinstance(found, tuple) and len(found) == 2 else (found, None)
        if tools is None:
            tools = [tool.schema for tool in environment.tools.values()] or None
        found = checked_prompt(messages) if is_prompt else checked_messages(messages, "reset")
        return Started(found, checked_tools(tools, "reset"), self._state(environment, found), is_prompt)

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
    if step.tools is not None and not step.new_conversation:
        raise ValueError("step returned tools without new_conversation; expected tools with the prompt that has them")
    messages = checked_prompt(step.messages) if step.new_conversation else checked_messages(step.messages, "step")
    tools = checked_tools(step.tools, "step")
    return Step(messages, bool(step.done), reward, info, bool(step.new_conversation), tools)


def checked_tools(tools: Any, what: str) -> list[Schema] | None:
    """Return the schemas as JSON values. Raises TypeError for what is no list of schemas, ValueError for a long one."""
    if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise TypeError(f"{what} returned tools of type {type(tools).__name__}; expected a list of schemas")
    schemas = json.dumps(tools)
    if len(schemas) > MAX_SCHEMAS:
        raise ValueError(f"{what} returned schemas of {len(schemas)} characters; expected at most {MAX_SCHEMAS}")
    found: list[Schema] | None = json.loads(schemas)
    return found


def checked_messages(messages: Any, what: str) -> list[Message]:
    """Return the messages with bounded texts. Raises TypeError for what is no list of messages."""
    found = [_message(it, what, ROLES) for it in _list_of(messages, what)[:MAX_MESSAGES]]
    return [it | {"content": bounded(it["content"], MAX_CHARACTERS // len(found))} for it in found]


def checked_prompt(messages: Any) -> list[Message]:
    """Return the messages of a new conversation. Raises TypeError for what is none, and ValueError for a long one."""
    given = _list_of(messages, "step")
    found = [_message(it, "step", (*ROLES, "assistant")) for it in given[:MAX_PROMPT_MESSAGES]]
    size = sum(len(str(message)) for message in found)
    if len(given) > MAX_PROMPT_MESSAGES or size > MAX_PROMPT_CHARACTERS:
        raise ValueError(
            f"step returned a new conversation of {len(given)} messages and {size} characters; expected at most "
            f"{MAX_PROMPT_MESSAGES} and {MAX_PROMPT_CHARACTERS}"
        )
    return found


def _list_of(messages: Any, what: str) -> Sequence[Any]:
    if not isinstance(messages, Sequence) or isinstance(messages, str):
        raise TypeError(f"{what} returned messages of type {type(messages).__name__}; expected a list of messages")
    return messages


def _message(message: Any, what: str, roles: Sequence[str]) -> Message:
    """A message with values of exact types: the rank has not loaded the classes of the user's file."""
    given = message if isinstance(message, Mapping) else {}
    role, calls = given.get("role"), given.get("tool_calls") if given.get("role") == "assistant" else None
    content = given.get("content") if calls is None else given.get("content") or ""
    if role not in roles or not isinstance(content, str):
        raise TypeError(
            f"{what} returned the message {str(message)[:80]}; expected {{'role': {' or '.join(roles)}, "
            "'content': text}"
        )
    bounded_message = {"role": roles[roles.index(role)], "content": "".join((content,))}
    bounded_message |= {key: str(given[key])[:most] for key, most in NAMES.items() if given.get(key) is not None}
    return bounded_message | ({} if calls is None else {"tool_calls": json.loads(json.dumps(calls))})
