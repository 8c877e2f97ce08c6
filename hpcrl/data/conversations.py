"""Conversations of many turns for SFT, with a mask of the assistant's turns."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from hpcrl.data.chat import ChatTemplate
from hpcrl.data.prompts import TOKENISE_ROWS
from hpcrl.data.row_file import RowFile, spread
from hpcrl.data.tokenizer import end_token_ids
from hpcrl.runtime.exits import InputError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from hpcrl.config.schema import DataConfig
    from hpcrl.runtime.world import World

Turns = Literal["all", "last"]


class Marked(NamedTuple):
    """Tokens of a conversation. mask: 1 on those with loss, bool (T,). ids: int32 (T,)."""

    ids: np.ndarray
    mask: np.ndarray


class Conversations:
    """The conversations of one file, from the column `key`: lists of {role, content}, as OpenAI's chat messages.

    A column `tools`, if there is one, goes to the chat template. The assistant's turns, or the last of them, have loss:
    those that the template marks with {% generation %}, or else the differences between the conversation's text with
    and without each turn. A turn's loss ends with its end-of-sequence token. Conversations longer than
    data.max_prompt_length + data.max_response_length are errors, are left out with data.filter_overlong_prompts, or
    lose their end with data.truncation=right; those that then have no token with loss are left out. With a `world` its
    ranks share the work.
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
    ) -> None:
        self._cfg, self._key, self._turns = cfg, key, turns
        self._tokenizer, self._template = tokenizer, ChatTemplate.of_data(tokenizer, cfg)
        self._ends = end_token_ids(tokenizer)
        self._limit = cfg.max_prompt_length + cfg.max_response_length
        file = RowFile(path)
        rows = range(len(file) if max_samples < 0 else min(len(file), max_samples))
        pieces = [rows[start : start + TOKENISE_ROWS] for start in rows[::TOKENISE_ROWS]]
        found = [marked for piece in spread(world, pieces, lambda rows: self._read(file, rows)) for marked in piece]
        self.num_filtered = len(rows) - len(found)
        if not found:
            why = f"{len(rows)} conversations are longer than {self._limit} tokens" if rows else "no rows"
            raise InputError(f"{path}: empty dataset: {why}; expected at least one usable conversation")
        self._ids, self._mask = (np.concatenate([one[part] for one in found]) for part in range(2))
        self._offsets = np.cumsum([0, *(len(one.ids) for one in found)])
        self.num_endless = sum(one.ids[one.mask][-1] not in self._ends for one in found)

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def sequence(self, row: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(prompt_ids int32 (P,), response_ids int32 (R,), mask int32 (R,)); the response begins with the first token
        that has loss."""
        here = slice(*self._offsets[row : row + 2])
        ids, mask = self._ids[here], self._mask[here]
        start = int(mask.argmax())
        return ids[:start], ids[start:], mask[start:].astype(np.int32)

    def lengths(self) -> np.ndarray:
        """Tokens of each conversation, int64 (len,)."""
        return np.diff(self._offsets)

    def _read(self, file: RowFile, rows: range) -> list[Marked]:
        """These rows of the file, without those that are left out."""
        columns = [file.column(name, rows.start, rows.stop) for name in (self._key, "tools")]
        fitted = []
        for row, value, tools in zip(rows, *columns, strict=True):
            where = f"{file.path}: row {row}"
            messages = _messages(value, where, self._key)
            options = {} if tools is None else {"tools": json.loads(tools) if isinstance(tools, str) else tools}
            encode = self._by_marks if self._template.marks_generation else self._by_differences
            fitted.append(self._fit(encode(messages, where, options), where))
        return [marked for marked in fitted if marked is not None]

    def _by_marks(self, messages: list[dict[str, Any]], where: str, options: dict[str, Any]) -> Marked:
        ids, marks = self._template.ids_and_marks(messages, where, **options)
        mask = np.array(marks, dtype=bool)
        starts = np.flatnonzero(np.diff(mask, prepend=False) & mask)
        num_turns = sum(message["role"] == "assistant" for message in messages)
        if len(starts) != num_turns:
            raise InputError(
                f"{where}: the chat template marks {len(starts)} of {num_turns} assistant's turns with "
                "{% generation %}; expected all of them; use another data.chat_template"
            )
        if self._turns == "last":
            mask[: starts[-1]] = False
        return Marked(np.array(ids, dtype=np.int32), mask)

    def _by_differences(self, messages: list[dict[str, Any]], where: str, options: dict[str, Any]) -> Marked:
        whole = self._template.text(messages, where, generation_prompt=False, **options)
        turns = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
        encoded = self._tokenizer(whole, add_special_tokens=False, return_offsets_mapping=True)
        ids, places = np.array(encoded["input_ids"], np.int32), np.array(encoded["offset_mapping"]).reshape(-1, 2)
        mask = np.zeros(len(ids), dtype=bool)
        for number in turns if self._turns == "all" else turns[-1:]:
            before = self._template.text(messages[:number], where, generation_prompt=True, **options)
            after = self._template.text(messages[: number + 1], where, generation_prompt=False, **options)
            if not (whole.startswith(after) and after.startswith(before)):
                raise InputError(
                    f"{where}: with later turns, the chat template renders the conversation up to message {number} "
                    "differently; expected a template that keeps turns, or marks them with {% generation %}; use "
                    "another data.chat_template, or sft.assistant_turns=last"
                )
            start, end = len(before), len(after)
            turn = (places[:, 0] >= start) & (places[:, 0] < end)
            if ((places[:, 0] < start) & (places[:, 1] > start)).any() or not turn.any():
                raise self._joined(where, number)
            if not mask.any():  # the prompt of the first turn, as generation sees it
                prompt = self._tokenizer(before, add_special_tokens=False)["input_ids"]
                if not np.array_equal(ids[: turn.argmax()], prompt):
                    raise self._joined(where, number)
            last = np.flatnonzero(turn & np.isin(ids, self._ends))
            if len(last) and not whole[places[last[-1], 1] : end].strip():
                turn[last[-1] + 1 :] = False  # a line break after the end of the turn
            mask |= turn
        return Marked(ids, mask)

    @staticmethod
    def _joined(where: str, number: int) -> InputError:
        return InputError(
            f"{where}: the tokenizer joins the start of message {number} with the generation prompt before it, so that "
            "generation would see other tokens; use a data.chat_template whose generation prompt ends with a line "
            "break or a special token"
        )

    def _fit(self, marked: Marked, where: str) -> Marked | None:
        """The conversation within the limit; None to leave it out."""
        if len(marked.ids) > self._limit:
            if self._cfg.filter_overlong_prompts:
                return None
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


def _messages(value: Any, where: str, key: str) -> list[dict[str, Any]]:
    """The messages without their empty fields, which Parquet adds."""
    sound = (
        isinstance(value, list)
        and all(isinstance(it, dict) and isinstance(it.get("role"), str) for it in value)
        and all(isinstance(it.get("content"), str) or it.get("tool_calls") for it in value)
    )
    if not sound:
        raise InputError(
            f"{where}: column {key!r} holds {str(value)[:80]!r}; expected a list of messages "
            "{role, content}, with text in both"
        )
    roles = [it["role"] for it in value]
    if "assistant" not in roles or roles[0] == "assistant":
        raise InputError(
            f"{where}: the roles in {key!r} are {roles[:8]}; expected an assistant's turn, after another role's; "
            "remove the row"
        )
    return [{name: it for name, it in message.items() if it is not None} for message in value]
