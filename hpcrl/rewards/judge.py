"""What a judge is asked, how its answers are read, and the scores that follow. Pure functions, without torch."""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple

Kind = Literal["score", "pairwise", "rubric"]

PLACEHOLDER = re.compile(r"\{(prompt|response|other|ground_truth|rubric)\}")

TEMPLATES: Mapping[Kind, str] = {
    "score": """Rate how well the answer below solves the task, from {minimum} (useless) to {maximum} (perfect).

Task:
{prompt}

Answer:
{response}

Explain briefly. End with a line "Score: <number>".""",
    "pairwise": """Compare two answers to a task.

Task:
{prompt}

Answer A:
{response}

Answer B:
{other}

Explain briefly which one is better; their order must not matter. End with [[A]] if A is better, [[B]] if B is better, \
[[C]] for a tie.""",
    "rubric": """Decide which criteria the answer below meets.

Task:
{prompt}

Answer:
{response}

Criteria:
{rubric}

End with one line per criterion, "<number>: yes" or "<number>: no".""",
}
PATTERNS: Mapping[Kind, str] = {
    "score": r"(?i)score\W*?(-?\d+(?:\.\d+)?)",
    "pairwise": r"\[\[([ABCabc])\]\]",
    "rubric": r"(?im)^\W*(\d+)\W+(yes|no)\b",
}
GROUPS: Mapping[Kind, int] = {"score": 1, "pairwise": 1, "rubric": 2}  # of a pattern
WINS = {"A": 1.0, "B": 0.0, "C": 0.5}  # of the answer at {response} over that at {other}


class Criterion(NamedTuple):
    text: str
    weight: float = 1.0


class Sample(NamedTuple):
    """A response to judge. group: equal for responses to one prompt."""

    prompt: str
    response: str
    ground_truth: str | None
    rubric: tuple[Criterion, ...]
    group: Hashable


class Question(NamedTuple):
    """A prompt for the judge before its chat template. first, second: index of the sample at {response} and of the
    sample at {other}; None: the reference answer, or nothing."""

    text: str
    first: int | None
    second: int | None = None
    rubric: tuple[Criterion, ...] = ()


@dataclass(frozen=True)
class Judging:
    """How a judge is asked and its answers are read. Raises ValueError, one line, for what cannot work.

    template: text with placeholders; pattern: regular expression; None: those of `TEMPLATES` and `PATTERNS`. scale: the
    least and the largest number of kind `score`, which become 0 and 1; None: any number, unchanged.
    """

    kind: Kind = "score"
    template: str | None = None
    pattern: str | None = None
    scale: Sequence[float] | None = (0.0, 10.0)

    def __post_init__(self) -> None:
        if self.scale is not None and not self.scale[0] < self.scale[1]:
            raise ValueError(f"scale={list(self.scale)}; expected [least, largest]")
        if self.template is None and self.kind == "score" and self.scale is None:
            raise ValueError("scale=null, and the built-in template of kind=score names a scale; give a template")
        names = set(PLACEHOLDER.findall(self._template))
        for name in ("response", "rubric") if self.kind == "rubric" else ("response",):
            if name not in names:
                raise ValueError(f"the template has no {{{name}}}, which kind={self.kind} needs; add it")
        if self.kind == "pairwise" and not names & {"other", "ground_truth"}:
            raise ValueError(
                "the template has neither {other}, another response to the prompt, nor {ground_truth}, to compare "
                "{response} with; add one"
            )
        if self.kind != "pairwise" and "other" in names:
            raise ValueError(f"the template has {{other}}, and kind={self.kind} asks about one response; use pairwise")
        try:
            groups = self._pattern.groups
        except re.error as error:
            raise ValueError(f"pattern={self.pattern!r} is no regular expression: {error}") from None
        if groups != GROUPS[self.kind]:
            raise ValueError(
                f"pattern={self.pattern!r} has {groups} groups in parentheses; kind={self.kind} needs "
                f"{GROUPS[self.kind]}"
            )

    @cached_property
    def _template(self) -> str:
        if self.template is not None:
            return self.template
        text = TEMPLATES[self.kind]
        if self.scale is not None:
            text = text.replace("{minimum}", f"{self.scale[0]:g}").replace("{maximum}", f"{self.scale[1]:g}")
        return text

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        return re.compile(PATTERNS[self.kind] if self.pattern is None else self.pattern)

    @property
    def compares_samples(self) -> bool:
        """Whether responses to one prompt are compared with each other."""
        return "{other}" in self._template

    @property
    def compares_reference(self) -> bool:
        """Whether every response is compared with the reference answer."""
        return self.kind == "pairwise" and not self.compares_samples

    def questions(self, samples: Sequence[Sample]) -> list[Question]:
        """What to ask about the samples, in their order.

        Kinds `score` and `rubric` ask once per sample. `pairwise` asks twice per pair, in both orders: of each two
        responses to one prompt, or of each response and the reference answer.
        """
        if self.compares_samples:
            groups: dict[Hashable, list[int]] = defaultdict(list)
            for index, sample in enumerate(samples):
                groups[sample.group].append(index)
            pairs = [(i, j) for group in groups.values() for i in group for j in group if i != j]
            return [Question(self._fill(samples[i], other=samples[j].response), i, j) for i, j in pairs]
        if self.compares_reference:
            return [
                question
                for index, sample in enumerate(samples)
                for question in (
                    Question(self._fill(sample), index, None),
                    Question(self._fill(sample, swap=True), None, index),
                )
            ]
        return [Question(self._fill(sample), index, rubric=sample.rubric) for index, sample in enumerate(samples)]

    def value(self, question: Question, answer: str) -> float | None:
        """The verdict in the judge's answer: a score, the first answer's win (1, 0, or 0.5 for a tie), or the share of
        the criteria that are met; None where there is none.

        The last match counts, because a judge may quote the form of a verdict before. A number outside the scale is
        none, and so is a rubric of which a criterion has no verdict.
        """
        matches = self._pattern.findall(answer)
        if self.kind == "rubric":
            marks = {int(number): mark.lower() == "yes" for number, mark in matches if number.isdecimal()}
            return share_met(question.rubric, marks)
        if not matches:
            return None
        if self.kind == "pairwise":
            return WINS.get(matches[-1].upper())
        return scaled(matches[-1], self.scale)

    def _fill(self, sample: Sample, other: str = "", swap: bool = False) -> str:
        """The template with the sample's texts.

        Args:
            swap: whether the response and the reference answer change places.
        """
        response, ground_truth = sample.response, sample.ground_truth or ""
        if swap:
            response, ground_truth = ground_truth, response
        rubric = "\n".join(f"{number}. {one.text}" for number, one in enumerate(sample.rubric, 1))
        texts = {"prompt": sample.prompt, "response": response, "other": other, "ground_truth": ground_truth}
        return fill(self._template, texts | {"rubric": rubric})


