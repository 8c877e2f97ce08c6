"""Pictures and videos of rows: their placeholders in prompts, and their places among the tokens."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from hpcrl.batch.pictures import Picture
from hpcrl.data.images import Entry, Grid, ImageProcessor, Kind, Source
from hpcrl.data.pictures import BadImage
from hpcrl.data.row_file import RowFile
from hpcrl.runtime.exits import InputError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from hpcrl.config.schema import DataConfig
    from hpcrl.runtime.world import World

MEDIA_ROWS = 32  # rows with pictures that a rank opens at a time
MAX_WARNINGS = 20  # lines about rows that data.bad_images=skip drops
KINDS: tuple[Kind, Kind] = ("image", "video")
TAGS: dict[str, Kind] = {"<image>": "image", "<video>": "video"}

log = logging.getLogger(__name__)


class MediaItem(NamedTuple):
    """A picture, or a video, among the tokens of a row. A video of Qwen3-VL is one for each two of its frames.

    key: 63 bits, equal for equal pixels that are resized to an equal size. start: place of its first placeholder
    token. grid: patches in time, height and width. interval: positions between two steps in time.
    """

    key: int
    start: int
    grid: Grid
    interval: float

    @property
    def picture(self) -> Picture:
        return Picture(self.start, self.grid, self.interval)


class Opened(NamedTuple):
    """A prompt of a row with a placeholder for each entry, and the entries in their order."""

    prompt: Any
    entries: list[tuple[Kind, Entry]]


class Located(NamedTuple):
    """Arguments of `ImageProcessor.patches_of`."""

    source: Source
    folder: str
    entry: int
    grid: Grid


class MediaReader:
    """Opens the pictures and videos of rows, and gives their placeholders as many tokens as they need."""

    def __init__(self, images: ImageProcessor, tokenizer: PreTrainedTokenizerBase, cfg: DataConfig) -> None:
        self.images, self.cfg = images, cfg
        vision = images.vision
        self._kind_of: dict[int, Kind] = {vision.image_token_id: "image", vision.video_token_id: "video"}
        ids = [*self._kind_of, vision.vision_start_token_id, vision.vision_end_token_id]
        names = tokenizer.convert_ids_to_tokens(ids)
        if None in names:
            raise InputError(
                f"the tokenizer has no tokens with the ids {ids}, which config.json names for pictures; use the "
                "model's own tokenizer"
            )
        # text of a placeholder, for a prompt without a chat template
        self.spelled = {kind: f"{names[2]}{name}{names[3]}" for kind, name in zip(KINDS, names, strict=False)}

    def place(self, prompt: Any, row: Row) -> Any:
        """Return the prompt with a placeholder per entry. Takes the row's pictures in order. Raises BadImage.

        Args:
            prompt: text, or messages. In text, `<image>` and `<video>` stand for the next one.
        """
        if isinstance(prompt, str):
            tags = {text: kind for kind, text in self.spelled.items()} | (TAGS if row.is_tagged else {})
            pieces = _split(tags, prompt)
            prompt = "".join(piece if kind is None else self._text_of(row.take_source(kind)) for piece, kind in pieces)
        else:
            prompt = [
                message | {"content": self._content(message["content"], row)} if "content" in message else message
                for message in prompt
            ]
        row.check_all_taken(self.cfg)
        return prompt

    def open(self, prompt: Any, row: Row, folder: str) -> Opened:
        """Decode the row's pictures and videos. Raises BadImage.

        Args:
            folder: where relative paths begin.
        """
        prompt = self.place(prompt, row)
        entries = list[tuple[Kind, Entry]]()
        counts = dict.fromkeys(KINDS, 0)
        for source in row.taken:
            try:
                entries += [(source.kind, entry) for entry in self.images.read(source, folder)]
            except BadImage as error:
                raise BadImage(f"{source.kind} {counts[source.kind]}: {error}") from None
            counts[source.kind] += 1
        return Opened(prompt, entries)

    def expand(self, ids: Sequence[int], entries: Sequence[tuple[Kind, Entry]]) -> tuple[np.ndarray, list[MediaItem]]:
        """Return how many times each token is repeated, int64 (len(ids),), and the places after that.

        Raises BadImage if the placeholders among the tokens are not those of the entries.
        """
        places = [place for place, token in enumerate(ids) if token in self._kind_of]
        kinds = [self._kind_of[ids[place]] for place in places]
        if kinds != [kind for kind, _ in entries]:
            raise BadImage(
                f"found {_counted(kinds)} placeholder tokens after the chat template; "
                f"expected {_counted([kind for kind, _ in entries])}, in the order of the messages"
            )
        repeats = np.ones(len(ids), np.int64)
        items, added = list[MediaItem](), 0
        for place, (_, entry) in zip(places, entries, strict=True):
            repeats[place] = self.images.vision.num_tokens(entry.grid)
            items.append(MediaItem(entry.key, place + added, entry.grid, entry.interval))
            added += int(repeats[place]) - 1
        return repeats, items

    def folded(self, ids: np.ndarray, items: Sequence[MediaItem]) -> np.ndarray:
        """Return the tokens with one placeholder for each item."""
        first_of_item = np.ones(len(ids), bool)
        for item in items:
            first_of_item[item.start + 1 : item.start + self.images.vision.num_tokens(item.grid)] = False
        return ids[first_of_item]

    def is_placeholder(self, ids: np.ndarray) -> np.ndarray:
        """Whether each token is a placeholder, bool, shape of `ids`."""
        return np.isin(ids, list(self._kind_of))

    def _content(self, content: Any, row: Row) -> Any:
        """Return a message's content as parts, or as it is if it has no pictures."""
        if isinstance(content, str) and row.is_tagged:
            pieces = list(_split(TAGS, content))
            if all(kind is None for _, kind in pieces):
                return content
            content = [{"type": "text", "text": piece} if kind is None else {"type": kind} for piece, kind in pieces]
        if not isinstance(content, list):
            return content
        return [new for part in content for new in self._parts(part, row)]

    def _parts(self, part: Any, row: Row) -> list[dict[str, Any]]:
        """The parts that the chat template gets for this one."""
        options = {name: it for name, it in part.items() if it is not None} if isinstance(part, dict) else {}
        kind = options.pop("type", None)
        if kind == "text" and isinstance(options.get("text"), str):
            return [{"type": "text", "text": options["text"]}]
        if kind not in KINDS:
            raise BadImage(
                f"found {str(part)[:60]!r} among the parts of a message; expected {{type: text, text: ...}}, "
                "{type: image} or {type: video}"
            )
        parts = []
        for time in self._times_of(row.take_source(kind, options)):
            parts += [{"type": "text", "text": time}] if time else []
            parts.append({"type": kind})
        return parts

    def _text_of(self, source: Source) -> str:
        """The text that stands for a picture in a prompt without a chat template."""
        return "".join(time + self.spelled[source.kind] for time in self._times_of(source))

    def _times_of(self, source: Source) -> list[str]:
        """The text before each placeholder."""
        try:
            return self.images.times_of(source) or [""]
        except BadImage:  # `open` reports it, with the number of the video
            return [""]


