"""Tokens of what the model reads between two of its turns, by the chat template."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from hpcrl.data.chat import within_limits
from hpcrl.data.images import Entry, Kind, Source
from hpcrl.data.pictures import BadImage
from hpcrl.data.prompts import truncate
from hpcrl.data.tokenizer import end_token_ids
from hpcrl.rollout.environments.conversation import Answer
from hpcrl.rollout.environments.environment import Message
from hpcrl.rollout.protocol import ToolPicture
from hpcrl.runtime.exits import InputError, folded

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from hpcrl.config.schema import DataConfig
    from hpcrl.data.media import MediaReader


MODEL_TURN_MARK = "hpcrl.turn.of.the.model"  # placeholder of the model's text, which is never rendered nor tokenised
PROBE = "hpcrl.answer"
TEXTS = ("content", "name", "tool_call_id", "reasoning_content", "tool_calls")  # of a message, or with texts in them
TOOL_WRAPPING = "<tool_response>\n{}\n</tool_response>"


CUT_SIDE = {"left": "right", "right": "left", "middle": "middle"}  # side to keep -> `side` of `truncate`


class TurnTemplate:
    """Tokens of answers, independent of the conversation before them, whose tokens are the model's own.

    With a chat template they are what it renders after a turn of the model, without its end-of-sequence token, up to
    and including the next generation prompt. Answers of tools follow a turn with calls of their names, which some
    templates need. If the template has no role `tool`, tools' answers become a user's, in <tool_response>. Without a
    template, answers are separate lines.

    Text from outside cannot contain special tokens, and loses characters outside the tokenizer's alphabet.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, cfg: DataConfig, reader: MediaReader | None = None) -> None:
        """Examine the chat template.

        Args:
            reader: for a vision-language model; without it messages have no pictures.
        """
        self._tokenizer, self._reader = tokenizer, reader
        self._template = cfg.chat_template or tokenizer.chat_template
        self._kwargs = cfg.apply_chat_template_kwargs
        self._specials = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
        if reader is not None:
            self._specials += reader.spelled.values()
        self._encodable: dict[str, bool] = {}
        self._ends = _any_of([self._tokenizer.decode([token]) for token in end_token_ids(tokenizer)])
        self._special = _any_of(self._specials)
        self._arguments: Any = None  # of calls in the turn before tools' answers; None: there are no calls
        self._has_tool_role = self._template is not None and self._find_arguments()
        if self._template is not None and not self._has_tool_role and self._problem("user"):
            raise InputError(
                "rollout.multi_turn: the chat template accepts neither a tool nor a user after an assistant: "
                f"{self._problem('user')}; expected a template for conversations (data.chat_template)"
            )

    def answer(self, messages: Sequence[Message], end: int | None = None) -> Answer:
        """Return the tokens of messages of tools and users, and of the prompt of the model's next turn.

        Args:
            end: the token that ended its latest turn; None: the one that the template writes.
        """
        texts = self.prepared(messages)
        if self._template is None:
            image = "" if self._reader is None else self._reader.spelled["image"]
            lines = "".join(f"\n{image * len(message.get('images', ()))}{message['content']}" for message in texts)
            text = self._within_alphabet(lines + "\n")
        else:
            text = self._after_model_turn([_in_parts(message) for message in texts], end)
        ids, pictures = self._encoded(text), [png for message in messages for png in message.get("images", ())]
        return self._with_pictures(ids, pictures) if pictures else Answer(np.asarray(ids, np.int32))

    def shortened(self, text: str, limit: int, side: str) -> str:
        """Truncate the text to `limit` tokens: its `side` left or right is kept, or both ends for middle, as in verl
        (for prompts the side is the one that loses tokens)."""
        text = self.clean(text)
        ids = self._encoded(text)
        if len(ids) <= limit:
            return text
        return str(self._tokenizer.decode(truncate(ids, limit, CUT_SIDE[side]), clean_up_tokenization_spaces=False))

    def prepared(self, messages: Sequence[Message]) -> list[Message]:
        """The messages with clean texts, and with roles that the template has."""
        found = [message | {key: self.cleaned(message[key]) for key in TEXTS if key in message} for message in messages]
        return found if self._has_tool_role else [self._as_user(message) for message in found]

    def same_text(self, *token_ids: np.ndarray) -> bool:
        """Whether sequences of tokens are the same text."""
        return len({self._tokenizer.decode(ids, clean_up_tokenization_spaces=False) for ids in token_ids}) == 1

    def clean(self, text: str) -> str:
        """Remove special tokens and characters outside the alphabet."""
        text, before = self._within_alphabet(text), ""
        while text != before:  # removing one may create another
            before = text
            for token in self._specials:
                text = text.replace(token, "")
        return text

    def cleaned(self, value: Any) -> Any:
        """Return a text, or JSON values with texts, without special tokens."""
        if isinstance(value, dict):
            return {self.cleaned(key): self.cleaned(it) for key, it in value.items()}
        if isinstance(value, list):
            return [self.cleaned(it) for it in value]
        return self.clean(value) if isinstance(value, str) else value

    def _with_pictures(self, ids: Sequence[int], pictures: Sequence[bytes]) -> Answer:
        """Give the placeholders among the tokens as many tokens as their pictures, a PNG each, need."""
        assert self._reader is not None  # without it a tool's call fails that returns a picture
        entries: list[tuple[Kind, Entry]] = []
        for png in pictures:
            entries += [("image", entry) for entry in self._reader.images.read(Source("image", png), "")]
        try:
            repeats, items = self._reader.expand(ids, entries)
        except BadImage as error:
            raise InputError(
                f"the chat template does not render a tool's pictures: {error}; use one that does (data.chat_template)"
            ) from None
        tool_pictures = [ToolPicture(item.key, item.picture, png) for item, png in zip(items, pictures, strict=True)]
        return Answer(np.repeat(np.asarray(ids, np.int32), repeats), tuple(tool_pictures))

    def _as_user(self, message: Message) -> Message:
        """Convert a tool's message into a user's."""
        if message["role"] != "tool":
            return message
        wrapped = self._within_alphabet(TOOL_WRAPPING.format(message["content"]))
        return message | {"role": "user", "content": wrapped}

    def _encoded(self, text: str) -> list[int]:
        return self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]

    def _within_alphabet(self, text: str) -> str:
        text = text.encode("utf-8", "ignore").decode()
        if self._encodes(text):
            return text
        return "".join(character for character in text if self._has(character))

    def _has(self, character: str) -> bool:
        if character not in self._encodable:
            self._encodable[character] = self._encodes(character)
        return self._encodable[character]

    def _encodes(self, text: str) -> bool:
        try:
            self._encoded(text)
        except Exception:  # the tokenizers library raises bare Exception
            return False
        return True

    def _after_model_turn(self, messages: Sequence[Message], end: int | None = None) -> str:
        """Render a conversation with these messages and return the text after the model's turn."""
        answered = [] if self._arguments is None else [it for it in enumerate(messages) if it[1]["role"] == "tool"]
        ids = {number: message.get("tool_call_id", f"call{number:05d}") for number, message in answered}
        messages = [it | ({"tool_call_id": ids[number]} if number in ids else {}) for number, it in enumerate(messages)]
        calls = [self._call(messages[number]) for number in ids]
        *before, turn = self._around_marks(calls)
        if not before:
            return ""  # the template drops the model's turn
        text = self._around_marks(calls, messages, len(before))[-1]  # answers may mention the mark
        end_mark = self._ends.search(turn)
        if end_mark and (calls or not turn[: end_mark.start()].strip()):
            rest = text.removeprefix(turn[: end_mark.start()])
            written = self._ends.match(rest) or self._end_of_message(rest)
            return rest[written.end() :] if written else rest
        rest = text.removeprefix(turn.removesuffix(self._around_marks([])[-1])) if calls else text
        # The role of the next message may be the token that ends a turn, such as <|user|>.
        role = self._ends.match(rest.lstrip())
        is_written = role is not None and (end is None or role[0] == self._tokenizer.decode([end]))
        return rest.lstrip()[role.end() :] if role and is_written else rest

    def _end_of_message(self, text: str) -> re.Match[str] | None:
        """Match the token at the start of the text if it also ends a user's message: <|end|>, which stands for the
        <|return|> of a conversation's last turn."""
        found = self._special.match(text)
        ended = self._rendered([{"role": "user", "content": PROBE}], False).rpartition(PROBE)[2]
        return found if found and ended.startswith(found[0]) else None

    def _around_marks(self, calls: list[Any], messages: Sequence[Message] = (), count: int = -1) -> list[str]:
        """Split a turn of the model and the messages after it at the first marks, as many as `count`; -1: all."""
        turn = {"role": "assistant", "content": MODEL_TURN_MARK} | ({"tool_calls": calls} if calls else {})
        text = self._rendered([{"role": "user", "content": "?"}, turn, *messages], bool(messages))
        return text.split(MODEL_TURN_MARK, count)

    def _rendered(self, conversation: list[Message], generation_prompt: bool) -> str:
        options = {"add_generation_prompt": True} | self._kwargs
        if not generation_prompt:
            options["add_generation_prompt"] = False
        return within_limits(
            self._template,
            lambda: str(
                self._tokenizer.apply_chat_template(
                    conversation, chat_template=self._template, tokenize=False, **options
                )
            ),
        )

    def _call(self, message: Message) -> dict[str, Any]:
        """The call that a tool's message answers."""
        function = {"name": message.get("name", "tool"), "arguments": self._arguments}
        return {"id": message["tool_call_id"], "type": "function", "function": function}

    def _find_arguments(self) -> bool:
        """Find arguments that the template renders in calls before tools' answers. Return whether it renders them."""
        arguments = {"x": MODEL_TURN_MARK}
        for self._arguments in (arguments, json.dumps(arguments), None):
            if self._problem("tool") is None:
                return True
        return False

    def _problem(self, role: str) -> str | None:
        """Return why a message of this role cannot follow a turn of the model; None if it can."""
        try:
            text = self._after_model_turn([{"role": role, "content": PROBE}])
            self._encoded(text.replace(PROBE, ""))
        except Exception as error:  # templates may raise for a role
            return f"{type(error).__name__}: {folded(error)}"
        return None if PROBE in text else "the template drops its content"


def _in_parts(message: Message) -> Message:
    """The message as chat templates take it."""
    images = message.get("images")
    if not images:
        return message
    parts = [*({"type": "image"} for _ in images), {"type": "text", "text": message["content"]}]
    return {**{key: value for key, value in message.items() if key != "images"}, "content": parts}


def _any_of(texts: Sequence[str]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, texts)) or "(?!)")
