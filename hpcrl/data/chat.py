"""Conversations as text, by a chat template."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hpcrl.data.encoding import encodable
from hpcrl.data.template_limits import within_limits
from hpcrl.runtime.exits import InputError, folded

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from hpcrl.config.schema import DataConfig

_GENERATION = re.compile(r"\{%-?\s*generation\b")


class ChatTemplate:
    """A template, or the tokenizer's own. options: further arguments of it. keys: of the config, for error messages."""

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
        return self._tokenizer.apply_chat_template(list(messages), chat_template=self._own, **options, **self._options)


def messages_of(value: Any, with_parts: bool = False) -> list[dict[str, Any]] | None:
    """The messages, {role, content} each, or None if the value is not a list of them.

    A content is text, or with `with_parts` a list of parts too. A turn with tool_calls may lack it: then it is "".
    """
    if not isinstance(value, list) or not all(isinstance(it, dict) and isinstance(it.get("role"), str) for it in value):
        return None
    messages = [{**it, "content": it.get("content", "")} if it.get("tool_calls") else it for it in value]
    kinds = (str, list) if with_parts else str
    return messages if all(isinstance(it.get("content"), kinds) for it in messages) else None
