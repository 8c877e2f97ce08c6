"""The text that a chat template makes of an assistant's message: where it begins, and whether it has all parts."""

from __future__ import annotations

import itertools
import json
import os.path
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from typing import Any

from hpcrl.data.chat import ChatTemplate
from hpcrl.runtime.exits import InputError

TEXTS = ("content", "reasoning_content", "reasoning", "thinking")  # fields that templates render as text
# Arguments with which models' templates keep the reasoning of earlier turns.
KEEPING = (("preserve_thinking", True), ("clear_thinking", False))
SHOWN = 60  # characters of a missing part in an error

_ESCAPE = re.compile(r"\\+(?:u([0-9a-fA-F]{4})|x([0-9a-fA-F]{2})|[nrtbfv])|\\+")


class Rendering:
    """The text of message `number` of a conversation.

    Args:
        options: further arguments of the template.
    """

    def __init__(
        self,
        template: ChatTemplate,
        messages: Sequence[dict[str, Any]],
        number: int,
        where: str,
        options: Mapping[str, Any],
    ) -> None:
        self._template, self._messages, self._number = template, messages, number
        self._where, self._options = where, options

    @cached_property
    def before(self) -> str:
        """The text of the messages before this one, and the generation prompt."""
        return self._text(self._messages[: self._number], generation_prompt=True)

    @cached_property
    def after(self) -> str:
        """The text of the messages up to this one."""
        return self._text(self._messages[: self._number + 1])

    @cached_property
    def _without_prompt(self) -> str:
        return self._text(self._messages[: self._number])

    def _text(self, messages: Sequence[dict[str, Any]], *, generation_prompt: bool = False) -> str:
        return self._template.text(messages, self._where, generation_prompt=generation_prompt, **self._options)

    def check(self, text: str, ends: Sequence[str]) -> None:
        """Raise InputError if `text`, which is trained, lacks a part of the message, or if the message has nothing but
        `ends`: templates may add an empty thought."""
        accept = "set data.accept_dropped_parts=true"
        message = self._messages[self._number]
        part = missing_part(message, text)
        if part is not None:  # the generation prompt may have its start, such as <think>
            bare = self._without_prompt
            prompt = self.before[len(bare) :] if self.before.startswith(bare) else ""
            part = missing_part(message, prompt + text)
        if part is not None:
            raise InputError(
                f"{self._where}: message {self._number}: the chat template does not render all of {part}, so that it "
                f"would not be trained; use a data.chat_template that renders it, remove it from the row, or {accept}"
            )
        said = "".join(_texts([message.get(name) for name in TEXTS]))
        for end in ends:
            said = said.replace(end, "")
        if not (said.strip() or _has_calls(message)):
            raise InputError(
                f"{self._where}: message {self._number} is empty, so that at most its end-of-sequence token would be "
                f"trained; remove the row, or {accept}"
            )

    def common_start(self, accepted: bool) -> str:
        """The text up to where the message and the generation prompt in its place differ, at most to its content.

        Raises InputError if they differ and it is not `accepted`.
        """
        others = [[*self._messages[: self._number], {"role": "assistant", "content": content}] for content in "01"]
        start = os.path.commonprefix([self.before, self.after, *map(self._text, others)])
        if not start.startswith(self._without_prompt):
            raise InputError(
                f"{self._where}: with message {self._number}, the chat template renders the messages before it "
                "differently; expected a template that keeps them, or marks the assistant's turns with "
                "{% generation %}; use another data.chat_template"
            )
        if accepted:
            return start
        mismatch = "data.accept_generation_prompt_mismatch=true, which trains the message as it is rendered"
        ways = [*self._thinking_options(), mismatch]
        raise InputError(
            f"{self._where}: the generation prompt before message {self._number} ends with "
            f"{self.before[len(start) :]!r}, which the chat template leaves out before the message, "
            f"{_short(self.after[len(start) :])}, so that generation would continue from other tokens; use another "
            f"data.chat_template, or set {', or '.join(ways)}"
        )

    def changed(self, whole: str, advice: str) -> InputError:
        """The error for a text of the whole conversation that has this message in another rendering than `after`."""
        start = len(os.path.commonprefix([self.after, whole]))
        keeping = self._settings(KEEPING, lambda other: other._text(self._messages).startswith(other.after))
        ways = ", or ".join(["use another data.chat_template", *(f"set {way}" for way in keeping)])
        return InputError(
            f"{self._where}: with later turns, the chat template renders the conversation up to message {self._number} "
            f"differently, {_short(whole[start:])} in place of {_short(self.after[start:])}; expected a template that "
            f"keeps turns, or marks them with {{% generation %}}; {ways}{advice}"
        )

    def joined(self) -> InputError:
        """The error for a token over the start of the message, such as two line breaks of an empty thought."""
        ways = ", or ".join(["line break or a special token", *(f"set {way}" for way in self._thinking_options())])
        return InputError(
            f"{self._where}: the tokenizer joins the start of message {self._number} with the generation prompt before "
            "it, so that generation would see other tokens; use a data.chat_template whose generation prompt ends "
            f"with a {ways}"
        )

    def _thinking_options(self) -> list[str]:
        """The arguments for thinking that models' templates have, with values for which another generation prompt
        begins the message."""
        options = itertools.product(("enable_thinking", "thinking"), (False, True))
        return self._settings(
            options, lambda other: other.before != self.before and other.after.startswith(other.before)
        )

    def _settings(self, options: Iterable[tuple[str, bool]], fits: Callable[[Rendering], bool]) -> list[str]:
        """The settings of those further arguments of the template with which the rendering fits."""
        settings = []
        for name, value in options:
            template = self._template.with_option(name, value)
            other = Rendering(template, self._messages, self._number, self._where, self._options)
            with suppress(InputError):  # the template may raise for the argument
                if fits(other):
                    settings.append(f"data.apply_chat_template_kwargs.{name}={str(value).lower()}")
        return settings


