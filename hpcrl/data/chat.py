"""Conversations as text, by a chat template, within limits of time and memory.

Templates come with models of other people. transformers renders them in a sandbox that reaches nothing, but their
nested loops and long strings may take for ever.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import resource
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeVar

from hpcrl.data.tokenizer import encodable
from hpcrl.runtime.exits import InputError, folded

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from hpcrl.config.schema import DataConfig

T = TypeVar("T")

TEMPLATE_SECONDS = 10.0  # of the CPU, for one conversation
# Bytes of its own that the process may grow by meanwhile, in all threads: more than one takes at once. What devices map
# does not count (RLIMIT_DATA).
TEMPLATE_MEMORY = 4 << 30
MOST_CHARACTERS = 1 << 26  # of the text of one conversation
_POLL = 0.25  # seconds
_IDLE = 40  # polls without a rendering after which the thread that watches ends
_FRESH = 0.01  # seconds for which the measured size of the process counts

_renderings_lock = threading.Lock()
_renderings: dict[int, int] = {}  # thread -> number of its rendering
_numbers = itertools.count()
_is_watched = False
_limit, _measured = 0, float("-inf")  # bytes that are allowed, and when they were computed
_usual = resource.getrlimit(resource.RLIMIT_DATA)  # while no template is rendered


class TemplateLimit(Exception):
    """A chat template that takes too long, or too much memory."""

    def __init__(self, why: str | None = None) -> None:  # None: raised by `_interrupt`
        super().__init__(why or f"it needs more than {TEMPLATE_SECONDS:g} s")


def within_limits(template: str | Mapping[str, str] | None, render: Callable[[], T]) -> T:
    """Call `render`, which renders one conversation with the template, or one of several. Raises TemplateLimit.

    Python cannot interrupt a single operation, such as a power or a comparison of lists. Of these only powers are
    found, and raise before `render` is called. Costs 3 us.
    """
    for text in template.values() if isinstance(template, Mapping) else (template,):
        if text is not None and _has_power(text):
            raise TemplateLimit("it computes a power (**); expected a template that needs none")
    thread = threading.get_ident()
    _enter(thread)
    try:
        result = render()
    except MemoryError:
        raise TemplateLimit(f"it needs more than {TEMPLATE_MEMORY >> 30} GiB of memory") from None
    finally:
        try:
            _leave(thread)
        except TemplateLimit:  # it came late; the next one is TEMPLATE_SECONDS away
            _leave(thread)
            raise
    if isinstance(result, str) and len(result) > MOST_CHARACTERS:
        raise TemplateLimit(f"its text has {len(result)} characters; expected at most {MOST_CHARACTERS}")
    return result


@lru_cache(maxsize=32)
def _has_power(text: str) -> bool:
    from jinja2 import Environment, TemplateSyntaxError

    with suppress(TemplateSyntaxError):  # `render` raises it
        return any(kind == "operator" and value == "**" for _, kind, value in Environment().lex(text))
    return False


def _enter(thread: int) -> None:
    global _is_watched, _limit, _measured, _usual
    with _renderings_lock:
        if not _is_watched:
            threading.Thread(target=_watch, name="templates", daemon=True).start()
            _is_watched = True
        if not _renderings:
            if (now := time.monotonic()) - _measured > _FRESH:
                _limit, _measured = _data_bytes() + TEMPLATE_MEMORY, now
                _usual = resource.getrlimit(resource.RLIMIT_DATA)
            if _usual[0] == resource.RLIM_INFINITY or _usual[0] > _limit:
                resource.setrlimit(resource.RLIMIT_DATA, (_limit, _usual[1]))
        _renderings[thread] = next(_numbers)


def _leave(thread: int) -> None:
    with _renderings_lock:
        _renderings.pop(thread, None)
        if not _renderings:
            resource.setrlimit(resource.RLIMIT_DATA, _usual)


def _data_bytes() -> int:
    """Bytes of this process's memory to which RLIMIT_DATA applies."""
    with open("/proc/self/statm", "rb", buffering=0) as file:
        return int(file.read(128).split()[5]) * os.sysconf("SC_PAGE_SIZE")


def _watch() -> None:
    """Raise TemplateLimit in threads whose rendering has taken too long: once, then again after as long, as jinja may
    catch it. It takes time to leave a deep template, and nothing would catch what comes meanwhile."""
    global _is_watched
    seen: dict[int, tuple[int, float]] = {}  # thread -> its rendering, its CPU time when first seen or interrupted
    last, idle = -1, 0
    while True:
        time.sleep(_POLL)
        with _renderings_lock:
            newest = max(_renderings.values(), default=last)
            idle = 0 if _renderings or newest != last else idle + 1
            last = newest
            if idle > _IDLE:
                _is_watched = False
                return
            for thread, number in _renderings.items():
                used = time.clock_gettime(time.pthread_getcpuclockid(thread))
                if seen.get(thread, (-1, 0.0))[0] != number:
                    seen[thread] = number, used
                elif used - seen[thread][1] > TEMPLATE_SECONDS:
                    seen[thread] = number, used
                    _interrupt(thread)


