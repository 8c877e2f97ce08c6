"""Which samples of a run the page has, and what it has of each.

The rule, which the page states: the first and the last archived step, then the steps in the middle of the largest gaps,
up to MOST_STEPS and up to the size of the page; of each step the BEST, the WORST and RANDOM others; and the first
sample of some prompts at up to MOST_VISITS steps in which the prompt came up: those with the largest gain of the mean
score, those with the lowest mean score at the end.
"""

from __future__ import annotations

import base64
import json
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from hpcrl.observe.read.archive import column, member, whole_archive
from hpcrl.observe.read.logs import shorten
from hpcrl.observe.read.samples import FOLDER, ArchivedTurn, Sample, read_step_samples, recorded_steps
from hpcrl.observe.record.archive import ArchiveError, step_path
from hpcrl.observe.report.charts import evenly_spaced, number
from hpcrl.sandbox.foreign_files import ERRORS

MOST_STEPS = 32
BEST, WORST, RANDOM = 2, 2, 4  # samples of a step
MOST_SCANNED = 400  # steps of which the scores of all samples are read; of more, evenly spaced ones
MOST_PROMPTS = 6  # of each kind that are followed over the steps
MOST_VISITS = 6  # samples of one followed prompt
HEAD_TOKENS, TAIL_TOKENS = 1000, 500  # of a response that are in the page
HEAD_CHARACTERS, TAIL_CHARACTERS = 16_000, 8_000  # of the tokens at its beginning, and of those at its end
LONGEST_PROMPT = 4000  # characters of its beginning, and as many of its end
MOST_PARTS, LONGEST_PART = 40, 500
MISSING = 0xFFFF  # in a packed column


class ScoresOfStep(NamedTuple):
    """Of all samples of a step, in the order of the archive. prompt: the uid without the epoch."""

    scores: np.ndarray
    prompts: list[str]


def read_scores(run: Path, step: int) -> ScoresOfStep:
    """Read two columns of a step's archive. Raises ArchiveError, one line."""
    path = step_path(run / FOLDER, step)
    with whole_archive(path, run) as file:
        samples = member(file, "samples")
        scores, uids = column(samples, "score").astype(np.float64), column(samples, "uid")
    if len(scores) != len(uids):
        raise ArchiveError(f"{path}: {len(scores)} scores of {len(uids)} samples")
    return ScoresOfStep(scores, [prompt_of(str(uid)) for uid in uids])


def prompt_of(uid: str) -> str:
    """`file:row:epoch` without the epoch: the same for all passes over the data."""
    return uid.rsplit(":", 1)[0]


