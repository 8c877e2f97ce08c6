"""Pictures that tools returned, in the rollout archive."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

from hpcrl.batch.pictures import Picture
from hpcrl.observe.record.archive import ArchiveError, PictureFolder
from hpcrl.rollout.protocol import ToolPicture

log = logging.getLogger(__name__)


def keep(folder: PictureFolder, pictures: Iterable[ToolPicture]) -> None:
    """Write the pictures; on failure, log a warning."""
    try:
        for picture in pictures:
            folder.keep(_name(picture), partial(bytes, picture.png))
    except OSError as error:
        log.warning(
            "%s: %s; pictures of tools are not kept, and the step cannot be replayed: free some space",
            *(error.filename, error.strerror or error),
        )


def to_text(pictures: Sequence[ToolPicture]) -> str:
    """One sample's pictures as JSON: the names of their files, and their places in the sequence."""
    return json.dumps([{"name": _name(picture), **picture.place._asdict()} for picture in pictures])


def of_text(text: str, *folders: PictureFolder) -> tuple[ToolPicture, ...]:
    """The pictures of one sample, each from the first folder that has it.

    Raises ArchiveError if none has it, or if the text is another's.
    """
    try:
        return tuple(_picture(folders, **values) for values in json.loads(text))
    except (ValueError, TypeError) as error:
        if isinstance(error, ArchiveError):
            raise
        raise ArchiveError(f"tool_pictures: found {text[:80]!r} ({error}); expected the pictures of a sample") from None


def _name(picture: ToolPicture) -> str:
    return f"{picture.key:016x}.whole.png"


def _picture(folders: Sequence[PictureFolder], name: str, **place: Any) -> ToolPicture:
    folder = next((folder for folder in folders if folder.has(name)), folders[0])
    return ToolPicture(int(name.partition(".")[0], 16), Picture.of(**place), folder.read(name))
