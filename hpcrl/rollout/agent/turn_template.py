"""The tokens between two turns of the model: answers of tools or of a user, in the words of the chat template."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from hpcrl.data.prompts import folded, truncate
from hpcrl.runtime.exits import InputError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from hpcrl.config.schema import DataConfig

Message = dict[str, str]  # {"role": "tool" | "user" | "assistant", "content": text}

MODEL_TURN = "hpcrl.turn.of.the.model"  # stands for what the model wrote, which is never rendered nor tokenised
PROBE = "hpcrl.answer"
TOOL_WRAPPING = "<tool_response>\n{}\n</tool_response>"


LOST = {"left": "right", "right": "left", "middle": "middle"}  # side that is kept -> `truncate`'s name of the cut


class TurnTemplate:
    """Makes the tokens of answers alone: those of the conversation before are the model's own and stay as they are.

    With a chat template they are what it writes behind a turn of the model, its end-of-sequence token left out, up to
    and with the next generation prompt. A template that has no role `tool` gets tools' answers as a user's, in
    <tool_response>. Without a template, answers are lines of their own.

    Text from outside cannot make special tokens, and loses characters that are not in the tokenizer's alphabet.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, cfg: DataConfig) -> None:
        self._tokenizer = tokenizer
        self._template = cfg.chat_template or tokenizer.chat_template
        self._kwargs = cfg.apply_chat_template_kwargs
        self._specials = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
        self._known: dict[str, bool] = {}
        self._has_tool_role = self._template is not None and self._shows("tool")
        if self._template is not None and not self._has_tool_role and not self._shows("user"):
            raise InputError(
                "rollout.multi_turn: neither a tool nor a user can answer an assistant in the chat template: "
                f"{self._problem('user')}; expected a template for conversations (data.chat_template)"
            )

    def tokens(self, messages: Sequence[Message]) -> np.ndarray:
        """int32 (n,): the messages of tools and users, and what comes before the model's next token."""
        messages = [message | {"content": self.clean(message["content"])} for message in messages]
        if not self._has_tool_role:
            messages = [self._as_user(message) for message in messages]
        if self._template is None:
            text = self._within_alphabet("".join(f"\n{message['content']}" for message in messages) + "\n")
        else:
            text = self._behind_model_turn(messages)
        return np.asarray(self._encoded(text), np.int32)

    def shortened(self, text: str, limit: int, side: str) -> str:
        """The text with at most `limit` tokens: its `side` left or right, or both ends for middle, as in verl (whose
        truncation of prompts counts the other way: there the side is the one that loses tokens)."""
        text = self.clean(text)
        ids = self._encoded(text)
        if len(ids) <= limit:
            return text
        return str(self._tokenizer.decode(truncate(ids, limit, LOST[side]), clean_up_tokenization_spaces=False))

    def clean(self, text: str) -> str:
        """The text without special tokens and without characters outside the alphabet."""
        text, before = self._within_alphabet(text), ""
        while text != before:  # leaving one out may make another
            before = text
            for token in self._specials:
                text = text.replace(token, "")
        return text

    def _as_user(self, message: Message) -> Message:
        """A tool's answer as a user would pass it on."""
        if message["role"] != "tool":
            return message
        return {"role": "user", "content": self._within_alphabet(TOOL_WRAPPING.format(message["content"]))}

    def _encoded(self, text: str) -> list[int]:
        return self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]

    def _within_alphabet(self, text: str) -> str:
        text = text.encode("utf-8", "ignore").decode()
        if self._encodes(text):
            return text
        return "".join(character for character in text if self._has(character))

    def _has(self, character: str) -> bool:
        if character not in self._known:
            self._known[character] = self._encodes(character)
        return self._known[character]

    def _encodes(self, text: str) -> bool:
        try:
            self._encoded(text)
        except Exception:  # the tokenizers library raises bare Exception
            return False
        return True

    def _behind_model_turn(self, messages: Sequence[Message]) -> str:
        """The rendering of a conversation behind the model's turn, with these messages after it."""
        conversation: list[dict[str, Any]] = [
            {"role": "user", "content": "?"},
            {"role": "assistant", "content": MODEL_TURN},
            *messages,
        ]
        text = str(
            self._tokenizer.apply_chat_template(
                conversation,
                chat_template=self._template,
                tokenize=False,
                **({"add_generation_prompt": True} | self._kwargs),
            )
        )
        behind = text.partition(MODEL_TURN)[2]
        between, end, rest = behind.partition(str(self._tokenizer.eos_token))
        return rest if end and not between.strip() else behind  # the model has written this token itself

    def _shows(self, role: str) -> bool:
        return self._problem(role) is None

    def _problem(self, role: str) -> str | None:
        """Why a message of this role cannot follow a turn of the model; None if it can."""
        try:
            text = self._behind_model_turn([{"role": role, "content": PROBE}])
            self._encoded(text.replace(PROBE, ""))
        except Exception as error:  # a template is a program of the user's, and may refuse roles
            return f"{type(error).__name__}: {folded(error)}"
        return None if PROBE in text else "the template leaves it out"
