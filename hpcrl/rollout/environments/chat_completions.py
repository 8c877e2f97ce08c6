"""OpenAI's format of chat completions: a program's requests as messages, and turns of the model as completions."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeGuard

from hpcrl.rollout.environments.environment import Message, Schema, Turn
from hpcrl.rollout.environments.tools import ToolCall

ROLES = {"system", "developer", "user", "assistant", "tool"}
USED = {"model", "messages", "tools", "stream", "stream_options", "user", "metadata", "store"}
USUAL = {"n": 1, "tool_choice": "auto", "parallel_tool_calls": True, "logprobs": False}  # ask for what is done anyway
CALL_MARK = re.compile(r"<[|\uff5c]?[\w:]*tool|\[TOOL_CALLS\]")  # begins the first call of a turn in most formats


class BadRequest(ValueError):
    """A request that cannot be answered.

    Args:
        code: code of one of OpenAI's errors.
    """

    def __init__(self, message: str, code: str = "invalid_value") -> None:
        super().__init__(message)
        self.code = code


class ChatRequest(NamedTuple):
    """A request: the whole conversation, and schemas of tools. ignored: names of parameters that have no effect."""

    messages: list[Message]
    tools: list[Schema]
    model: str = ""
    stream: bool = False
    with_usage: bool = False  # at the end of a stream
    ignored: Sequence[str] = ()

    @classmethod
    def of(cls, body: bytes) -> ChatRequest:
        """Parse the body of a request. Raises BadRequest."""
        try:
            given = json.loads(body)
        except (ValueError, RecursionError):
            raise BadRequest("the body is not JSON") from None
        if not isinstance(given, dict) or not isinstance(given.get("messages"), list) or not given["messages"]:
            raise BadRequest("expected a JSON object with a list of messages")
        if given.get("n") not in (None, 1):
            raise BadRequest(f"n is {str(given['n'])[:20]}; this endpoint draws one completion for a request")
        tools = given.get("tools") or []
        if not isinstance(tools, list) or not all(map(_is_function, tools)):
            raise BadRequest("tools: expected a list of {'type': 'function', 'function': {'name': ...}}")
        options = given.get("stream_options")
        return cls(
            _messages(given["messages"]),
            tools,
            str(given.get("model") or ""),
            bool(given.get("stream")),
            isinstance(options, dict) and bool(options.get("include_usage")),
            [str(name) for name, value in given.items() if name not in USED and value not in (None, USUAL.get(name))],
        )


def _is_function(tool: Any) -> TypeGuard[dict[str, Any]]:
    function = tool.get("function") if isinstance(tool, dict) else None
    return isinstance(function, dict) and isinstance(function.get("name"), str)


def _messages(given: list[Any]) -> list[Message]:
    """The messages with their texts in one piece; those of tools have the name of the call that they answer."""
    messages, names = list[Message](), dict[str, str]()
    for number, message in enumerate(given):
        where = f"messages[{number}]"
        role = message.get("role") if isinstance(message, dict) else None
        if not isinstance(role, str) or role not in ROLES:
            raise BadRequest(f"{where}: expected an object with a role: {', '.join(sorted(ROLES))}")
        messages.append(
            {"role": "system" if role == "developer" else role, "content": _text(message.get("content"), where)}
        )
        if role == "assistant" and message.get("tool_calls"):
            calls = messages[-1]["tool_calls"] = _calls(message["tool_calls"], where)
            names |= {call["id"]: call["function"]["name"] for call in calls}
        elif role == "tool":
            call = str(message.get("tool_call_id") or "")
            messages[-1] |= {"name": names.get(call, "tool"), "tool_call_id": call}
    return messages


def _text(content: Any, where: str) -> str:
    parts = content if isinstance(content, list) else [{"type": "text", "text": "" if content is None else content}]
    for part in parts:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text" or not isinstance(part.get("text"), str):
            raise BadRequest(f"{where}: its content has a part of type {str(kind)[:40]!r}; this endpoint takes texts")
    return "\n".join(part["text"] for part in parts)


def _calls(given: Any, where: str) -> list[dict[str, Any]]:
    """The calls with their arguments as objects, as chat templates take them."""
    calls = []
    for call in given if isinstance(given, list) else [given]:
        if not _is_function(call):
            raise BadRequest(f"{where}: expected tool_calls of functions")
        arguments = call["function"].get("arguments") or {}
        try:
            arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
        except (ValueError, RecursionError):
            raise BadRequest(f"{where}: the arguments of a call are not JSON") from None
        function = {"name": call["function"]["name"], "arguments": arguments}
        calls.append({"id": str(call.get("id") or ""), "type": "function", "function": function})
    return calls


def is_same(sent: Message, known: Message) -> bool:
    """Whether two messages say the same. Programs may strip texts, and number calls anew."""

    def said(message: Message) -> tuple[Any, ...]:
        calls = [call["function"] for call in message.get("tool_calls", ())]
        return message["role"], message["content"].strip(), calls

    return said(sent) == said(known)


def answer_of(turn: Turn, tools: Sequence[Schema], first_call: int) -> Message:
    """The turn as a message of the role assistant. Calls are numbered from `first_call`; those that are malformed stay
    text."""
    calls = [call for call in turn.calls if isinstance(call, ToolCall)]
    if not calls:
        return {"role": "assistant", "content": turn.text}
    mark = CALL_MARK.search(turn.text)
    parameters = {tool["function"]["name"]: tool["function"].get("parameters") for tool in tools}
    numbered = []
    for number, call in enumerate(calls, first_call):
        arguments = _typed(call.arguments, parameters.get(call.name)) if call.is_text else call.arguments
        function = {"name": call.name, "arguments": arguments}
        numbered.append({"id": call.id or f"call{number:05d}", "type": "function", "function": function})
    return {"role": "assistant", "content": turn.text[: mark.start()].strip() if mark else "", "tool_calls": numbered}


def _typed(arguments: Mapping[str, str], parameters: Any) -> dict[str, Any]:
    """Arguments that are texts, as JSON where the schema says that they are no strings."""
    kinds = parameters.get("properties") if isinstance(parameters, dict) else None
    values: dict[str, Any] = {}
    for name, text in arguments.items():
        schema = kinds.get(name) if isinstance(kinds, dict) else None
        values[name] = text
        if isinstance(schema, dict) and schema.get("type", "string") != "string":
            try:
                values[name] = json.loads(text)
            except (ValueError, RecursionError):
                continue
    return values


def completion_of(answer: Message, turn: Turn, model: str, number: int) -> dict[str, Any]:
    """The response to a request, not as a stream."""
    calls = [
        call | {"function": call["function"] | {"arguments": json.dumps(call["function"]["arguments"])}}
        for call in answer.get("tool_calls", ())
    ]
    message: Message = {"role": "assistant", "content": answer["content"]}
    if calls:
        message |= {"content": answer["content"] or None, "tool_calls": calls}
    reason = "tool_calls" if calls else "length" if turn.is_cut else "stop"
    return {
        "id": f"chatcmpl-{number}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": model,
        "choices": [{"index": 0, "message": message, "finish_reason": reason, "logprobs": None}],
        "usage": {
            "prompt_tokens": turn.num_read,
            "completion_tokens": turn.num_drawn,
            "total_tokens": turn.num_read + turn.num_drawn,
        },
    }


def body_of(completion: Mapping[str, Any], request: ChatRequest) -> tuple[str, bytes]:
    """The media type and the bytes of a response. A stream has one chunk, and one with the usage if that is asked
    for."""
    if not request.stream:
        return "application/json", json.dumps(completion).encode()
    chunk = {**completion, "object": "chat.completion.chunk", "usage": None}
    choice = dict(completion["choices"][0])
    message = choice.pop("message")
    calls = [{"index": place} | call for place, call in enumerate(message.get("tool_calls", ()))]
    events = [chunk | {"choices": [choice | {"delta": message | {"tool_calls": calls}}]}]
    events += [chunk | {"choices": [], "usage": completion["usage"]}] if request.with_usage else []
    texts = [*map(json.dumps, events), "[DONE]"]
    return "text/event-stream", "".join(f"data: {text}\n\n" for text in texts).encode()


def error_body(message: str, code: str) -> bytes:
    error = {"message": message, "type": "invalid_request_error", "param": None, "code": code}
    return json.dumps({"error": error}).encode()
