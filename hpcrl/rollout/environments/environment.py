"""Environments: what an agent acts in. One object for each trajectory, in a process of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple, TypeAlias

from hpcrl.rollout.environments.tool_worker import run_tool
from hpcrl.rollout.environments.tools import MARK, Call, Tool, ToolCall
from hpcrl.runtime.user_code import import_file

# {"role": "user", "tool", "system" or "assistant", "content": text}; of a tool also "name" and "tool_call_id", where
# its call has them, and where a function returned pictures, {"images": PNG of each}, which come before the text
Message: TypeAlias = dict[str, Any]
Schema: TypeAlias = dict[str, Any]  # of a tool, in OpenAI's format


class Turn(NamedTuple):
    """What the model wrote. text: without its end-of-sequence token. calls: tool calls in it, if there are tools.
    is_last: the response ends here, whatever the answer, because it may have no more tokens or turns. num_read,
    num_drawn: tokens that the model had read before it wrote the turn, and those of the turn. is_cut: it has no end,
    because the response may have no more tokens."""

    text: str
    calls: Sequence[Call] = ()
    is_last: bool = False
    num_read: int = 0
    num_drawn: int = 0
    is_cut: bool = False


class Step(NamedTuple):
    """The answer to a turn. messages: what the model reads next; without any, and if they do not fit into the response,
    the trajectory ends. done: it ends. reward: of this turn, on its last token; None: 0. info: numbers and texts; those
    of the last step stay with the sample, and its `acc` is the sample's accuracy.

    new_conversation: the messages are the whole prompt of a new conversation of the same trajectory, in place of what
    the model has read so far. They may have the role "assistant", with "reasoning_content" and "tool_calls" too. tools:
    schemas of the new conversation; None: those of the conversation before.
    """

    messages: Sequence[Message] = ()
    done: bool = False
    reward: float | None = None
    info: Mapping[str, float | str] = {}
    new_conversation: bool = False
    tools: Sequence[Schema] | None = None


class Environment:
    """Base class of `rollout.multi_turn.environment.name` in the file `path`.

    The object is made with the keys of `rollout.multi_turn.environment.kwargs` in a process forked for the trajectory
    from one that has loaded the file, so that code at the top of the file runs once and must not start threads or
    processes. What it raises, and what takes longer than `timeout`, ends the trajectory: the sample does not count in
    losses.

    Methods marked `@tool` are tools of the model. They may change the object, return what functions marked `@tool`
    return, and raise: the model reads the error.

    state: a text or a number of the state before the next turn, for estimators that compare turns from equal states
    (`gigpo`); None: the messages since the turn before stand for it. record: of the row, set before `reset`.
    """

    state: str | int | None = None
    record: dict[str, Any]

    @classmethod
    def check(cls) -> None:
        """Called when the file has been loaded, on each rollout leader. Raise if the machine cannot run the
        environment: the job ends with this line."""

    def reset(
        self, record: dict[str, Any], seed: int
    ) -> Sequence[Message] | tuple[Sequence[Message], Sequence[Schema]] | Step:
        """Begin a trajectory. Return messages to append to the prompt of the data's row, if any; with a second value,
        the schemas of the tools, in place of those of the methods. Or return a Step with messages and tools, which with
        `new_conversation` take the place of the row's prompt.

        Args:
            record: data_source, ground_truth, extra_info, ability and prompt of the row.
            seed: a seed of 31 bits, the same for all samples of a prompt.
        """
        return []

    def step(self, turn: Turn) -> Step:
        """Answer a turn of the model. By default its calls are carried out, and a turn without calls is the last."""
        return Step(self.call_tools(turn.calls)) if turn.calls else Step(done=True)

    def close(self) -> None:
        """Called when the trajectory has ended, unless the process has been killed."""

    @cached_property
    def tools(self) -> dict[str, Tool]:
        """The methods marked `@tool`, by name."""
        marked = [name for name in dir(type(self)) if getattr(getattr(type(self), name), MARK, False)]
        return {name: Tool.of(getattr(self, name)) for name in marked}

    def call_tools(self, calls: Sequence[Call]) -> list[Message]:
        """Carry out calls, one after the other, and return the answers."""
        answers = [self.call_tool(it) if isinstance(it, ToolCall) else f"error: {it.why}" for it in calls]
        return [
            {"role": "tool", "name": call.name, "content": text} | ({"tool_call_id": call.id} if call.id else {})
            for call, text in zip(calls, answers, strict=True)
        ]

    def call_tool(self, call: ToolCall) -> str:
        """Call a method marked `@tool`, and return its answer or the error."""
        try:
            found = run_tool(self.tools, call.name, call.arguments, self.record, is_text=call.is_text)
        except Exception as error:
            return f"error: {type(error).__name__}: {' '.join(str(error).split())[:200]}"
        return f"error: {found.text}" if found.rejected else found.text


def load_environment(path: str, name: str) -> type[Environment]:
    """Return the class. Raises ImportError if the file has none of this name, and any error of the file."""
    made = getattr(import_file(path), name, None)
    if not isinstance(made, type):
        raise ImportError(f"no class {name!r} in it")
    if not issubclass(made, Environment):
        raise ImportError(f"class {name!r} does not extend it")
    return made
