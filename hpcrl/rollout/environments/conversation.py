"""Conversations of several turns, and the tokens between two turns of the model."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np

from hpcrl.data.chat import within_limits
from hpcrl.data.images import Entry, Kind, Source
from hpcrl.data.pictures import BadImage
from hpcrl.data.prompts import truncate
from hpcrl.data.tokenizer import end_token_ids
from hpcrl.rollout.protocol import (
    Completion,
    FinishReason,
    Prefill,
    PromptPicture,
    Request,
    ToolPicture,
    Trajectory,
    merge_routed_experts,
)
from hpcrl.runtime.exits import InputError, folded

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

    from hpcrl.config.schema import DataConfig
    from hpcrl.data.media import MediaReader


State: TypeAlias = dict[str, Any]  # JSON values


class Interaction(Protocol):
    """Interface of the class `rollout.multi_turn.interaction_name` in the file `interaction_path`.

    Objects are made without arguments, one in each tool process, and serve any conversation: everything about a
    conversation is in its `state`, which is sent along as JSON. So conversations survive the death of a process.
    """

    def start(self, record: dict[str, Any]) -> State:
        """Return the state of a new conversation; `record` has data_source, ground_truth, extra_info, ability and
        prompt."""

    def respond(self, state: State, messages: list[dict[str, str]]) -> tuple[bool, str, float | None]:
        """Return (whether the conversation ends here, the user's text if not, a score of this turn or None).

        `messages` are {role, content} of the response so far, the model's latest turn last. `state` may be changed.
        """


@dataclass(frozen=True, eq=False)
class Answer:
    """What the model reads between two of its turns. token_ids: int32 (n,). pictures: their places count from the first
    of these tokens. is_prompt: the tokens are the prompt of a new sequence, which the tokens before are not part of."""

    token_ids: np.ndarray
    pictures: tuple[ToolPicture, ...] = ()
    is_prompt: bool = False


@dataclass(eq=False)
class Conversation:
    """A response in turns, and in one sequence or several, each of which has a prompt and turns. `request` is that of
    its first turn. Drawn tokens are never decoded and encoded again. A turn may be drawn in parts."""

    request: Request
    num_turns: int = 0  # of the model
    num_tokens: int = 0  # of the response so far
    finish_reason: FinishReason | None = None  # of the latest turn; "abort": it continues
    _pictures: list[ToolPicture] = field(default_factory=list)
    _encoded: list[PromptPicture] = field(default_factory=list)  # the same
    _routed_experts: np.ndarray | None = None
    _prefill: Prefill = Prefill()
    _token_ids: list[np.ndarray] = field(default_factory=list)
    _log_probs: list[np.ndarray] = field(default_factory=list)
    _masks: list[np.ndarray] = field(default_factory=list)
    _rewards: dict[int, tuple[float, int]] = field(default_factory=dict)  # with states, by place of the token
    _starts: list[int] = field(default_factory=list)  # of sequences after the first, by place of the token
    _prompt_end: int = 0  # of the latest sequence's prompt in the response
    _turn_start: int = 0  # of the latest turn

    @property
    def usage(self) -> tuple[int, int]:
        """Tokens that the model had read before its latest turn, and those of the turn."""
        num_drawn, start = len(self._token_ids[-1]), self._starts[-1] if self._starts else -len(self.request.prompt_ids)
        return self.num_tokens - start - num_drawn, num_drawn

    def add_turn(self, done: Completion) -> None:
        """Append tokens that the model wrote: a turn, or a part of one."""
        if self.finish_reason != "abort":
            self._turn_start = self.num_tokens
        self._add(done.token_ids, done.log_probs, 1)
        before = len(self.request.prompt_ids) + self._starts[-1] if self._starts else 0
        self._routed_experts = merge_routed_experts(self._routed_experts, done.routed_experts, before)
        self._prefill = self._prefill.plus(done.prefill)
        self.finish_reason = done.finish_reason
        self.num_turns += done.finish_reason != "abort"

    def turn_ids(self) -> np.ndarray:
        """Return the tokens of the latest turn, int32 (n,)."""
        return self._tokens()[self._turn_start :]

    def add_reward(self, reward: float, state: int) -> None:
        """Put the reward of the latest turn, and the number of the state before it, on its last token."""
        if self.num_tokens:
            self._rewards[self.num_tokens - 1] = reward, state

    def add_answer(self, answer: Answer, features: Sequence[Tensor] = ()) -> None:
        """Append an answer. features: fp32 (tokens, width) of each of its pictures."""
        first = len(self.request.prompt_ids) + self.num_tokens
        for picture, its_features in zip(answer.pictures, features, strict=True):
            place = picture.place._replace(start=first + picture.place.start)
            self._pictures.append(replace(picture, place=place))
            self._encoded.append(PromptPicture(picture.key, place, its_features))
        if answer.is_prompt:
            self._starts.append(self.num_tokens)
        self._add(answer.token_ids, np.zeros(len(answer.token_ids), np.float32), 0)
        if answer.is_prompt:
            self._prompt_end = self.num_tokens

    def context_ids(self) -> np.ndarray:
        """Return the tokens of the latest sequence, int32 (n,)."""
        request = self.next_request()
        return np.concatenate([request.prompt_ids, request.prefix_ids])

    def next_request(self) -> Request:
        """Return the request for the model's next turn."""
        tokens, pictures = self._tokens(), (*self.request.pictures, *self._encoded)
        prompt = tokens[self._starts[-1] : self._prompt_end] if self._starts else self.request.prompt_ids
        prefix, before = tokens[self._prompt_end :], self._prompt_end
        return replace(self.request, prompt_ids=prompt, prefix_ids=prefix, pictures=pictures, num_before=before)

    def trajectory(
        self,
        finish_reason: FinishReason,
        num_tool_calls: int = 0,
        turn_scores: tuple[float, ...] = (),
        info: Mapping[str, float | str] | None = None,
    ) -> Trajectory:
        """Return the whole. One that failed has no token that counts, and a token of its prompt if it has no other.
        Without an `info` there is no environment."""
        if not self.num_tokens:
            self._add(np.asarray(self.request.prompt_ids[-1:], np.int32), np.zeros(1, np.float32), 0)
        has_failed = finish_reason == "error"
        rewards = states = None
        if self._rewards and not has_failed:
            rewards, states = np.zeros(self.num_tokens, np.float32), np.zeros(self.num_tokens, np.int32)
            for place, (reward, state) in self._rewards.items():
                rewards[place], states[place] = reward, state
        return Trajectory(
            self._tokens(),
            np.concatenate(self._log_probs) * np.float32(not has_failed),
            np.concatenate(self._masks) * np.int32(not has_failed),
            finish_reason,
            self.num_turns,
            num_tool_calls,
            turn_scores,
            self._routed_experts,
            tuple(self._pictures),
            self.request.prompt_ids if info is not None else None,
            rewards,
            states,
            info,
            self._prefill,
            np.array(self._starts, np.int32) + np.int32(len(self.request.prompt_ids)) if self._starts else None,
        )

    def _tokens(self) -> np.ndarray:
        return np.concatenate([np.zeros(0, np.int32), *self._token_ids])

    def _add(self, token_ids: np.ndarray, log_probs: np.ndarray, mask: int) -> None:
        self._token_ids.append(token_ids)
        self._log_probs.append(log_probs)
        self._masks.append(np.full(len(token_ids), mask, np.int32))
        self.num_tokens += len(token_ids)


# {"role": "tool" | "user" | "assistant", "content": text}, and where a tool returned pictures, {"images": PNG of each},
# which come before the text; of a tool also "name" and "tool_call_id", where the call has them
Message = dict[str, Any]

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
        """reader: of a vision-language model; without it messages have no pictures."""
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
        """Return the tokens of messages of tools and users, and of the prompt of the model's next turn. end: the token
        that ended its latest turn; None: the one that the template writes."""
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
        found = [
            message | {key: self._cleaned(message[key]) for key in TEXTS if key in message} for message in messages
        ]
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

    def _cleaned(self, value: Any) -> Any:
        """A text, or JSON values with texts."""
        if isinstance(value, dict):
            return {self._cleaned(key): self._cleaned(it) for key, it in value.items()}
        if isinstance(value, list):
            return [self._cleaned(it) for it in value]
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
        found = [ToolPicture(item.key, item.picture, png) for item, png in zip(items, pictures, strict=True)]
        return Answer(np.repeat(np.asarray(ids, np.int32), repeats), tuple(found))

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
        found = self._ends.search(turn)
        if found and (calls or not turn[: found.start()].strip()):
            rest = text.removeprefix(turn[: found.start()])
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
