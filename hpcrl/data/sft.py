"""Prompt and answer pairs for the supervised warm start."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from hpcrl.data.prompts import TOKENISE_ROWS, PromptDataset, encode_texts
from hpcrl.launch.exits import InputError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from hpcrl.config.schema import DataConfig


class SftDataset:
    """`pair(row)` = (prompt_ids, answer_ids with the end-of-sequence token); the loss is on the answer only.

    An answer that does not fit into `data.max_response_length` with its end-of-sequence token is an error under
    `truncation: error`; otherwise its end is cut off, the end-of-sequence token with it.
    """

    def __init__(
        self,
        files: Sequence[str],
        tokenizer: PreTrainedTokenizerBase,
        cfg: DataConfig,
        answer_key: str = "answer",
        max_samples: int = -1,
    ) -> None:
        self.prompts = PromptDataset(files, tokenizer, cfg, max_samples)
        texts = self.prompts.values(answer_key)
        for row, text in enumerate(texts):
            if not isinstance(text, str):
                raise InputError(self._no_answer(row, answer_key))
        answers: list[np.ndarray] = []
        for start in range(0, len(self.prompts), TOKENISE_ROWS):
            rows = range(start, min(start + TOKENISE_ROWS, len(self.prompts)))
            places = [self.prompts.where(row) for row in rows]
            for ids, where in zip(
                encode_texts(tokenizer, texts[rows.start : rows.stop], places, False), places, strict=True
            ):
                answer = [*ids, tokenizer.eos_token_id]
                if len(answer) > cfg.max_response_length and cfg.truncation == "error":
                    raise InputError(
                        f"{where}: the answer has {len(answer)} tokens with its end-of-sequence token, more than "
                        f"data.max_response_length={cfg.max_response_length}; raise the limit, "
                        "or set data.truncation=right"
                    )
                answers.append(np.asarray(answer[: cfg.max_response_length], dtype=np.int32))
        self._offsets = np.concatenate([[0], np.cumsum([len(answer) for answer in answers])])
        self._values = np.concatenate(answers)

    def __len__(self) -> int:
        return len(self.prompts)

    def pair(self, row: int) -> tuple[np.ndarray, np.ndarray]:
        """(prompt_ids int32 (P,), answer_ids int32 (A,) ending with the end-of-sequence token)."""
        return self.prompts.prompt_ids(row), self._values[self._offsets[row] : self._offsets[row + 1]]

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each pair, prompt and answer together, int64 (len,)."""
        return self.prompts.prompt_lengths + np.diff(self._offsets)

    def _no_answer(self, row: int, answer_key: str) -> str:
        found = self.prompts.row(row)
        if answer_key in found:
            problem = f"column {answer_key!r} holds {str(found[answer_key])[:80]!r}"
        else:
            problem = f"no column {answer_key!r}; it has {', '.join(found)}"
        return (
            f"{self.prompts.where(row)}: {problem}; expected the answer's text; "
            "add it, or name another column in sft.answer_key"
        )
