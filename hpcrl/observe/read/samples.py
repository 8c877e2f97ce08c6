"""The samples of a run, read from its rollout archive with prompts and responses as text. No torch, no MPI."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from hpcrl.observe.read.archive import read_step
from hpcrl.observe.read.token_text import TokenText, token_text_of
from hpcrl.observe.record.archive import ArchiveError, step_path
from hpcrl.sandbox.foreign_files import is_folder, parse_json

FOLDER = "rollouts"  # of a run
PER_TOKEN = ("advantages", "rollout_log_probs", "old_log_probs", "entropies", "response_mask")  # of responses
SCORES = ("rm_score", "judge_score", "reward_baseline", "num_turns", "tool_call_counts")  # besides `score`, in `parts`
_STEP = re.compile(r"step_(\d{8,})\.h5")


class ArchivedTurn(NamedTuple):
    """A turn of the model, the response's tokens from `start` on, and the answer to it, from `answer` up to `end`.
    reward: the score on its last token; None where it was not recorded."""

    start: int
    answer: int
    end: int
    reward: float | None

    @staticmethod
    def labels(turns: Sequence[ArchivedTurn]) -> dict[int, str]:
        """A line to show before each of these tokens."""
        lines: dict[int, str] = {}
        for number, turn in enumerate(turns, 1):
            lines[turn.start] = f"[turn {number}{'' if turn.reward is None else f', reward {turn.reward:g}'}]"
            if turn.answer < turn.end:
                lines[turn.answer] = f"[answer to turn {number}]"
        return lines


@dataclass(frozen=True, eq=False)
class Sample:
    """One archived response, of `length` tokens; arrays are (length,), None where the run did not record the column.

    prompt, response: text with special tokens; the response without the token that ended it. token_texts: the part of
    the text that each response token adds, the end token included. parts: acc, scores of models, numbers of turns and
    of tool calls, rewards of turns, and what else the scorer or the environment returned, of one that failed its
    `error`. turns: those of a response with answers, unless its environment failed. advantages, rollout_log_probs,
    old_log_probs, entropies: float32, in nats where they are logs; response_mask: int32, 0 where a tool or a user wrote
    the token.
    """

    step: int
    uid: str
    sample_index: int
    data_source: str
    prompt: str
    response: str
    token_texts: list[str]
    score: float
    parts: dict[str, Any]
    finish_reason: str
    length: int
    advantages: np.ndarray | None
    rollout_log_probs: np.ndarray | None
    old_log_probs: np.ndarray | None
    entropies: np.ndarray | None
    response_mask: np.ndarray | None = None
    turns: tuple[ArchivedTurn, ...] = ()

    @property
    def gap(self) -> np.ndarray | None:
        """Log-prob of each token in the rollout engine minus that of training."""
        if self.rollout_log_probs is None or self.old_log_probs is None:
            return None
        return self.rollout_log_probs - self.old_log_probs


def recorded_steps(run: Path) -> list[int]:
    """The steps whose samples are archived, in ascending order; [] without an archive. Files are not opened."""
    folder = Path(run) / FOLDER
    if not is_folder(folder, run):
        return []
    names = (_STEP.fullmatch(path.name) for path in folder.glob("step_*.h5"))
    return sorted(int(name[1]) for name in names if name)


def read_step_samples(run: Path, step: int, rows: Sequence[int] | None = None) -> list[Sample]:
    """The samples of a step in the order of the archive.

    Raises ArchiveError, one line, for a missing, damaged or half-copied file.

    Args:
        rows: places of the samples to read; None: all.
    """
    archive = StepArchive(run, step)
    return [archive.sample(index) for index in (range(len(archive)) if rows is None else rows)]


class StepArchive:
    """The samples of one step, which are decoded when they are asked for.

    columns: name -> (samples,), those of the archive's samples/.
    """

    def __init__(self, run: Path, step: int) -> None:
        """Raises ArchiveError, as `read_step_samples`."""
        self.path = step_path(Path(run) / FOLDER, step)
        self._step = step
        names = ("input_ids", *(f"{name}?" for name in (*PER_TOKEN, "token_level_scores")))
        self._tokens, self.columns, _ = read_step(self.path, names, root=Path(run))
        if not self.columns:
            return
        missing = {"uid", "prompt_length", "response_length", "score"} - self.columns.keys()
        if missing:
            listed = ", ".join(f"samples/{name}" for name in sorted(missing))
            raise ArchiveError(f"{self.path}: has no {listed}; not an archive of training steps")
        self._check()
        self._text = _token_text(Path(run))
        self._prompts: dict[bytes, str] = {}  # the samples of a prompt share its text

    def __len__(self) -> int:
        return len(self.columns.get("uid", ()))

    def prompt(self, index: int) -> str:
        prompt, _ = self._ids(index)
        key = prompt.tobytes()
        if key not in self._prompts:
            self._prompts[key] = self._text.decode(prompt.tolist())
        return self._prompts[key]

    def response(self, index: int) -> str:
        """Without the token that ended it."""
        ids = self._ids(index)[1].tolist()
        ended = self._value(index, "finish_reason", "") == "stop" and bool(ids) and self._text.is_special(ids[-1])
        return self._text.decode(ids[:-1] if ended else ids)

    def sample(self, index: int) -> Sample:
        _, response = self._ids(index)
        turns = self._turns(index)
        arrays = {name: self._row(index, name) if name in self._tokens else None for name in PER_TOKEN}
        return Sample(
            step=self._step,
            uid=str(self._value(index, "uid", "")),
            sample_index=int(self._value(index, "sample_index", 0)),
            data_source=str(self._value(index, "data_source", "")),
            prompt=self.prompt(index),
            response=self.response(index),
            token_texts=self._text.pieces(response.tolist()),
            score=float(self._value(index, "score", math.nan)),
            parts=self._parts(index, turns),
            finish_reason=str(self._value(index, "finish_reason", "")),
            length=len(response),
            turns=turns,
            **arrays,
        )

    def _check(self) -> None:
        """Raise ArchiveError unless each column has an entry for each token of each sample, and numbers are numbers."""
        for name in ("prompt_length", "response_length", "sample_index"):
            if name in self.columns and self.columns[name].dtype.kind not in "iu":
                raise ArchiveError(f"{self.path}: samples/{name} holds no integers")
        for name in ("score", *SCORES):
            if name in self.columns and self.columns[name].dtype.kind not in "biuf":
                raise ArchiveError(f"{self.path}: samples/{name} holds no numbers")
        prompt, response = self.columns["prompt_length"], self.columns["response_length"]
        for name, (_, offsets) in self._tokens.items():
            expected = prompt + response if name == "input_ids" else response
            if np.any(prompt < 0) or np.any(response < 0) or not np.array_equal(np.diff(offsets), expected):
                raise ArchiveError(f"{self.path}: lengths of tokens/{name} differ from those of the samples")
        ids = self._tokens["input_ids"][0]
        if ids.dtype.kind not in "iu" or np.any((ids < 0) | (ids >= 2**31)):
            raise ArchiveError(f"{self.path}: tokens/input_ids holds no token ids")

    def _value(self, index: int, name: str, default: Any) -> Any:
        return self.columns[name][index] if name in self.columns else default

    def _row(self, index: int, name: str) -> np.ndarray:
        values, offsets = self._tokens[name]
        return values[offsets[index] : offsets[index + 1]]

    def _ids(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Token ids of the prompt and of the response."""
        ids, length = self._row(index, "input_ids"), int(self.columns["prompt_length"][index])
        return ids[:length], ids[length:]

    def _parts(self, index: int, turns: Sequence[ArchivedTurn]) -> dict[str, Any]:
        scores = {name: float(self._value(index, name, math.nan)) for name in SCORES}
        try:
            extras = parse_json(self._value(index, "extras", "{}"))
        except (ValueError, TypeError):
            extras = {}
        parts: dict[str, Any] = {name: number for name, number in scores.items() if not math.isnan(number)}
        if any(turn.reward for turn in turns[:-1]):
            parts["turn_rewards"] = " ".join(f"{turn.reward:g}" for turn in turns)
        return parts | (extras if isinstance(extras, dict) else {})

    def _turns(self, index: int) -> tuple[ArchivedTurn, ...]:
        mask = self._row(index, "response_mask") != 0 if "response_mask" in self._tokens else np.ones(0, bool)
        if mask.all() or not mask.any():
            return ()
        edges = np.flatnonzero(np.diff([0, *mask, 0])).tolist()
        scores = self._row(index, "token_level_scores").tolist() if "token_level_scores" in self._tokens else None
        starts, answers = edges[::2], edges[1::2]
        spans = zip(starts, answers, [*starts[1:], len(mask)], strict=True)
        return tuple(ArchivedTurn(*span, None if scores is None else scores[span[1] - 1]) for span in spans)


@functools.lru_cache(maxsize=8)
def _token_text(run: Path) -> TokenText:
    """Once per run, so that a missing tokenizer is one warning."""
    return token_text_of(run)
