"""The file that `hpcrl generate` writes: whole lines in a fixed order, so that a killed job can be started again."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from hpcrl.runtime.exits import InputError

log = logging.getLogger(__name__)

WAY_OUT = "choose another generate.output_path, or remove the file"


class Key(NamedTuple):
    """What a line is of. prompt: what it holds of its prompt, by name; files of other data may have the same uids."""

    uid: str
    sample_index: int
    prompt: Mapping[str, Any]


@dataclass
class Totals:
    """What the samples of a file add up to."""

    num_samples: int = 0
    num_tokens: int = 0  # of responses
    longest: int = 0  # tokens
    num_cut: int = 0  # responses that ended at the length limit
    num_scored: int = 0
    sum_of_scores: float = 0.0

    def add(self, length: int, finish_reason: str, score: float | None) -> None:
        self.num_samples += 1
        self.num_tokens += length
        self.longest = max(self.longest, length)
        self.num_cut += finish_reason == "length"
        if score is not None:
            self.num_scored += 1
            self.sum_of_scores += score

    @property
    def length(self) -> float:
        """Tokens of a response, on average."""
        return self.num_tokens / self.num_samples

    @property
    def score(self) -> float:
        return self.sum_of_scores / self.num_scored


class GenerationFile:
    """One JSON object per sample, in the order of `keys`. What is in `<name>.settings.json` decides the samples: a file
    of other settings is refused, one of the same is gone on with. A line that a kill has torn, and what follows it, is
    dropped: random numbers are keyed by the sample, so nothing is lost by drawing it again.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any], keys: Iterator[Key], num_samples: int) -> None:
        self.path = path
        self.settings_path = path.with_name(path.name + ".settings.json")
        self.num_samples = num_samples
        self.totals = Totals()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.exists() and path.stat().st_size:
                self._check_settings(settings)
                end = self._scan(keys)
            else:
                self._write_settings(settings)
                end = 0
            self._file = open(path, "ab")
            if not self.is_complete:
                self._file.truncate(end)
        except OSError as error:
            why = f"cannot write {error.filename or path}: {error.strerror}; change generate.output_path"
            raise InputError(why) from None

    @property
    def is_complete(self) -> bool:
        return self.totals.num_samples == self.num_samples

    def append(self, lines: list[str]) -> None:
        """On return they survive a kill."""
        # A lone surrogate, which UTF-8 lacks, becomes JSON's own way of writing it.
        self._file.write("".join(lines).encode("utf-8", "backslashreplace"))
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()

    def _check_settings(self, settings: Mapping[str, Any]) -> None:
        try:
            before = json.loads(self.settings_path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            why = f"{self.path} exists, without the {self.settings_path.name} of its job; {WAY_OUT}"
            raise InputError(why) from None
        now = json.loads(json.dumps(settings))
        for name in sorted({*before, *now}):
            theirs, ours = before.get(name), now.get(name)
            if theirs != ours:
                raise InputError(f"{self.path} holds samples of {name}={theirs}, and this job has {ours}; {WAY_OUT}")

    def _write_settings(self, settings: Mapping[str, Any]) -> None:
        draft = self.settings_path.with_name(self.settings_path.name + ".tmp")
        draft.write_text(json.dumps(settings, indent=1) + "\n", encoding="utf-8")
        os.replace(draft, self.settings_path)

    def _scan(self, keys: Iterator[Key]) -> int:
        """Bytes of the whole lines at the start of the file, which go into the totals."""
        end = 0
        with open(self.path, "rb") as file:
            for number, (text, key) in enumerate(zip(file, keys, strict=False), 1):
                line = _parsed(text)
                if line is None:
                    log.warning("%s: line %d is torn; going on from there", self.path, number)
                    break
                if (line["uid"], line["sample_index"]) != (key.uid, key.sample_index):
                    raise InputError(
                        f"{self.path}: line {number} is sample {line['sample_index']} of {line['uid']}, expected sample"
                        f" {key.sample_index} of {key.uid}: the data files or their filter have changed; {WAY_OUT}"
                    )
                for name, value in key.prompt.items():
                    if line.get(name) != value:
                        raise InputError(
                            f"{self.path}: line {number} has another {name} than {key.uid} has now: the data files are "
                            f"others, or have changed; {WAY_OUT}"
                        )
                self.totals.add(len(line["response_ids"]), line["finish_reason"], line.get("score"))
                end += len(text)
        return end


def _parsed(text: bytes) -> dict[str, Any] | None:
    """None for a line that a kill has torn."""
    try:
        line = json.loads(text) if text.endswith(b"\n") else None
    except ValueError:
        return None
    return line if isinstance(line, dict) and {"uid", "sample_index", "response_ids"} <= line.keys() else None