class Row:
    """Pictures and videos of a row, which its placeholders take in turn.

    Args:
        images, videos: values of the columns.
        is_tagged: whether `<image>` and `<video>` in texts are placeholders, because the file has such a column.
    """

    def __init__(self, images: Any = None, videos: Any = None, is_tagged: bool = False) -> None:
        values = {"image": images, "video": videos}
        self._given = {kind: [] if it is None else it if isinstance(it, list) else [it] for kind, it in values.items()}
        self._num_taken = dict.fromkeys(KINDS, 0)
        self.is_tagged = is_tagged
        self.taken = list[Source]()

    def take_source(self, kind: Kind, own: Mapping[str, Any] | None = None) -> Source:
        """Take the row's next picture or video.

        Args:
            own: the rest of a part of a message; if it is not empty, it is the picture.
        """
        if own:
            value: Any = dict(own)
        else:
            number = self._num_taken[kind]
            value = self._given[kind][number] if number < len(self._given[kind]) else None
            self._num_taken[kind] += 1
        self.taken.append(Source(kind, value))
        return self.taken[-1]

    def check_all_taken(self, cfg: DataConfig) -> None:
        """Raise BadImage if there are more placeholders than pictures, or fewer."""
        for kind, key in zip(KINDS, (cfg.image_key, cfg.video_key), strict=True):
            if self._num_taken[kind] != len(self._given[kind]):
                raise BadImage(
                    f"found {self._num_taken[kind]} <{kind}> in the messages, and {len(self._given[kind])} in {key!r}; "
                    "expected equal numbers"
                )


