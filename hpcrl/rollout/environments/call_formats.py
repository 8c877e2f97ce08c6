"""Formats in which model families write tool calls; most have the names of vLLM's parsers."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from hpcrl.rollout.environments.tools import BadCall, Call, ToolCall, call_of, register_tool_parser, short


@dataclass(frozen=True)
class TaggedFormat:
    """Calls in a section, with a tag for each argument, whose value is text.

    name: matches what begins a call; its group is the name. argument: matches one argument; its groups are key and
    value. close: matches what ends a call. Each pattern is tried at one place, and a section is left at its first
    mismatch, so that the time is linear in the text.
    """

    section: tuple[str, str]
    name: re.Pattern[str]
    argument: re.Pattern[str]
    close: re.Pattern[str]
    example: str  # of a call, for the model

    def __call__(self, text: str) -> list[Call]:
        calls: list[Call] = []
        for inside in sections(after_thought(text), *self.section):
            calls += [_unclosed(self.section)] if inside is None else self._calls(inside)
        return calls

    def _calls(self, inside: str) -> Iterator[Call]:
        place, end = 0, len(inside.rstrip())
        while not place or place < end:
            name = self.name.match(inside, place)
            arguments: dict[str, str] = {}
            if name is not None:
                place = name.end()
                while match := self.argument.match(inside, place):
                    arguments[match[1].strip()] = match[2]
                    place = match.end()
            close = self.close.match(inside, place)
            if name is None or close is None:
                called = "" if name is None else name[1].strip()
                yield BadCall(f"expected {self.example}, found {inside[place : place + 40]!r}", called)
                return
            yield ToolCall(name[1].strip(), dict(arguments), is_text=True)
            place = close.end()


def sections(text: str, opening: str, closing: str) -> Iterator[str | None]:
    """What stands between the marks; None at the end if the last section is not closed."""
    place = text.find(opening)
    while place >= 0:
        start = place + len(opening)
        end = text.find(closing, start)
        if end < 0:
            yield None
            return
        yield text[start:end]
        place = text.find(opening, end)


def after_thought(text: str) -> str:
    """The text after the first </think>, whose <think> may be in the prompt; without one the whole text."""
    _, end, rest = text.partition("</think>")
    return rest if end else text


def _unclosed(section: tuple[str, str]) -> BadCall:
    return BadCall(f"{section[0]} without {section[1]}")


register_tool_parser("qwen3_coder")(
    TaggedFormat(
        ("<tool_call>", "</tool_call>"),
        re.compile(r"\s*<function=([^<>\n]+)>"),
        re.compile(r"\s*<parameter=([^<>\n]+)>\n?(.*?)\n?</parameter>", re.DOTALL),
        re.compile(r"\s*</function>"),
        "<function=NAME><parameter=KEY>VALUE</parameter></function>",
    )
)
register_tool_parser("glm45")(
    TaggedFormat(
        ("<tool_call>", "</tool_call>"),
        re.compile(r"\s*([^<\s][^<]*)"),
        re.compile(r"\s*<arg_key>([^<\n]+)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL),
        re.compile(r"\s*\Z"),
        "NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>",
    )
)
register_tool_parser("minimax_m2")(
    TaggedFormat(
        ("<minimax:tool_call>", "</minimax:tool_call>"),
        re.compile(r'\s*<invoke name="([^"<>\n]+)">'),
        re.compile(r'\s*<parameter name="([^"<>\n]+)">(.*?)</parameter>', re.DOTALL),
        re.compile(r"\s*</invoke>"),
        '<invoke name="NAME"><parameter name="KEY">VALUE</parameter></invoke>',
    )
)

KIMI_SECTION = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
KIMI_CALL = "<|tool_call_begin|>", "<|tool_call_end|>"
KIMI_ARGUMENTS = "<|tool_call_argument_begin|>"


@register_tool_parser("kimi_k2")
def kimi_k2(text: str) -> list[Call]:
    """Parse sections of `functions.NAME:INDEX` with JSON arguments; that is the id of the call."""
    calls: list[Call] = []
    for section in sections(after_thought(text), *KIMI_SECTION):
        if section is None:
            calls.append(_unclosed(KIMI_SECTION))
            continue
        for inside in list(sections(section, *KIMI_CALL)) or [""]:
            if inside is None or KIMI_ARGUMENTS not in inside:
                calls.append(_unclosed((KIMI_CALL[0], KIMI_CALL[1] if inside is None else KIMI_ARGUMENTS)))
                continue
            identifier, _, arguments = (part.strip() for part in inside.partition(KIMI_ARGUMENTS))
            name = re.sub(r":\d+\Z", "", identifier.removeprefix("functions."))
            calls.append(replace(call_of({"name": name, "arguments": arguments}), name=name, id=identifier))
    return calls


RECIPIENT = re.compile(r"\bto=([^\s<]+)")
MESSAGE_END = re.compile(r"<\|(?:call|end|return)\|>")


@register_tool_parser("openai")
def openai(text: str) -> list[Call]:
    """Parse messages of the harmony format that have a function, `to=functions.NAME`, as their recipient."""
    calls: list[Call] = []
    for message in text.split("<|start|>"):
        header, mark, body = message.partition("<|message|>")
        recipient = RECIPIENT.search(header) if mark else None
        if recipient is not None and recipient[1] != "assistant":
            name = recipient[1].removeprefix("functions.")
            found = call_of({"name": name, "arguments": MESSAGE_END.split(body, maxsplit=1)[0]})
            calls.append(replace(found, name=name))
    return calls


@register_tool_parser("apertus")
def apertus(text: str) -> list[Call]:
    """Parse `<|tools_prefix|>[{NAME: {...}}, ...]<|tools_suffix|>`; the last token may be the one that ends turns."""
    _, mark, rest = text.partition("<|tools_prefix|>")
    if not mark:
        return []
    try:
        values = json.loads(rest.partition("<|tools_suffix|>")[0])
    except (ValueError, RecursionError) as error:
        return [BadCall(f"not JSON: {short(error)}")]
    if not isinstance(values, list) or not all(isinstance(value, dict) for value in values):
        return [BadCall("expected [{NAME: {...}}]")]
    return [call_of({"name": name, "arguments": given}) for value in values for name, given in value.items()]