def missing_part(message: Mapping[str, Any], text: str) -> str | None:
    """Return what an assistant's message has and its rendering `text` lacks, by its name and value, or None.

    Its parts are content, reasoning, and names and arguments of tool calls. White space may differ; arguments may be in
    another notation: JSON with other escapes or order, XML, Python.
    """
    parts = [(name, part) for name in TEXTS for part in _texts(message.get(name))]
    for name, part in parts:
        if part.strip() not in text and "".join(part.split()) not in "".join(text.split()):
            return f"{name} {_short(part)}"
    if not _has_calls(message):
        return None
    rest = _plain(text)
    for _, part in parts:  # which may mention a tool call
        rest = rest.replace(_plain(part), " ", 1)
    for place, call in _calls(message):
        for what, value in _call_parts(call):
            if not any(_has_word(rest, spelling) for spelling in _spellings(value)):
                return f"{place}{what} {_short(value)}"
    return None


def _texts(value: Any) -> Iterator[str]:
    """The texts of a field: its own, or those of its parts, such as {type: text, text: ...}."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for part in value:
            yield from _texts(part)
    elif isinstance(value, dict):
        for name in ("text", *TEXTS):
            yield from _texts(value.get(name))


def _has_calls(message: Mapping[str, Any]) -> bool:
    return bool(message.get("tool_calls") or message.get("function_call"))


def _calls(message: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """(place, tool call) of each tool call."""
    calls = _parsed(message.get("tool_calls"))
    for index, call in enumerate(calls if isinstance(calls, list) else [calls]):
        yield f"tool_calls[{index}]", call
    yield "function_call", _parsed(message.get("function_call"))


def _call_parts(call: Any) -> Iterator[tuple[str, Any]]:
    """(place, value) of the name of a tool call and of all keys and values of its arguments."""
    if isinstance(call, dict):
        call = call.get("function") or call
    if isinstance(call, dict):
        yield ".name", call.get("name")
        yield from _leaves(_parsed(call.get("arguments")), ".arguments")
    else:
        yield "", call


def _leaves(value: Any, place: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for name, it in value.items():
            yield place, name
            yield from _leaves(it, f"{place}.{name}")
    elif isinstance(value, list):
        for it in value:
            yield from _leaves(it, place)
    else:
        yield place, value


def _parsed(value: Any) -> Any:
    """The value of a JSON text, with numbers as they are written; or the text, if it is not JSON."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value, parse_float=_Literal, parse_int=_Literal)
    except (ValueError, RecursionError):
        return value


class _Literal(str):
    """A number as it is written."""


def _spellings(value: Any) -> list[str]:
    """How a value may be written; "" stands in any text."""
    if value is None:
        return [""]
    if isinstance(value, bool):
        return [str(value), str(value).lower()]
    if isinstance(value, _Literal):
        return [value, str(float(value))]
    if isinstance(value, float):
        return [str(value), json.dumps(value)]  # nan, NaN
    return [_plain(str(value))]


def _plain(text: str) -> str:
    """`text` without the escapes of JSON and Python, however often they were applied, and with single spaces."""
    if "\\" in text:
        text = _ESCAPE.sub(_unescaped, text)
        text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return " ".join(text.replace("\b", " ").split())


def _unescaped(match: re.Match[str]) -> str:
    code = match[1] or match[2]
    if code:
        return chr(int(code, 16))
    return "" if match[0].endswith("\\") else " "


def _has_word(text: str, word: str) -> bool:
    """Whether `text` has `word`, and not as a part of a longer word or number."""
    before = r"(?<!\w)" if re.match(r"\w", word) else ""
    after = r"(?!\w)" if re.search(r"\w\Z", word) else ""
    return re.search(before + re.escape(word) + after, text) is not None


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."
