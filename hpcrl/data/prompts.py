"""Prompts in verl's schema from Parquet and JSONL files, tokenised with the chat template.

Columns: `prompt` (a list of {role, content}, or a plain string), `data_source`, `ability`, `reward_model` {style,
ground_truth}, `extra_info`, and for vision-language models `images` and `videos`; all except `prompt` are optional,
others are kept.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from hpcrl.data.chat import ChatTemplate, messages_of
from hpcrl.data.media import FileMedia, Located, MediaItem, MediaReader, MediaTable, Opened, bad_line, report_dropped
from hpcrl.data.pictures import BadImage
from hpcrl.data.row_file import ROWS_PER_BATCH, RowFile, short_names, spread
from hpcrl.data.tokenizer import encode_texts
from hpcrl.runtime.exits import InputError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from hpcrl.config.schema import DataConfig
    from hpcrl.data.images import ImageProcessor
    from hpcrl.runtime.world import World

SCORED = ("data_source", "reward_model", "extra_info")
TOKENISE_ROWS = 1024  # prompts per tokenizer call of one rank


class _Piece(NamedTuple):
    """Rows of a file, without those that are dropped. bad: lines about those with bad pictures.

    rows: numbers, int64. lengths: tokens, int64. values: all tokens, int32. num_items: of pictures, int64.
    """

    rows: np.ndarray
    lengths: np.ndarray
    values: np.ndarray
    num_items: np.ndarray
    items: list[MediaItem]
    bad: list[str]


class PromptDataset:
    """The rows of `files` in order, without those that the length filter and data.bad_images=skip drop.

    Everything is read, tokenised and checked at construction, so that a bad row stops the job before its first step.
    `max_samples` (-1: all) takes the first rows of all files together, before the filter, as in verl. With a `world`,
    construction is collective and its ranks share the work. Pictures are opened with `images`, once at construction and
    then by `ImageLoader`; without it, a row with pictures is an error.

    Args:
        only: a row of the only file, to read that one.
    """

    def __init__(
        self,
        files: Sequence[str],
        tokenizer: PreTrainedTokenizerBase,
        cfg: DataConfig,
        max_samples: int = -1,
        world: World | None = None,
        images: ImageProcessor | None = None,
        only: int | None = None,
    ) -> None:
        if not files:
            raise InputError("no data files; set data.train_files and data.val_files")
        self._cfg = cfg
        self._tokenizer = tokenizer
        self._template = ChatTemplate.of_data(tokenizer, cfg)
        self._files = [RowFile(path, {cfg.image_key, cfg.video_key}, cfg.format) for path in files]
        self._names = short_names(files)
        for file in self._files:
            file.require(cfg.prompt_key, "data.prompt_key")
        self._reader = None if images is None else MediaReader(images, tokenizer, cfg)
        self._media = [FileMedia(self._reader, file, cfg.prompt_key, cfg) for file in self._files]

        num_left = sum(len(file) for file in self._files) if max_samples < 0 else max_samples
        pieces: list[tuple[int, range]] = []
        num_found = 0
        for index, file in enumerate(self._files):
            rows = file.selected(num_left - num_found, only)
            num_found += len(rows)
            pieces += [(index, block) for block in self._media[index].blocks(rows, TOKENISE_ROWS)]
        tokenised = spread(world, pieces, lambda piece: self._tokenise(*piece))
        self._file_of = np.repeat([index for index, _ in pieces], [len(piece.rows) for piece in tokenised])
        self._row_of, lengths, self._values, num_items = (
            np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)
            for parts in ([piece[part] for piece in tokenised] for part in range(4))
        )
        self._items = MediaTable(num_items, [item for piece in tokenised for item in piece.items])
        bad = [line for piece in tokenised for line in piece.bad]
        report_dropped(bad, world)
        self.num_bad = len(bad)
        self.num_filtered = num_found - len(self) - self.num_bad
        if not len(self):
            why = f"all {num_found} prompts are longer than {self._limit}" if num_found else "no rows"
            if self.num_bad:
                why = f"{self.num_bad} of {num_found} rows have bad pictures; others are longer than {self._limit}"
            raise InputError(f"{', '.join(files)}: empty dataset: {why}; expected at least one usable prompt")
        self._offsets = np.concatenate([[0], np.cumsum(lengths)])

    def __len__(self) -> int:
        return len(self._row_of)

    def prompt_ids(self, row: int) -> np.ndarray:
        """Return the token ids of a prompt with its generation prompt, int32 (length,), at most `max_prompt_length`."""
        return self._values[self._offsets[row] : self._offsets[row + 1]]

    def media(self, row: int) -> list[MediaItem]:
        """Return the pictures and videos of a prompt, in the order of their tokens."""
        return self._items[row]

    def locate(self, row: int, index: int) -> Located:
        """Return where the patches of item `index` come from, for a process that decodes them."""
        return self._media[self._file_of[row]].locate(int(self._row_of[row]), index, self.media(row)[index])

    def thumbnail(self, row: int, index: int) -> bytes:
        """Return a small PNG of item `index` of `media(row)`."""
        return self._media[self._file_of[row]].thumbnail(int(self._row_of[row]), index, self.media(row)[index])

    def has_placeholders(self, ids: Sequence[int]) -> bool:
        """Whether one of these tokens stands for a part of a picture."""
        return self._reader is not None and bool(self._reader.is_placeholder(np.array(ids)).any())

    @property
    def prompt_lengths(self) -> np.ndarray:
        """Tokens of each prompt, int64 (len,)."""
        return np.diff(self._offsets)

    @property
    def file_sizes(self) -> list[int]:
        """Rows of each file in the dataset, in the order of `files`; rows of a file are contiguous."""
        return np.bincount(self._file_of, minlength=len(self._files)).tolist()

    def prompt_text(self, row: int, skip_special_tokens: bool = False, ids: np.ndarray | None = None) -> str:
        """Return the prompt's tokens as text, with one placeholder for each picture.

        Args:
            ids: int32 (n,), what the model read if it may be more than the row's prompt.
        """
        ids = self.prompt_ids(row) if ids is None else ids
        if self._reader is not None:
            ids = self._reader.folded(ids, self.media(row))
        return str(self._tokenizer.decode(ids.tolist(), skip_special_tokens=skip_special_tokens))

    def row(self, row: int) -> dict[str, Any]:
        """Return the row of the file, all columns except those of pictures."""
        return self._files[self._file_of[row]][int(self._row_of[row])]

    def values(self, name: str, start: int = 0, stop: int | None = None) -> list[Any]:
        """Return a column of rows [start, stop), None where a row lacks it; cheaper than row by row."""
        files, numbers = self._file_of[start:stop], self._row_of[start:stop]
        values = list[Any]()
        for file in np.unique(files):
            own = numbers[files == file].tolist()
            column = self._files[file].column(name, own[0], own[-1] + 1)
            values += [column[number - own[0]] for number in own]
        return values

    def record(self, row: int) -> dict[str, Any]:
        """Return the row data for scorers: data_source, ground_truth, extra_info, ability, prompt (raw)."""
        columns = self.row(row)
        source, truth, extra = self._scored(row, *(columns.get(name) for name in SCORED))
        return {
            "data_source": source,
            "ground_truth": truth,
            "extra_info": extra,
            "ability": columns.get("ability") or "",
            "prompt": columns[self._cfg.prompt_key],
        }

    def ground_truths(self) -> Iterator[tuple[str, Any]]:
        """(data_source, ground_truth) of each row, with one block of rows in memory."""
        for start in range(0, len(self), ROWS_PER_BATCH):
            columns = [self.values(name, start, start + ROWS_PER_BATCH) for name in SCORED]
            for row, values in enumerate(zip(*columns, strict=True), start):
                yield self._scored(row, *values)[:2]

    def _scored(self, row: int, source: Any, model: Any, extra: Any) -> tuple[str, Any, dict[str, Any]]:
        """data_source, ground_truth and extra_info from the values of the columns SCORED."""
        for name, value in zip(SCORED[1:], (model, extra), strict=True):
            if not isinstance(value or {}, dict):
                raise InputError(f"{self.where(row)}: column {name!r} holds {str(value)[:80]!r}; expected a mapping")
        return str(source or ""), (model or {}).get("ground_truth"), extra or {}

    def source_of_rows(self) -> list[str]:
        """Return the `data_source` of each row, "" if it has none."""
        return [str(source or "") for source in self.values("data_source")]

    def uid(self, row: int, epoch: int) -> str:
        """Return `<file>:<row>:<epoch>`, with the row's number in its file (from 0), before the filter."""
        return f"{self._names[self._file_of[row]]}:{self._row_of[row]}:{epoch}"

    def where(self, row: int) -> str:
        """Return `<path>: row <n>`, for error messages."""
        return self._where(self._file_of[row], self._row_of[row])

    @property
    def _limit(self) -> str:
        return f"data.max_prompt_length={self._cfg.max_prompt_length}"

    def _where(self, file: int, row: int) -> str:
        return f"{self._files[file].path}: row {row}"

    def _tokenise(self, file: int, rows: range) -> _Piece:
        """Tokenise these rows of a file, with one placeholder token repeated for each token of a picture."""
        values = self._files[file].column(self._cfg.prompt_key, rows.start, rows.stop)
        places = [self._where(file, row) for row in rows]
        prompts = [self._prompt(value, where) for value, where in zip(values, places, strict=True)]
        opened = self._media[file].open(rows, prompts)
        good = [(row, where, it) for row, where, it in zip(rows, places, opened, strict=True) if isinstance(it, Opened)]
        encoded = self._encode([it.prompt for _, _, it in good], [where for _, where, _ in good])
        bad = {row: it for row, it in zip(rows, opened, strict=True) if isinstance(it, BadImage)}
        usable, ids, num_items, items = list[int](), list[list[int]](), list[int](), list[MediaItem]()
        for (row, where, it), tokens in zip(good, encoded, strict=True):
            try:
                tokens, places_of = self._expand(tokens, it)
            except BadImage as error:
                bad[row] = error
                continue
            if (fitted := self._fit(tokens, where, bool(places_of))) is not None:
                usable.append(row)
                ids.append(fitted)
                num_items.append(len(places_of))
                items += places_of
        return _Piece(
            np.array(usable, dtype=np.int64),
            np.array([len(it) for it in ids], dtype=np.int64),
            np.array([token for it in ids for token in it], dtype=np.int32),
            np.array(num_items, dtype=np.int64),
            items,
            [bad_line(self._where(file, row), bad[row], self._cfg) for row in sorted(bad)],
        )

    def _prompt(self, value: Any, where: str) -> str | list[dict[str, Any]]:
        prompt = value if isinstance(value, str) else messages_of(value, with_parts=self._reader is not None)
        if not prompt and prompt != "":
            raise InputError(
                f"{where}: column {self._cfg.prompt_key!r} holds {str(value)[:80]!r}; "
                "expected a string, or a non-empty list of {role, content} with text in both"
            )
        return prompt

    def _expand(self, ids: list[int], opened: Opened) -> tuple[list[int], list[MediaItem]]:
        if self._reader is None:
            return ids, []
        repeats, items = self._reader.expand(ids, opened.entries)
        return (np.repeat(ids, repeats).tolist() if items else ids), items

    def _encode(self, prompts: list[Any], places: list[str]) -> list[list[int]]:
        ids: list[list[int]] = [[] for _ in prompts]
        # A template contains its special tokens; a plain string gets those that the tokenizer adds to any text.
        for templated in (True, False):
            selected = [i for i, prompt in enumerate(prompts) if isinstance(prompt, str) != templated]
            texts = [self._text(prompts[i], places[i]) for i in selected]
            where = [places[i] for i in selected]
            for i, tokens in zip(selected, encode_texts(self._tokenizer, texts, where, not templated), strict=True):
                ids[i] = tokens
        return ids

    def _text(self, prompt: Any, where: str) -> str:
        """A conversation's text ends with the generation prompt."""
        return prompt if isinstance(prompt, str) else self._template.text(prompt, where, generation_prompt=True)

    def _fit(self, ids: list[int], where: str, has_items: bool) -> list[int] | None:
        """Truncate `ids` by data.truncation, or return None if the filter drops the prompt."""
        limit = self._cfg.max_prompt_length
        if not ids:
            raise InputError(f"{where}: the prompt has no tokens; expected at least one")
        if len(ids) <= limit:
            return ids
        if self._cfg.filter_overlong_prompts:
            return None
        if has_items:
            raise InputError(
                f"{where}: the prompt has {len(ids)} tokens with those of its pictures, more than {self._limit}, and "
                "pictures cannot be truncated; raise the limit, lower data.max_pixels, or set "
                "data.filter_overlong_prompts=true"
            )
        if self._cfg.truncation == "error":
            raise InputError(
                f"{where}: the prompt has {len(ids)} tokens, more than {self._limit}; raise the limit, "
                "or set data.filter_overlong_prompts=true, or data.truncation to left, right or middle"
            )
        return truncate(ids, limit, self._cfg.truncation)