class FileMedia:
    """The pictures of the rows of one file, in its columns `data.image_key` and `data.video_key`.

    Args:
        reader: None for a model without a vision tower.
        key: the column of the prompts, or of the conversations.
    """

    def __init__(self, reader: MediaReader | None, file: RowFile, key: str, cfg: DataConfig) -> None:
        self._reader, self._file, self._key = reader, file, key
        self._folder = os.path.dirname(file.path)
        self._names = (cfg.image_key, cfg.video_key)
        self._is_tagged = not set(self._names).isdisjoint(file.columns)

    def blocks(self, rows: range, most: int) -> list[range]:
        """Cut rows into blocks, of at most so many, that a rank opens at a time."""
        step = min(most, MEDIA_ROWS) if self._reader is not None and self._is_tagged else most
        return [rows[start : start + step] for start in range(0, len(rows), step)]

    def open(self, rows: range, prompts: Sequence[Any]) -> list[Opened | BadImage]:
        """Decode the pictures of these rows, whose prompts, or conversations, are given.

        Raises InputError if there is a picture, and no reader.
        """
        images, videos = (self._file.column(name, rows.start, rows.stop) for name in self._names)
        opened = list[Opened | BadImage]()
        for number, prompt, *values in zip(rows, prompts, images, videos, strict=True):
            if self._reader is None:
                self._check_none(number, values)
                opened.append(Opened(prompt, []))
                continue
            try:
                opened.append(self._reader.open(prompt, Row(values[0], values[1], self._is_tagged), self._folder))
            except BadImage as error:
                opened.append(error)
        return opened

    def _check_none(self, number: int, values: Sequence[Any]) -> None:
        for name, value in zip(self._names, values, strict=True):
            if value:
                raise InputError(
                    f"{self._file.path}: row {number}: pictures in {name!r}, but the model has no vision tower; use a "
                    "vision-language model, or name another column in data.image_key or data.video_key"
                )

    def locate(self, number: int, index: int, item: MediaItem) -> Located:
        """Return where the patches of one item of a row come from."""
        assert self._reader is not None  # without it no row has an item
        prompt, images, videos = (self._file.column(name, number, number + 1)[0] for name in (self._key, *self._names))
        row = Row(images, videos, self._is_tagged)
        with readable(f"{self._file.path}: row {number}", index):
            self._reader.place(prompt, row)
            for source in row.taken:
                num = self._reader.images.num_entries(source)
                if index < num:
                    return Located(source, self._folder, index, item.grid)
                index -= num
            raise BadImage(f"found {len(row.taken)} pictures; expected more")

    def thumbnail(self, number: int, index: int, item: MediaItem) -> bytes:
        """Return a small PNG of one item of a row."""
        assert self._reader is not None
        source, folder, entry, _ = self.locate(number, index, item)
        with readable(f"{self._file.path}: row {number}", index):
            return self._reader.images.thumbnail(source, folder, entry)


@contextmanager
def readable(where: str, index: int) -> Iterator[None]:
    """Raise InputError where reading item `index` of a row raises BadImage."""
    try:
        yield
    except BadImage as error:
        raise InputError(f"{where}: item {index}: {error}; it was readable when the job started") from None


class MediaTable:
    """The items of rows, as arrays."""

    def __init__(self, num_items: Sequence[int] | np.ndarray, items: Sequence[MediaItem]) -> None:
        self._offsets = np.concatenate([[0], np.cumsum(num_items)]).astype(np.int64)
        self._keys = np.array([item.key for item in items], np.int64)
        self._starts = np.array([item.start for item in items], np.int64)
        self._grids = np.array([item.grid for item in items], np.int64).reshape(-1, 3)
        self._intervals = np.array([item.interval for item in items], np.float64)

    def __getitem__(self, row: int) -> list[MediaItem]:
        here = slice(*self._offsets[row : row + 2])
        parts = (self._keys, self._starts, self._grids, self._intervals)
        return [
            MediaItem(key, start, (grid[0], grid[1], grid[2]), interval)
            for key, start, grid, interval in zip(*(part[here].tolist() for part in parts), strict=True)
        ]


def bad_line(where: str, error: BadImage, cfg: DataConfig) -> str:
    """Return the line about a row with bad pictures. Raises InputError with data.bad_images=error."""
    line = f"{where}: {error}"
    if cfg.bad_images == "error":
        raise InputError(f"{line}; remove the row, or set data.bad_images=skip")
    return line


def report_dropped(lines: Sequence[str], world: World | None) -> None:
    """Warn, on rank 0, of rows that data.bad_images=skip drops."""
    if world is not None and world.rank > 0:
        return
    for line in lines[:MAX_WARNINGS]:
        log.warning("dropped %s", line)
    if len(lines) > MAX_WARNINGS:
        log.warning("dropped %d rows with bad pictures; the first %d are above", len(lines), MAX_WARNINGS)


def _counted(kinds: Sequence[Kind]) -> str:
    return " and ".join(f"{list(kinds).count(kind)} {kind}" for kind in KINDS)


def _split(tags: Mapping[str, Kind], text: str) -> Iterator[tuple[str, Kind | None]]:
    """Pieces of text, and the placeholders between them with their kinds."""
    for piece in re.split(f"({'|'.join(map(re.escape, tags))})", text):
        if piece:
            yield piece, tags.get(piece)
