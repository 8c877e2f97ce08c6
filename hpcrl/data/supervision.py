"""The sequences that SFT trains on, and which of their tokens are trained, as text for people."""

from __future__ import annotations

import itertools
import logging
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from hpcrl.data.answers import AnswerDataset
from hpcrl.data.conversations import Conversations, Turns
from hpcrl.data.row_file import columns_of
from hpcrl.observe.read.token_text import TokenText
from hpcrl.sandbox.foreign_files import printable

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from hpcrl.config.schema import DataConfig
    from hpcrl.data.images import ImageProcessor
    from hpcrl.data.media import Located, MediaItem

log = logging.getLogger(__name__)


class SftDataset:
    """Sequences of several files, end to end: conversations of files with the column `messages_key`, prompts with the
    answer in `answer_key` of others. `max_samples` (-1: all) takes the first rows of all files together.

    Args:
        which: `world`, `images` and `only`, as in PromptDataset.
    """

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
        **which: Any,
    ) -> None:
        self._files: list[Conversations | AnswerDataset] = []
        for path in files:
            num_left = -1 if max_samples < 0 else max_samples - self._num_read
            if num_left == 0:
                break
            if messages_key in columns_of(path, cfg.format):
                self._files.append(Conversations(path, tokenizer, cfg, messages_key, turns, num_left, **which))
            else:
                columns = {"sft.answer_key": answer_key}
                answers = AnswerDataset([path], tokenizer, cfg, columns, num_left, **which)
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

    def locate(self, row: int, index: int) -> Located:
        """Return where the patches of item `index` come from, for a process that decodes them."""
        file, row = self._find(row)
        return file.locate(row, index)

    def _find(self, row: int) -> tuple[Conversations | AnswerDataset, int]:
        """The file of a sequence, and its number there."""
        number = int(np.searchsorted(self._starts, row, side="right")) - 1
        return self._files[number], row - int(self._starts[number])


def has_targets(files: Sequence[str], messages_key: str, answer_key: str, form: str) -> bool:
    """Whether every file has a column of conversations or of answers.

    Args:
        form: the value of data.format.
    """
    return all({messages_key, answer_key} & set(columns_of(path, form)) for path in files)


OPEN, CLOSE = "\u27e6", "\u27e7"  # around trained text; in the text itself they are escaped
STYLES = {True: "black on green", False: "dim"}
MOST_CHARACTERS = 1000  # of a stretch of text that are shown
MOST_STRETCHES = 40


class Supervised(NamedTuple):
    """A sequence of a row. title: what it is. ids: int (T,). mask: whether each token is trained, bool (T,)."""

    title: str
    ids: np.ndarray
    mask: np.ndarray

    @classmethod
    def of(cls, title: str, prompt: np.ndarray, response: np.ndarray, mask: np.ndarray | None = None) -> Supervised:
        """A prompt, then a response that is trained, all of it or where its mask is 1."""
        trained = np.ones(len(response), bool) if mask is None else mask.astype(bool)
        return cls(title, np.concatenate([prompt, response]), np.concatenate([np.zeros(len(prompt), bool), trained]))


class Stretch(NamedTuple):
    """The text of successive tokens, of which all are trained, or none."""

    text: str
    is_trained: bool


class Supervision:
    """What is trained of a row.

    Args:
        images: for a vision-language model, whose placeholders are shown once for a picture.
    """

    def __init__(
        self,
        where: str,
        sequences: Sequence[Supervised],
        tokenizer: PreTrainedTokenizerBase,
        images: ImageProcessor | None = None,
    ) -> None:
        self._where, self._sequences = where, sequences
        self._text = TokenText(getattr(tokenizer, "backend_tokenizer", None))
        vision = None if images is None else images.vision
        self._placeholders = [] if vision is None else [vision.image_token_id, vision.video_token_id]

    def stretches(self, sequence: Supervised) -> list[Stretch]:
        """The text of the tokens, cut where the mask changes."""
        ids, mask = sequence.ids, sequence.mask
        shown = ~np.isin(ids, self._placeholders) | np.diff(ids, prepend=-1).astype(bool)
        pieces = zip(self._text.pieces(ids[shown].tolist()), mask[shown].tolist(), strict=True)
        groups = itertools.groupby(pieces, key=lambda piece: piece[1])
        return [Stretch("".join(text for text, _ in group), is_trained) for is_trained, group in groups]

    def bracketed(self, *, full: bool = False) -> str:
        """Text with brackets around what is trained.

        Args:
            full: whether long texts are whole, not shortened.
        """
        escapes = {ord(bracket): f"<U+{ord(bracket):04X}>" for bracket in (OPEN, CLOSE)}
        lines = []
        for sequence in self._sequences:
            parts = [Stretch(printable(text).translate(escapes), it) for text, it in self.stretches(sequence)]
            texts = [f"{OPEN}{text}{CLOSE}" if it else text for text, it in _shortened(parts, full)]
            lines += [self._head(sequence, f"in {OPEN}{CLOSE}"), "".join(texts)]
        return "\n".join(lines).rstrip("\n")

    def coloured(self, *, full: bool = False) -> str | None:
        """As `bracketed`, with colours; None if the standard output shows none."""
        if not sys.stdout.isatty():
            return None
        from rich.console import Console
        from rich.text import Text

        console = Console(highlight=False)
        if console.color_system is None or console.no_color:
            return None
        with console.capture() as capture:
            for sequence in self._sequences:
                parts = [Stretch(printable(text), it) for text, it in self.stretches(sequence)]
                console.print(Text(self._head(sequence, "on green")), soft_wrap=True)
                texts = [(text, STYLES[it]) for text, it in _shortened(parts, full)]
                console.print(Text.assemble(*texts), soft_wrap=True)
        return capture.get().rstrip("\n")

    def log(self) -> None:
        log.info("%s", self.bracketed(), extra={"coloured": self.coloured()})

    def _head(self, sequence: Supervised, marks: str) -> str:
        count, num = int(sequence.mask.sum()), len(sequence.ids)
        trained = f"{count} of {num} tokens are trained, those {marks}" if count else f"none of {num} tokens is trained"
        return ": ".join([self._where, *([sequence.title] if sequence.title else []), trained])


def _shortened(stretches: Sequence[Stretch], full: bool) -> list[Stretch]:
    """The stretches, without the middle of long ones, and without those in the middle of many."""
    if full:
        return list(stretches)
    shown = [Stretch(_cut(text), is_trained) for text, is_trained in stretches]
    if len(shown) <= MOST_STRETCHES:
        return shown
    half = MOST_STRETCHES // 2
    left_out = Stretch(f"[... {len(shown) - 2 * half} stretches left out ...]", False)
    return [*shown[:half], left_out, *shown[-half:]]


def _cut(text: str) -> str:
    half = MOST_CHARACTERS // 2
    left_out = len(text) - 2 * half
    return text if left_out <= 0 else f"{text[:half]}[... {left_out} characters left out ...]{text[-half:]}"
