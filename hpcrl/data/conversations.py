"""Conversations of many turns for SFT, with a mask of the assistant's turns."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from hpcrl.data.chat import ChatTemplate, messages_of
from hpcrl.data.media import FileMedia, Located, MediaItem, MediaReader, MediaTable, Opened, bad_line, report_dropped
from hpcrl.data.pictures import BadImage
from hpcrl.data.prompts import TOKENISE_ROWS
from hpcrl.data.rendering import Rendering
from hpcrl.data.row_file import RowFile, spread
from hpcrl.data.tokenizer import (
    encodable,
    encode_texts,
    end_token_ids,
    first_end,
    split_end,
    starts_with_special,
)
from hpcrl.runtime.exits import InputError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from hpcrl.config.schema import DataConfig
    from hpcrl.data.images import ImageProcessor
    from hpcrl.runtime.world import World

Turns = Literal["all", "last"]
MARK = "hpcrl.content.of.a.turn"  # of which a template renders what follows


class Marked(NamedTuple):
    """Tokens of a conversation. mask: 1 on those with loss, bool (T,). ids: int32 (T,). items: its pictures."""

    ids: np.ndarray
    mask: np.ndarray
    items: Sequence[MediaItem] = ()


class Conversations:
    """The conversations of one file, from the column `key`: lists of {role, content}, as OpenAI's chat messages.

    A column `tools`, if there is one, goes to the chat template. The assistant's turns, or the last of them, have loss:
    those that the template marks with {% generation %}, or else the differences between the conversation's text with
    and without each turn. A turn's loss ends with its end-of-sequence token, which may be the first token of the next
    message, such as <|user|>; the last turn gets that of a next message. Conversations longer than
    data.max_prompt_length + data.max_response_length are errors, are left out with data.filter_overlong_prompts, or
    lose their end with data.truncation=right; those that then have no token with loss are left out. With a `world` its
    ranks share the work. Pictures, and `only`, are as in PromptDataset; tokens of pictures have no loss.

    The content, reasoning and tool calls of a turn with loss must be in its text, unless data.accept_dropped_parts is
    set. Unless data.accept_generation_prompt_mismatch is set, it must begin with the generation prompt.
    """

    def __init__(
        self,
        path: str,
        tokenizer: PreTrainedTokenizerBase,
        cfg: DataConfig,
        key: str,
        turns: Turns,
        max_samples: int = -1,
        world: World | None = None,
        images: ImageProcessor | None = None,
        only: int | None = None,
    ) -> None:
        self._path, self._cfg, self._key, self._turns = path, cfg, key, turns
        self._tokenizer, self._template = tokenizer, ChatTemplate.of_data(tokenizer, cfg)
        self._mark = self._by_marks if self._template.marks_generation else self._by_differences
        self._ends = end_token_ids(tokenizer)
        self._end_texts = [tokenizer.decode([end]) for end in self._ends]
        self._limit = cfg.max_prompt_length + cfg.max_response_length
        file = RowFile(path, {cfg.image_key, cfg.video_key}, cfg.format)
        self._reader = None if images is None else MediaReader(images, tokenizer, cfg)
        self._media = FileMedia(self._reader, file, key, cfg)
        rows = file.selected(max_samples, only)
        pieces = spread(world, self._media.blocks(rows, TOKENISE_ROWS), lambda block: self._read(file, block))
        conversations = [marked for piece, _ in pieces for marked in piece.values()]
        bad = [line for _, lines in pieces for line in lines]
        report_dropped(bad, world)
        self.num_bad = len(bad)
        self.num_filtered = len(rows) - len(conversations) - self.num_bad
        if not conversations:
            why = f"{self.num_filtered} conversations are longer than {self._limit} tokens" if rows else "no rows"
            if self.num_bad:
                why = f"{self.num_bad} of {len(rows)} rows have bad pictures; others are longer than {self._limit}"
            raise InputError(f"{path}: empty dataset: {why}; expected at least one usable conversation")
        self._ids, self._mask = (np.concatenate([one[part] for one in conversations]) for part in range(2))
        self._offsets = np.cumsum([0, *(len(one.ids) for one in conversations)])
        self._rows = np.array([row for piece, _ in pieces for row in piece], np.int64)
        self._items = MediaTable(
            [len(one.items) for one in conversations], [item for one in conversations for item in one.items]
        )
        self.num_endless = sum(one.ids[one.mask][-1] not in self._ends for one in conversations)

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def sequence(self, row: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(prompt_ids int32 (P,), response_ids int32 (R,), mask int32 (R,)); the response begins with the first token
        that has loss."""
        here = slice(*self._offsets[row : row + 2])
        ids, mask = self._ids[here], self._mask[here]
        start = int(mask.argmax())
        return ids[:start], ids[start:], mask[start:].astype(np.int32)

    def where(self, row: int) -> str:
        """Return `<path>: row <n>`."""
        return f"{self._path}: row {self._rows[row]}"

    def lengths(self) -> np.ndarray:
        """Tokens of each conversation, int64 (len,)."""
        return np.diff(self._offsets)

    def media(self, row: int) -> list[MediaItem]:
        """Return the pictures and videos of a conversation; their places count from the start of the prompt."""
        return self._items[row]

    def locate(self, row: int, index: int) -> Located:
        """Return where the patches of item `index` come from, for a process that decodes them."""
        return self._media.locate(int(self._rows[row]), index, self.media(row)[index])

    def _read(self, file: RowFile, rows: range) -> tuple[dict[int, Marked], list[str]]:
        """These rows of the file by their numbers, without those that are left out, and lines about bad pictures."""
        values, tools = (file.column(name, rows.start, rows.stop) for name in (self._key, "tools"))
        places = [f"{file.path}: row {row}" for row in rows]
        conversations = [
            _messages(value, where, self._key, self._reader is not None)
            for value, where in zip(values, places, strict=True)
        ]
        opened = self._media.open(rows, conversations)
        marked_of, bad = dict[int, Marked](), list[str]()
        for row, where, it, tool in zip(rows, places, opened, tools, strict=True):
            try:
                if isinstance(it, BadImage):
                    raise it
                marked = self._fit(self._encode(it, where, _tools(tool, where)), where)
            except BadImage as error:
                bad.append(bad_line(where, error, self._cfg))
                continue
            if marked is not None:
                marked_of[row] = marked
        return marked_of, bad

    def _encode(self, opened: Opened, where: str, options: dict[str, Any]) -> Marked:
        """Tokens of the conversation, with one placeholder token repeated for each token of a picture."""
        marked = self._mark(self._with_one_end(opened.prompt, where, options), where, options)
        if self._reader is None:
            return marked
        repeats, items = self._reader.expand(marked.ids.tolist(), opened.entries)
        if not items:
            return marked
        mask = marked.mask & ~self._reader.is_placeholder(marked.ids)
        return Marked(np.repeat(marked.ids, repeats), np.repeat(mask, repeats), items)

    def _with_one_end(self, messages: list[Any], where: str, options: dict[str, Any]) -> list[Any]:
        """The messages, such that an assistant's content that ends with end-of-sequence tokens has one of them, and
        none where the template adds one."""
        messages = list(messages)
        for number, message in enumerate(messages):
            bare, end = split_end(self._tokenizer, _last_text(message) if message["role"] == "assistant" else "")
            if end:
                messages[number] = _with_last_text(message, bare)
                if not self._is_ended(messages[: number + 1], where, options):
                    messages[number] = _with_last_text(message, bare + end)
        return messages

    def _is_ended(self, messages: list[Any], where: str, options: dict[str, Any]) -> bool:
        """Whether the tokens with loss end with an end-of-sequence token."""
        try:
            marked = self._mark(messages, where, options)
        except InputError:  # such as a turn without any token
            return False
        return bool(np.isin(marked.ids[marked.mask][-1], self._ends))

    def _by_marks(self, messages: list[dict[str, Any]], where: str, options: dict[str, Any]) -> Marked:
        ids, places, marks = self._template.ids_and_marks(messages, where, **options)
        whole = self._template.text(messages, where, generation_prompt=False, **options)
        mask = np.array(marks, dtype=bool)
        starts = np.flatnonzero(np.diff(mask, prepend=False) & mask)
        lasts = np.flatnonzero(np.diff(mask, append=False) & mask)
        turns = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
        if len(starts) != len(turns):
            raise InputError(
                f"{where}: the chat template marks {len(starts)} of {len(turns)} assistant's turns with "
                "{% generation %}; expected all of them; use another data.chat_template"
            )
        if self._turns == "last":
            mask[: starts[-1]] = False
        trained = slice(None) if self._turns == "all" else slice(-1, None)
        for number, start, last in zip(turns[trained], starts[trained], lasts[trained], strict=True):
            rendering = Rendering(self._template, messages, number, where, options)
            self._check(rendering, whole[places[start][0] : places[last][1]])
        return Marked(np.array(ids, dtype=np.int32), mask)

    def _by_differences(self, messages: list[dict[str, Any]], where: str, options: dict[str, Any]) -> Marked:
        whole = self._with_end(messages, where, options)
        turns = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
        with encodable(self._tokenizer, whole, where):
            encoded = self._tokenizer(whole, add_special_tokens=False, return_offsets_mapping=True)
        ids, places = np.array(encoded["input_ids"], np.int32), np.array(encoded["offset_mapping"]).reshape(-1, 2)
        mask = np.zeros(len(ids), dtype=bool)
        for number in turns if self._turns == "all" else turns[-1:]:
            rendering = Rendering(self._template, messages, number, where, options)
            before, after = rendering.before, rendering.after
            if not whole.startswith(after):
                after = self._without_end(rendering, whole)
            if not after.startswith(before):
                before = rendering.common_start(self._cfg.accept_generation_prompt_mismatch)
            start, end = len(before), len(after)
            if not split_end(self._tokenizer, whole[start:end])[1]:
                end += len(first_end(self._tokenizer, whole[end:]))
            self._check(rendering, whole[start:end])
            turn = (places[:, 0] >= start) & (places[:, 0] < end)
            if ((places[:, 0] < start) & (places[:, 1] > start)).any() or not turn.any():
                raise rendering.joined()
            if not mask.any():  # the prompt of the first turn, as generation sees it
                (prompt,) = encode_texts(self._tokenizer, [before], [where], False)
                if not np.array_equal(ids[: turn.argmax()], prompt):
                    raise rendering.joined()
            last = np.flatnonzero(turn & np.isin(ids, self._ends))
            if len(last) and not whole[places[last[-1], 1] : end].strip():
                turn[last[-1] + 1 :] = False  # a line break after the end of the turn
            mask |= turn
        return Marked(ids, mask)

    def _with_end(self, messages: list[dict[str, Any]], where: str, options: dict[str, Any]) -> str:
        """The conversation's text, with the end-of-sequence token of its last turn: where the template has none, the
        first token of a next message, such as <|user|>, may be one."""
        whole = self._template.text(messages, where, generation_prompt=False, **options)
        if messages[-1]["role"] != "assistant" or split_end(self._tokenizer, whole)[1]:
            return whole
        turn = {"role": "assistant", "content": MARK}
        answer = {"role": "tool" if messages[-1].get("tool_calls") else "user", "content": "?"}
        with suppress(InputError):  # the template may take no tool
            exchange = [{"role": "user", "content": "?"}, turn, answer]
            text = self._template.text(exchange, where, generation_prompt=False, **options)
            return whole + first_end(self._tokenizer, text.partition(MARK)[2])
        return whole

    def _without_end(self, rendering: Rendering, whole: str) -> str:
        """The text up to a turn without its end-of-sequence token, in place of which `whole`, with later turns, has
        another token: <|return|> ends a response, <|end|> a turn before others."""
        bare, end = split_end(self._tokenizer, rendering.after)
        if end and whole.startswith(bare) and starts_with_special(self._tokenizer, whole[len(bare) :]):
            return bare
        raise rendering.changed(whole, ", or sft.assistant_turns=last" if self._turns == "all" else "")

    def _check(self, rendering: Rendering, text: str) -> None:
        """Raise InputError if `text`, on which a turn is trained, lacks a part of it."""
        if not self._cfg.accept_dropped_parts:
            rendering.check(text, self._end_texts)

    def _fit(self, marked: Marked, where: str) -> Marked | None:
        """The conversation within the limit; None to leave it out."""
        if len(marked.ids) > self._limit:
            if self._cfg.filter_overlong_prompts:
                return None
            if marked.items:
                raise InputError(
                    f"{where}: the conversation has {len(marked.ids)} tokens with those of its pictures, more than "
                    f"data.max_prompt_length + data.max_response_length = {self._limit}, and pictures cannot be "
                    "truncated; raise the limits, lower data.max_pixels, or set data.filter_overlong_prompts=true"
                )
            if self._cfg.truncation != "right":
                raise InputError(
                    f"{where}: the conversation has {len(marked.ids)} tokens, more than data.max_prompt_length + "
                    f"data.max_response_length = {self._limit}; raise the limits, or set "
                    "data.filter_overlong_prompts=true or data.truncation=right"
                )
            marked = Marked(marked.ids[: self._limit], marked.mask[: self._limit])
        if marked.mask[:1].any():
            raise InputError(f"{where}: there is no token before the assistant's first turn; expected at least one")
        return marked if marked.mask.any() else None


