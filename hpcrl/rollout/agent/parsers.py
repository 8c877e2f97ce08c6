"""From what the model wrote in a turn to the tool calls in it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, TypeAlias

from hpcrl.runtime.exits import InputError

HERMES_OPEN, HERMES_CLOSE = "<tool_call>", "</tool_call>"


@dataclass(frozen=True)
class ToolCall:
    """`arguments` are JSON values by parameter, not yet held against the tool's schema."""

    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True)
class BadCall:
    """Something that was meant as a call; the model is told `why` it is none."""

    why: str


Call: TypeAlias = ToolCall | BadCall
Parser: TypeAlias = Callable[[str], list[Call]]  # a turn's text without its end-of-sequence token -> calls in order

_parsers: dict[str, Parser] = {}


def register_tool_parser(name: str) -> Callable[[Parser], Parser]:
    """Makes a function the parser of `rollout.multi_turn.format=<name>`; the file with the tools may do so."""

    def register(parser: Parser) -> Parser:
        if name in _parsers:
            raise ValueError(f"tool parser {name!r} is registered already; give this one another name")
        _parsers[name] = parser
        return parser

    return register


def tool_parser(name: str) -> Parser:
    """InputError for a name that nobody registered."""
    if name not in _parsers:
        near = get_close_matches(name, _parsers, n=1, cutoff=0.5)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        raise InputError(f"rollout.multi_turn.format={name}: no such parser{hint}; there are {', '.join(_parsers)}")
    return _parsers[name]


@register_tool_parser("hermes")
def hermes(text: str) -> list[Call]:
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, any number of them, among other text."""
    calls: list[Call] = []
    place = text.find(HERMES_OPEN)
    while place >= 0:
        start = place + len(HERMES_OPEN)
        end = text.find(HERMES_CLOSE, start)
        if end < 0:
            calls.append(BadCall(f"{HERMES_OPEN} without {HERMES_CLOSE}"))
            break
        calls.append(call_of_json(text[start:end]))
        place = text.find(HERMES_OPEN, end)
    return calls


@register_tool_parser("json")
def plain_json(text: str) -> list[Call]:
    """A turn that is JSON from its first character on: one call, several behind each other, or a list of calls.

    `parameters` is taken for `arguments`, as some models have been taught. JSON that names no function is an answer.
    """
    text = text.strip()
    if not text.startswith(("{", "[")):
        return []
    decoder, place = json.JSONDecoder(), 0
    values: list[Any] = []
    while place < len(text):
        try:
            value, place = decoder.raw_decode(text, place)
        except (ValueError, RecursionError) as error:
            if values or '"name"' in text:
                return [*_calls(values), BadCall(f"not JSON: {_short(error)}")]
            return []
        values += value if isinstance(value, list) else [value]
        while place < len(text) and text[place] in " \t\r\n;,":
            place += 1
    return _calls(values)


def _calls(values: list[Any]) -> list[Call]:
    return [call_of(value) for value in values if isinstance(value, dict) and "name" in value]


def call_of_json(text: str) -> Call:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        return BadCall(f"not JSON: {_short(error)}")
    return call_of(value)


def call_of(value: Any) -> Call:
    """A call from its JSON value; arguments may be JSON in a string, as OpenAI writes them."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return BadCall('a call is {"name": ..., "arguments": {...}}')
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError) as error:
            return BadCall(f"arguments are not JSON: {_short(error)}")
    if not isinstance(arguments, dict):
        return BadCall(f"arguments are a {type(arguments).__name__}; expected an object")
    return ToolCall(value["name"], arguments)


def _short(error: BaseException) -> str:
    return "nested too deeply" if isinstance(error, RecursionError) else str(error)[:160]