def _interrupt(thread: int) -> None:
    import ctypes

    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(TemplateLimit))


_GENERATION = re.compile(r"\{%-?\s*generation\b")


class ChatTemplate:
    """A template, or the tokenizer's own.

    Args:
        options: further arguments of the template.
        keys: keys of the config, for error messages.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, template: str | None, options: Mapping[str, Any], keys: str
    ) -> None:
        self._tokenizer, self._own, self._options, self._keys = tokenizer, template, options, keys

    @classmethod
    def of_data(cls, tokenizer: PreTrainedTokenizerBase, cfg: DataConfig) -> ChatTemplate:
        """The template of the conversations in data files."""
        keys = "data.chat_template, data.apply_chat_template_kwargs"
        return cls(tokenizer, cfg.chat_template, cfg.apply_chat_template_kwargs, keys)

    @property
    def marks_generation(self) -> bool:
        """Whether the template marks the assistant's turns with {% generation %}."""
        template = self._own if self._own is not None else self._tokenizer.chat_template
        return isinstance(template, str) and _GENERATION.search(template) is not None

    def with_option(self, name: str, value: Any) -> ChatTemplate:
        """The template with this further argument."""
        return ChatTemplate(self._tokenizer, self._own, {**self._options, name: value}, self._keys)

    def text(self, messages: Sequence[Any], where: str, *, generation_prompt: bool, **options: Any) -> str:
        """The conversation; with `generation_prompt`, followed by what starts the assistant's next turn."""
        if self._own is None and self._tokenizer.chat_template is None:
            raise InputError(
                f"{where}: the prompt is a conversation, but the tokenizer has no chat template; "
                "set data.chat_template, or make prompts plain strings"
            )
        try:
            # Text first, then tokens: the result of `tokenize=True` differs between transformers 4 and 5.
            options |= {"tokenize": False, "add_generation_prompt": generation_prompt}
            template = self._own if self._own is not None else self._tokenizer.chat_template
            return within_limits(template, lambda: str(self._apply(messages, **options)))
        except Exception as error:  # templates are user code
            raise InputError(
                f"{where}: the chat template failed: {type(error).__name__}: {folded(error)}; "
                f"expected a template for these roles ({self._keys})"
            ) from None

    def ids_and_marks(self, messages: Sequence[Any], where: str, **options: Any) -> tuple[list[int], Any, list[int]]:
        """Token ids of the conversation, their (start, end) in its text, and 1 for each that the template marks as the
        assistant's."""
        text = self.text(messages, where, generation_prompt=False, **options)  # within limits, so also when marked
        wanted = {"tokenize": True, "return_dict": True, "return_assistant_tokens_mask": True}
        places = {"tokenizer_kwargs": {"return_offsets_mapping": True}}
        with encodable(self._tokenizer, text, where):
            found = self._apply(messages, **wanted, **places, **options)
        return found["input_ids"], found["offset_mapping"], found["assistant_masks"]

    def _apply(self, messages: Sequence[Any], **options: Any) -> Any:
        """The template's result. Arguments of tool calls that are JSON text, as in OpenAI's API, are mappings for it,
        unless it joins them with other text, as DeepSeek-V3's does."""
        options |= {"chat_template": self._own, **self._options}
        given = list(messages)
        parsed = [_with_mappings(message) for message in given]
        try:
            return self._tokenizer.apply_chat_template(parsed, **options)
        except TypeError:
            if parsed == given:
                raise
            return self._tokenizer.apply_chat_template(given, **options)


def _with_mappings(message: Any) -> Any:
    """The message with a mapping in place of the arguments of each tool call that are the JSON text of one."""
    calls = message.get("tool_calls") if isinstance(message, dict) else None
    if not isinstance(calls, list):
        return message
    return message | {"tool_calls": [_with_mapping(call) for call in calls]}


def _with_mapping(call: Any) -> Any:
    if not isinstance(call, dict):
        return call
    if isinstance(call.get("function"), dict):
        return call | {"function": _with_mapping(call["function"])}
    arguments = call.get("arguments")
    if not isinstance(arguments, str):
        return call
    try:
        mapping = json.loads(arguments)
    except (ValueError, RecursionError):
        return call
    return call | {"arguments": mapping} if isinstance(mapping, dict) else call


def messages_of(value: Any, with_parts: bool = False) -> list[dict[str, Any]] | None:
    """The messages, {role, content} each, or None if the value is not a list of them.

    A content is text, or with `with_parts` a list of parts too. A turn with tool_calls may lack it: then it is "".
    """
    if not isinstance(value, list) or not all(isinstance(it, dict) and isinstance(it.get("role"), str) for it in value):
        return None
    messages = [{**it, "content": it.get("content", "")} if it.get("tool_calls") else it for it in value]
    kinds = (str, list) if with_parts else str
    return messages if all(isinstance(it.get("content"), kinds) for it in messages) else None