def fill(template: str, texts: Mapping[str, str]) -> str:
    """Replace the placeholders, once: braces in the texts, and other braces in the template, stay."""
    return PLACEHOLDER.sub(lambda match: texts[match[1]], template)


def scaled(text: str, scale: Sequence[float] | None) -> float | None:
    """The number in `text`, with the scale's ends at 0 and 1; None if it is no number, or outside the scale."""
    try:
        number = float(text)
    except ValueError:
        return None
    if not math.isfinite(number):
        return None
    if scale is None:
        return number
    least, largest = scale
    return (number - least) / (largest - least) if least <= number <= largest else None


def share_met(rubric: Sequence[Criterion], marks: Mapping[int, bool]) -> float | None:
    """Weight of the criteria that are met, as a share of all. None if one has no mark.

    Args:
        marks: marks of the criteria by number, from 1.
    """
    if not rubric or any(number not in marks for number in range(1, len(rubric) + 1)):
        return None
    met = sum(criterion.weight for number, criterion in enumerate(rubric, 1) if marks[number])
    return met / sum(criterion.weight for criterion in rubric)


def sample_scores(
    num_samples: int, questions: Iterable[Question], values: Iterable[float | None]
) -> list[float | None]:
    """Score of each sample: the mean of its verdicts, a comparison counting `value` for the first and 1 - `value` for
    the second sample; None where no verdict could be read. A sample that nothing was asked about scores 0.5."""
    verdicts_of: list[list[float]] = [[] for _ in range(num_samples)]
    asked = [False] * num_samples
    for question, value in zip(questions, values, strict=True):
        for index, share in ((question.first, value), (question.second, None if value is None else 1.0 - value)):
            if index is not None:
                asked[index] = True
                if share is not None:
                    verdicts_of[index].append(share)
    return [
        sum(verdicts) / len(verdicts) if verdicts else None if was_asked else 0.5
        for verdicts, was_asked in zip(verdicts_of, asked, strict=True)
    ]


def criteria_of(value: Any) -> tuple[Criterion, ...]:
    """A rubric in a row of data or in a template: texts, or mappings {criterion, weight}. ValueError for others."""
    criteria = []
    for one in value if isinstance(value, list) else [value]:
        criterion = one if isinstance(one, dict) else {"criterion": one}
        text, weight = criterion.get("criterion"), criterion.get("weight")
        weight = 1.0 if weight is None else weight
        if not isinstance(text, str) or not isinstance(weight, int | float) or not (0 < weight < math.inf):
            raise ValueError(f"{str(one)[:80]!r} is no criterion; expected a text, or {{criterion, weight}}")
        criteria.append(Criterion(text, float(weight)))
    return tuple(criteria)


def text_of(value: Any) -> str | None:
    """A prompt or a ground truth as text: a conversation message by message, other values as JSON."""
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, list) and value and all(isinstance(one, dict) and "content" in one for one in value):
        if len(value) == 1:
            return str(value[0]["content"])
        return "\n\n".join(f"{one.get('role', '')}: {one['content']}" for one in value)
    return json.dumps(value, ensure_ascii=False, default=str)


def without_specials(text: str, specials: Iterable[str]) -> str:
    """`text` with a space in each special token of the judge, so that a response cannot end its part of the prompt."""
    for token in specials:
        text = text.replace(token, f"{token[:1]} {token[1:]}")
    return text