class SampleChoice:
    """The samples of one run for the page.

    Args:
        room: bytes that they may take in it, roughly.
    """

    def __init__(self, run: Path, room: int) -> None:
        self._run = run
        self._steps = recorded_steps(run)
        self._left = room
        self.notes: list[str] = []
        self._scores: dict[int, ScoresOfStep] = {}
        for step in evenly_spaced(self._steps, MOST_SCANNED):
            try:
                of_step = read_scores(run, step)
            except ArchiveError as error:
                self._note(str(error))
                continue
            if len(of_step.scores):
                self._scores[step] = of_step
        self._prompts: dict[str, int] = {}  # text -> number
        self._samples: list[dict[str, Any]] = []

    def data(self) -> dict[str, Any]:
        """For the page: the samples, the texts of their prompts, and the prompts that are followed."""
        followed = self._followed()
        self._add_followed(followed)
        self._add_steps()
        self._samples.sort(key=lambda entry: (entry["step"], -(entry["score"] or 0.0)))
        return {
            "recorded": len(self._steps),
            "scanned": len(self._scores),
            "first": self._steps[0] if self._steps else None,
            "last": self._steps[-1] if self._steps else None,
            "rule": {"best": BEST, "worst": WORST, "random": RANDOM},
            "prompts": list(self._prompts),
            "followed": followed,
            "samples": self._samples,
        }

    def _followed(self) -> list[dict[str, Any]]:
        """Prompts with the largest gain of their mean score from the first to the last scanned step in which they came
        up, and those with the lowest mean score at the end."""
        means: dict[str, list[tuple[int, float]]] = {}
        for step, of_step in self._scores.items():
            by_prompt: dict[str, list[float]] = {}
            for prompt, score in zip(of_step.prompts, of_step.scores.tolist(), strict=True):
                if math.isfinite(score):
                    by_prompt.setdefault(prompt, []).append(score)
            for prompt, scores in by_prompt.items():
                means.setdefault(prompt, []).append((step, sum(scores) / len(scores)))
        several = {prompt: visits for prompt, visits in means.items() if len(visits) > 1}
        gains = {prompt: visits[-1][1] - visits[0][1] for prompt, visits in several.items()}
        improved = sorted((prompt for prompt in gains if gains[prompt] > 0), key=lambda prompt: -gains[prompt])
        lowest = sorted(several or means, key=lambda prompt: (means[prompt][-1][1], -len(means[prompt])))
        kinds = dict.fromkeys(lowest[:MOST_PROMPTS], "lowest") | dict.fromkeys(improved[:MOST_PROMPTS], "most improved")
        ordered = sorted(kinds, key=lambda prompt: (kinds[prompt] == "lowest", -gains.get(prompt, 0.0)))
        return [
            {
                "key": prompt,
                "kind": kinds[prompt],
                "visits": [[step, number(mean)] for step, mean in evenly_spaced(means[prompt], 40)],
                "times": len(means[prompt]),
            }
            for prompt in ordered
        ]

    def _add_followed(self, followed: Sequence[Mapping[str, Any]]) -> None:
        """The first sample of each followed prompt at some of its steps, for a third of the room at most."""
        prompts_of: dict[int, list[str]] = {}
        for entry in followed:
            for step, _ in evenly_spaced(entry["visits"], MOST_VISITS):
                prompts_of.setdefault(step, []).append(entry["key"])
        floor = self._left - self._left // 3
        for position in far_apart(len(prompts_of)):
            step = sorted(prompts_of)[position]
            prompts = self._scores[step].prompts
            self._add(step, {prompts.index(prompt): "followed" for prompt in prompts_of[step]}, floor)

    def _add_steps(self) -> None:
        steps = list(self._scores)
        for position in list(far_apart(len(steps)))[:MOST_STEPS]:
            step = steps[position]
            if not self._add(step, self._rows(step), 0):
                break

    def _rows(self, step: int) -> dict[int, str]:
        """Row -> why it is chosen."""
        scores = self._scores[step].scores
        order = [int(row) for row in np.argsort(-scores, kind="stable") if math.isfinite(scores[row])]  # NaN is last
        chosen = dict.fromkeys(order[:BEST], "best")
        chosen |= {row: "worst" for row in order[::-1][:WORST] if row not in chosen}
        others = [row for row in range(len(scores)) if row not in chosen]
        return chosen | dict.fromkeys(random.Random(step).sample(others, min(RANDOM, len(others))), "random")

    def _add(self, step: int, rows: Mapping[int, str], floor: int) -> bool:
        """Add samples of a step while there is more room than `floor`. Returns whether all of them were added."""
        if self._left <= floor:
            return False
        known = {entry["row"]: entry for entry in self._samples if entry["step"] == step}
        for row in known.keys() & rows.keys():
            known[row]["why"].append(rows[row])
        chosen = [row for row in rows if row not in known]
        try:
            samples = read_step_samples(self._run, step, chosen)
        except ArchiveError as error:
            self._note(str(error))
            return True
        for row, sample in zip(chosen, samples, strict=True):
            prompt = shorten(sample.prompt, LONGEST_PROMPT)
            entry = {"row": row, "why": [rows[row]], "key": prompt_of(sample.uid)} | packed(sample)
            size = len(json.dumps(entry, ensure_ascii=False).encode(errors=ERRORS))
            size += 0 if prompt in self._prompts else len(prompt.encode(errors=ERRORS))
            if self._left - size <= floor:
                return False
            self._left -= size
            entry["prompt"] = self._prompts.setdefault(prompt, len(self._prompts))
            self._samples.append(entry)
        return True

    def _note(self, line: str) -> None:
        if line not in self.notes:
            self.notes.append(line)