def prompt_ids(
    tokenizer: PreTrainedTokenizerBase,
    cfg: DataConfig,
    prompt: str | list[Any],
    tools: Sequence[Any] | None,
    limit: int | None,
) -> np.ndarray:
    """Return the tokens of a text, or of a conversation with its generation prompt, int32 (n,). Raises InputError if
    there are none or more than `limit` tokens, or if the template fails.

    Args:
        tools: schemas for the chat template.
    """
    where, is_text = "the prompt of an environment", isinstance(prompt, str)
    if isinstance(prompt, str):
        text = prompt
    else:
        template = ChatTemplate.of_data(tokenizer, cfg)
        template = template if tools is None else template.with_option("tools", list(tools) or None)
        text = template.text(prompt, where, generation_prompt=True)
    (ids,) = encode_texts(tokenizer, [text], [where], is_text)
    if not ids:
        raise InputError(f"{where} has no tokens; expected at least one")
    if limit is not None and len(ids) > limit:
        raise InputError(f"{where} has {len(ids)} tokens; expected at most data.max_prompt_length={limit}")
    return np.array(ids, np.int32)


def truncate(ids: list[int], limit: int, mode: str) -> list[int]:
    """`left` keeps the end, `right` keeps the start, `middle` keeps limit // 2 of the start and the rest of the end."""
    if mode == "left":
        return ids[-limit:]
    if mode == "right":
        return ids[:limit]
    head = limit // 2
    return ids[:head] + ids[len(ids) - (limit - head) :]
