"""The sequences that SFT trains on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from hpcrl.data.answers import AnswerDataset
from hpcrl.data.conversations import Conversations, Turns
from hpcrl.data.row_file import columns_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from hpcrl.config.schema import DataConfig
    from hpcrl.data.images import ImageProcessor
    from hpcrl.data.media import Located, MediaItem
    from hpcrl.runtime.world import World


class SftDataset:
    """Sequences of several files, end to end: conversations of files with the column `messages_key`, prompts with the
    answer in `answer_key` of others. `max_samples` (-1: all) takes the first rows of all files together. only: as of
    PromptDataset."""

    def __init__(
        self,
        files: Sequence[str],
        tokenizer: PreTrainedTokenizerBase,
        cfg: DataConfig,
        *,
        messages_key: str,
        answer_key: str,
        turns: Turns,
        max_samples: int = -1,
        world: World | None = None,
        images: ImageProcessor | None = None,
        only: int | None = None,
    ) -> None:
        self._files: list[Conversations | AnswerDataset] = []
        for path in files:
            num_left = -1 if max_samples < 0 else max_samples - self._num_read
            if num_left == 0:
                break
            if messages_key in columns_of(path):
                options = (messages_key, turns, num_left, world, images, only)
                self._files.append(Conversations(path, tokenizer, cfg, *options))
            else:
                columns = {"sft.answer_key": answer_key}
                answers = AnswerDataset([path], tokenizer, cfg, columns, num_left, world, images, only)
                if not cfg.accept_dropped_parts:
                    answers.check_not_empty(answer_key)
                self._files.append(answers)
        self._starts = np.cumsum([0, *map(len, self._files)])

    @property
    def _num_read(self) -> int:
        return len(self) + self.num_filtered + self.num_bad

    def __len__(self) -> int:
        return sum(self.file_sizes)

    @property
    def file_sizes(self) -> list[int]:
        """Sequences of each file."""
        return [len(file) for file in self._files]

    @property
    def num_filtered(self) -> int:
        """Rows that are left out because they are too long."""
        return sum(file.num_filtered for file in self._files)

    @property
    def num_bad(self) -> int:
        """Rows that data.bad_images=skip dropped."""
        return sum(file.num_bad for file in self._files)

    @property
    def num_endless(self) -> int:
        """Conversations whose last turn has no end-of-sequence token."""
        return sum(file.num_endless for file in self._files if isinstance(file, Conversations))

    def where(self, row: int) -> str:
        """Return `<path>: row <n>`."""
        file, row = self._find(row)
        return file.where(row)

    def lengths(self) -> np.ndarray:
        """Tokens of each sequence, int64 (len,)."""
        return np.concatenate([file.lengths() for file in self._files])

    def sequence(self, row: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(prompt_ids int32 (P,), response_ids int32 (R,), mask int32 (R,): 1 on tokens with loss)."""
        file, row = self._find(row)
        if isinstance(file, Conversations):
            return file.sequence(row)
        prompt, answer = file.pair(row)
        return prompt, answer, np.ones(len(answer), np.int32)

    def media(self, row: int) -> list[MediaItem]:
        """Return the pictures and videos of a sequence, in the order of their tokens."""
        file, row = self._find(row)
        return file.media(row)

    def patches(self, row: int, index: int) -> np.ndarray:
        """Decode item `index` of `media(row)` and return its patches, float32 (patches, vision.patch_width)."""
        file, row = self._find(row)
        return file.patches(row, index)

    def locate(self, row: int, index: int) -> Located:
        """Return where the patches of item `index` come from, for a process that decodes them."""
        file, row = self._find(row)
        return file.locate(row, index)

    def _find(self, row: int) -> tuple[Conversations | AnswerDataset, int]:
        """The file of a sequence, and its number there."""
        number = int(np.searchsorted(self._starts, row, side="right")) - 1
        return self._files[number], row - int(self._starts[number])


def has_targets(files: Sequence[str], messages_key: str, answer_key: str) -> bool:
    """Whether every file has a column of conversations or of answers."""
    return all({messages_key, answer_key} & set(columns_of(path)) for path in files)
