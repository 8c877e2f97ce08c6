"""Prompt and answer pairs for the supervised warm start."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from hpcrl.data.answers import Answers
from hpcrl.data.prompts import PromptDataset

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from hpcrl.config.schema import DataConfig
    from hpcrl.runtime.world import World


class SftDataset:
    """`pair(row)` = (prompt_ids, answer_ids with the end-of-sequence token); the loss is on the answer only."""

    def __init__(
        self,
        files: Sequence[str],
        tokenizer: PreTrainedTokenizerBase,
        cfg: DataConfig,
        answer_key: str = "answer",
        max_samples: int = -1,
        world: World | None = None,
    ) -> None:
        self.prompts = PromptDataset(files, tokenizer, cfg, max_samples, world)
        self._answers = Answers(self.prompts, tokenizer, cfg, answer_key, "sft.answer_key", world)

    def __len__(self) -> int:
        return len(self.prompts)

    def pair(self, row: int) -> tuple[np.ndarray, np.ndarray]:
        """(prompt_ids int32 (P,), answer_ids int32 (A,) ending with the end-of-sequence token)."""
        return self.prompts.prompt_ids(row), self._answers[row]

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each pair, prompt and answer together, int64 (len,)."""
        return self.prompts.prompt_lengths + self._answers.lengths
