"""Answers of a judge that are kept, in memory and in a file of the run."""

from __future__ import annotations

import json
import logging
import os
from collections import OrderedDict
from hashlib import blake2b
from pathlib import Path
from typing import TextIO

log = logging.getLogger(__name__)


def answer_key(*parts: str | int | float) -> str:
    """Name of what determines an answer: the judge, its sampling, its prompt."""
    return blake2b(json.dumps(parts).encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


class VerdictCache:
    """Key -> the judge's answer, at most `size` of them: the ones used last.

    Lives on a leader. `path` is this rank's own file, which an earlier attempt may have written. A line that a kill has
    cut off is ignored.
    """

    def __init__(self, path: Path, size: int) -> None:
        self._size = size
        self._answers: OrderedDict[str, str] = OrderedDict()
        self._path: Path | None = path
        self._file: TextIO | None = None
        self._num_lines = 0  # in the file
        if path.exists():
            self._read(path)

    def get(self, key: str) -> str | None:
        if key not in self._answers:
            return None
        self._answers.move_to_end(key)
        return self._answers[key]

    def put(self, key: str, answer: str) -> None:
        """Keep an answer; when this returns, it survives a kill of the process."""
        self._keep(key, answer)
        try:
            self._write(key, answer)
        except OSError as error:
            log.warning("judge: answers are no longer kept in %s: %s", self._path, error.strerror)
            self._path = None

    def _keep(self, key: str, answer: str) -> None:
        self._answers[key] = answer
        self._answers.move_to_end(key)
        if len(self._answers) > self._size:
            self._answers.popitem(last=False)

    def _read(self, path: Path) -> None:
        try:
            lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
        except OSError as error:
            log.warning("judge: answers of an earlier attempt are not used: %s: %s", path, error.strerror)
            return
        self._num_lines = len(lines)
        for line in lines:
            try:
                key, answer = json.loads(line)
            except (ValueError, TypeError):
                continue
            if isinstance(key, str) and isinstance(answer, str):
                self._keep(key, answer)

    def _write(self, key: str, answer: str) -> None:
        """Append to the file, or write it anew without what was dropped. Raises OSError."""
        if self._path is None:
            return
        if self._num_lines >= 2 * self._size:
            draft = self._path.with_suffix(".tmp")
            draft.write_text("".join(map(line_of, self._answers.items())), encoding="utf-8")
            os.replace(draft, self._path)
            self._file, self._num_lines = None, len(self._answers)
            return
        if self._file is None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = open(self._path, "a", encoding="utf-8")
        self._file.write(line_of((key, answer)))
        self._file.flush()
        self._num_lines += 1


def line_of(item: tuple[str, str]) -> str:
    """A line of the file. Its line break comes first, and so ends a line that a kill has cut off."""
    return f"\n{json.dumps(item)}"
