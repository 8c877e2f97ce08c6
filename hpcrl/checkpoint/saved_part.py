"""What the ranks tell rank 0 of a save; without torch's checkpointing, which a run imports when it saves."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from hpcrl.checkpoint.manifest import FileEntry


@dataclass(frozen=True)
class SavedPart:
    """What a rank tells of its part.

    pieces: start and length in its file of each item of its plan, in bytes. problem: one line, where the part could not
    be written.
    """

    rank: int
    files: list[FileEntry]
    pieces: list[tuple[int, int]]
    problem: str | None = None

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> SavedPart:
        found = json.loads(text)
        files = [FileEntry(**entry) for entry in found.pop("files")]
        return cls(files=files, pieces=[(start, length) for start, length in found.pop("pieces")], **found)


def told(error: Exception) -> str:
    """One line."""
    if not isinstance(error, OSError):
        return f"{type(error).__name__}: {' '.join(str(error).split())}"
    return f"{error.filename}: {error.strerror}" if error.filename else str(error.strerror or error)
