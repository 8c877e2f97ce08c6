"""Datasets with one answer per prompt (SFT), with a chosen and a rejected one, and with an answer and a label."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from hpcrl.data.chat import messages_of
from hpcrl.data.prompts import TOKENISE_ROWS, PromptDataset
from hpcrl.data.rendering import missing_part
from hpcrl.data.row_file import spread
from hpcrl.data.tokenizer import encode_texts, end_token_ids, split_end
from hpcrl.runtime.exits import InputError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from hpcrl.config.schema import DataConfig
    from hpcrl.runtime.world import World


class Answers:
    """One answer per row of `prompts`, from the column `name`, which the config names under `key`.

    An answer is text, the assistant's message, or a list: of it only, or of the row's prompt followed by it. Its
    tokens are those of the text and an end-of-sequence token, which is added where the text does not end with one.
    If it does not fit into `data.max_response_length`, it is an error under `truncation: error`; otherwise its end
    is cut off, including the end-of-sequence token. With a `world` its ranks share the work.
    """

    def __init__(
        self,
        prompts: PromptDataset,
        tokenizer: PreTrainedTokenizerBase,
        cfg: DataConfig,
        name: str,
        key: str,
        world: World | None,
    ) -> None:
        parts = [
            split_end(tokenizer, self._text(prompts, row, value, cfg, name, key))
            for row, value in enumerate(prompts.values(name))
        ]
        self.empty_rows = [row for row, (text, _) in enumerate(parts) if not text.strip()]
        texts = ["".join(it) for it in parts]
        limit, all_rows = cfg.max_response_length, range(len(prompts))
        ends = end_token_ids(tokenizer)

        def encode(rows: range) -> tuple[list[int], np.ndarray]:
            """Return the length of each answer, and all token ids, int32."""
            lengths, ids = [], list[int]()
            places = [prompts.where(row) for row in rows]
            encoded = encode_texts(tokenizer, texts[rows.start : rows.stop], places, False)
            for text_ids, where in zip(encoded, places, strict=True):
                answer = text_ids if text_ids and text_ids[-1] in ends else [*text_ids, ends[0]]
                if prompts.has_placeholders(text_ids):
                    raise InputError(
                        f"{where}: the answer in {name!r} has the placeholder token of a picture; expected text; "
                        "remove the row"
                    )
                if len(answer) > limit and cfg.truncation == "error":
                    raise InputError(
                        f"{where}: the answer in {name!r} has {len(answer)} tokens with its end-of-sequence token, "
                        f"more than data.max_response_length={limit}; raise the limit, or set data.truncation=right"
                    )
                lengths.append(min(len(answer), limit))
                ids += answer[:limit]
            return lengths, np.array(ids, dtype=np.int32)

        pieces = [all_rows[start : start + TOKENISE_ROWS] for start in all_rows[::TOKENISE_ROWS]]
        lengths, values = zip(*spread(world, pieces, encode), strict=True)
        self._offsets = np.concatenate([[0], np.cumsum(np.concatenate(lengths))])
        self._values = np.concatenate(values)

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def __getitem__(self, row: int) -> np.ndarray:
        """Token ids, int32 (A,)."""
        return self._values[self._offsets[row] : self._offsets[row + 1]]

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each answer, int64 (len,)."""
        return np.diff(self._offsets)

    @staticmethod
    def _text(prompts: PromptDataset, row: int, value: Any, cfg: DataConfig, name: str, key: str) -> str:
        if isinstance(value, str):
            return value
        prompt_key = cfg.prompt_key
        messages = messages_of([value] if isinstance(value, dict) else value, with_parts=True)
        if messages and messages[-1]["role"] == "assistant" and isinstance(messages[-1]["content"], str):
            *before, answer = messages
            prompt = messages_of(prompts.row(row)[prompt_key], with_parts=True) if before else None
            if not before or _roles_and_contents(before) == _roles_and_contents(prompt or []):
                if not cfg.accept_dropped_parts:
                    _check_text_only(answer, f"{prompts.where(row)}: the answer in {name!r}")
                return answer["content"]
            problem = f"the messages in {name!r} before the answer differ from {prompt_key!r}"
        elif value is not None:
            problem = f"column {name!r} holds {str(value)[:80]!r}"
        else:
            problem = f"no column {name!r}; it has {', '.join(sorted(prompts.row(row)))}"
        raise InputError(
            f"{prompts.where(row)}: {problem}; expected text, or messages that end with the assistant's; "
            f"add it, or use another column in {key}"
        )


