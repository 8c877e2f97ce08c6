"""Prompts with a better and a worse answer, for a reward model."""

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

CHOSEN, REJECTED = 0, 1  # the sides of a pair


class PreferenceDataset:
    """Pairs: `response(row, side)` is the answer chosen or rejected over the other, with its end-of-sequence token.

    Columns are those of verl's RMDataset: `prompt`, and the two that `chosen_key` and `rejected_key` name.
    """

    def __init__(
        self,
        files: Sequence[str],
        tokenizer: PreTrainedTokenizerBase,
        cfg: DataConfig,
        *,
        chosen_key: str = "chosen",
        rejected_key: str = "rejected",
        max_samples: int = -1,
        world: World | None = None,
    ) -> None:
        self.prompts = PromptDataset(files, tokenizer, cfg, max_samples, world)
        self._sides = (
            Answers(self.prompts, tokenizer, cfg, chosen_key, "rm.chosen_key", world),
            Answers(self.prompts, tokenizer, cfg, rejected_key, "rm.rejected_key", world),
        )
        # Such rows teach nothing and count as wrong.
        self.num_equal = sum(
            np.array_equal(self.response(row, CHOSEN), self.response(row, REJECTED)) for row in range(len(self))
        )

    def __len__(self) -> int:
        return len(self.prompts)

    def prompt_ids(self, row: int) -> np.ndarray:
        """int32 (P,)"""
        return self.prompts.prompt_ids(row)

    def response(self, row: int, side: int) -> np.ndarray:
        """int32 (A,)"""
        return self._sides[side][row]

    def lengths(self, side: int) -> np.ndarray:
        """Tokens of prompt and answer together, int64 (len,)."""
        return self.prompts.prompt_lengths + self._sides[side].lengths