def far_apart(count: int) -> Iterator[int]:
    """The numbers below `count`: the last, the first, then always the middle of a gap, level by level."""
    yield from (count - 1, 0)[:count]
    gaps = [(0, count - 1)]
    for low, high in gaps:  # and those that are appended
        if high - low > 1:
            middle = (low + high) // 2
            yield middle
            gaps += [(low, middle), (middle, high)]


def packed(sample: Sample) -> dict[str, Any]:
    """A sample for the page: the texts of its tokens, joined, with the lengths of each, and packed columns."""
    shown = _kept(sample.token_texts)
    texts = [shorten(sample.token_texts[index], HEAD_CHARACTERS) for index in shown]
    columns = {"advantage": sample.advantages, "gap": sample.gap, "entropy": sample.entropies}
    columns |= {"log_prob": sample.rollout_log_probs}
    entry: dict[str, Any] = {
        "step": sample.step,
        "index": sample.sample_index,
        "source": shorten(sample.data_source, 100),
        "score": number(sample.score),
        "parts": _parts(sample.parts),
        "finish": sample.finish_reason,
        "length": sample.length,
        "text": "".join(texts),
        "lengths": [_utf16_length(text) for text in texts],
        "columns": {name: pack(values[shown]) for name, values in columns.items() if values is not None},
    }
    if len(shown) < sample.length:
        head = next((place for place, index in enumerate(shown) if place != index), len(shown))
        entry["cut"] = [head, sample.length - len(shown)]
    if sample.response_mask is not None and not np.all(sample.response_mask):
        entry["outside"] = np.flatnonzero(np.asarray(sample.response_mask)[shown] == 0).tolist()
    if sample.turns:
        place_of = {index: place for place, index in enumerate(shown)}
        labels = ArchivedTurn.labels(sample.turns)
        entry["labels"] = {place_of[index]: label for index, label in labels.items() if index in place_of}
    return entry


def _kept(texts: Sequence[str]) -> list[int]:
    """The places of the tokens that are shown: of long responses, the first and the last ones."""
    lengths = [len(text) for text in texts]
    if len(texts) <= HEAD_TOKENS + TAIL_TOKENS and sum(lengths) <= HEAD_CHARACTERS + TAIL_CHARACTERS:
        return list(range(len(texts)))
    head = _fitting(lengths[:HEAD_TOKENS], HEAD_CHARACTERS)
    tail = _fitting(lengths[head:][::-1][:TAIL_TOKENS], TAIL_CHARACTERS)
    return [*range(head), *range(len(texts) - tail, len(texts))]


def _fitting(lengths: Sequence[int], characters: int) -> int:
    """How many tokens have no more characters together; one at least."""
    return sum(total <= characters for total in accumulate(lengths)) or min(1, len(lengths))


def _utf16_length(text: str) -> int:
    """Characters as JavaScript counts them."""
    return len(text) if text.isascii() else len(text.encode("utf-16-le", errors="surrogatepass")) // 2


def _parts(parts: Mapping[str, Any]) -> list[list[Any]]:
    """[name, number or text] of what the scorer returned."""
    rows: list[list[Any]] = []
    for name, value in list(parts.items())[:MOST_PARTS]:
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            rows.append([shorten(str(name), 50), number(float(value))])
        else:
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
            rows.append([shorten(str(name), 50), shorten(text, LONGEST_PART)])
    return rows


def pack(values: np.ndarray) -> dict[str, Any]:
    """Values in 65,535 steps from the least to the largest finite one, as base64 of uint16, little endian; MISSING for
    what is not finite. Without `data` where all are equal."""
    finite = np.isfinite(values)
    if not np.any(finite):
        return {"low": None, "high": None}
    low, high = float(values[finite].min()), float(values[finite].max())
    if low == high and np.all(finite):
        return {"low": number(low), "high": number(high)}
    steps = np.full(len(values), MISSING, "<u2")
    span = max(high - low, 1e-30)
    steps[finite] = np.rint((values[finite].astype(np.float64) - low) / span * (MISSING - 1)).astype("<u2")
    return {"low": number(low), "high": number(high), "data": base64.b64encode(steps.tobytes()).decode()}