def _messages(value: Any, where: str, key: str, with_parts: bool) -> list[dict[str, Any]]:
    """The messages of a row.

    Args:
        with_parts: whether contents may be lists.
    """
    messages = messages_of(value, with_parts)
    if messages is None:
        raise InputError(
            f"{where}: column {key!r} holds {str(value)[:80]!r}; expected a list of messages "
            "{role, content}, with text in both"
        )
    roles = [it["role"] for it in messages]
    if "assistant" not in roles or roles[0] == "assistant":
        raise InputError(
            f"{where}: the roles in {key!r} are {roles[:8]}; expected an assistant's turn, after another role's; "
            "remove the row"
        )
    return messages


def _last_text(message: dict[str, Any]) -> str:
    """What the message ends with, "" if that is no text."""
    content = message["content"]
    return content if isinstance(content, str) else content[-1].get("text", "") if content else ""


def _with_last_text(message: dict[str, Any], text: str) -> dict[str, Any]:
    content = message["content"]
    return message | {"content": text if isinstance(content, str) else [*content[:-1], content[-1] | {"text": text}]}


def _tools(value: Any, where: str) -> dict[str, Any]:
    """The template's option `tools`, none if the row has no tool.

    Args:
        value: a list of JSON schemas, or its JSON text.
    """
    tools = value
    if isinstance(value, str):
        try:
            tools = json.loads(value) if value.strip() else None
        except (ValueError, RecursionError):
            pass
    if tools is None or tools == []:
        return {}
    if not isinstance(tools, list) or not all(isinstance(it, dict) for it in tools):
        raise InputError(
            f"{where}: column 'tools' holds {str(value)[:80]!r}; expected a list of JSON schemas, or its JSON text"
        )
    return {"tools": tools}