def _roles_and_contents(messages: list[dict[str, Any]]) -> list[tuple[str, Any]]:
    return [(message["role"], message["content"]) for message in messages]


def _check_text_only(message: dict[str, Any], where: str) -> None:
    """Raise InputError if an answer has parts besides its content, such as thoughts or tool calls."""
    if (part := missing_part(message, message["content"])) is not None:
        raise InputError(
            f"{where} has {part}, which would not be trained, because only the content of an answer is; expected it in "
            "the content, as the model should write it; move it there, or set data.accept_dropped_parts=true"
        )


CHOSEN, REJECTED = 0, 1  # the sides of a pair


class AnswerDataset(PromptDataset):
    """Prompts with an answer in each of `columns`: one for SFT, the chosen and the rejected one for preferences.

    Args:
        columns: key of the config -> the column that it names. Side i of a row is its answer in the i-th column.
        which: `images` and `only`, as in PromptDataset.
    """

    def __init__(
        self,
        files: Sequence[str],
        tokenizer: PreTrainedTokenizerBase,
        cfg: DataConfig,
        columns: Mapping[str, str],
        max_samples: int = -1,
        world: World | None = None,
        **which: Any,
    ) -> None:
        super().__init__(files, tokenizer, cfg, max_samples, world, **which)
        self._sides = [Answers(self, tokenizer, cfg, name, key, world) for key, name in columns.items()]

    def pair(self, row: int, side: int = 0) -> tuple[np.ndarray, np.ndarray]:
        """(prompt_ids int32 (P,), answer_ids int32 (A,) ending with the end-of-sequence token)."""
        return self.prompt_ids(row), self.answer(row, side)

    def answer(self, row: int, side: int = 0) -> np.ndarray:
        """Token ids of the answer, int32 (A,), ending with the end-of-sequence token."""
        return self._sides[side][row]

    def check_not_empty(self, name: str) -> None:
        """Raise InputError for a row of whose answer only the end-of-sequence token would be trained."""
        for row in self._sides[0].empty_rows[:1]:
            raise InputError(
                f"{self.where(row)}: the answer in {name!r} is empty, so that only its end-of-sequence token would be "
                "trained; remove the row, or set data.accept_dropped_parts=true"
            )

    def lengths(self, side: int = 0) -> np.ndarray:
        """Tokens of prompt and answer together, int64 (len,)."""
        return self.prompt_lengths + self._sides[side].lengths

    @cached_property
    def num_equal(self) -> int:
        """Rows whose sides are equal: they have no training signal and count as wrong."""
        return sum(np.array_equal(self._sides[CHOSEN][row], self._sides[REJECTED][row]) for row in range(len(self)))


class LabelledDataset(AnswerDataset):
    """Prompts with one answer each that is good or bad, as TRL's KTO takes them.

    Args:
        label: key of the config, and the column that it names, which holds true or false, or 1 or 0.
        data, which: arguments of AnswerDataset.
    """

    def __init__(self, *data: Any, label: tuple[str, str], **which: Any) -> None:
        super().__init__(*data, **which)
        values = enumerate(self.values(label[1]))
        self.labels = np.array([self._label(row, value, *label) for row, value in values])  # bool (len,)

    def _label(self, row: int, value: Any, key: str, name: str) -> bool:
        if value in (True, False):
            return bool(value)
        problem = f"no column {name!r}" if value is None else f"column {name!r} holds {str(value)[:80]!r}"
        raise InputError(
            f"{self.where(row)}: {problem}; expected true for a good answer and false for a bad one; "
            f"add it, or use another column in {key}"
        )
