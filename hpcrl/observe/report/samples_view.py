"""Samples in a terminal, with `rich`: tokens coloured by advantage, log-prob gap or entropy; two runs side by side."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import zip_longest

import numpy as np
from rich.console import Console
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from hpcrl.observe.read.samples import ArchivedTurn, Sample, StepArchive
from hpcrl.sandbox.foreign_files import printable


@dataclass(frozen=True, eq=False)
class PromptPair:
    """A prompt with the samples of two runs in one step. uid: of the first run; without its epoch if they differ."""

    step: int
    uid: str
    data_source: str
    prompt: str
    sides: tuple[list[Sample], list[Sample]]

    @property
    def mean_scores(self) -> tuple[float, float]:
        first, second = (float(np.mean([sample.score for sample in side])) for side in self.sides)
        return first, second


def paired(first: StepArchive, second: StepArchive) -> Iterator[PromptPair]:
    """Yield the common prompts of two archives of a step: by uid, or else by file and row, in another epoch.

    In ascending order of the second run's mean score minus the first run's.
    """
    for with_epoch in (True, False):
        groups = _by_prompt(first, with_epoch), _by_prompt(second, with_epoch)
        common = [uid for uid in groups[0] if uid in groups[1]]
        if common:
            break
    differences = {uid: _mean(second, groups[1][uid]) - _mean(first, groups[0][uid]) for uid in common}
    for uid in sorted(common, key=lambda uid: np.nan_to_num(differences[uid])):
        samples, others = [first.sample(row) for row in groups[0][uid]], [second.sample(row) for row in groups[1][uid]]
        yield PromptPair(samples[0].step, uid, samples[0].data_source, samples[0].prompt, (samples, others))


def _mean(archive: StepArchive, rows: list[int]) -> float:
    return float(np.mean(archive.columns["score"][rows].astype(np.float64)))


def _by_prompt(archive: StepArchive, with_epoch: bool) -> dict[str, list[int]]:
    """uid -> rows, in the order of sample_index."""
    groups: dict[str, list[int]] = {}
    for row in range(len(archive)):
        uid = str(archive.columns["uid"][row])
        groups.setdefault(uid if with_epoch else uid.rpartition(":")[0], []).append(row)
    if "sample_index" in archive.columns:
        numbers = archive.columns["sample_index"].tolist()
        for rows in groups.values():
            rows.sort(key=numbers.__getitem__)
    return groups


CUT = 4000  # characters of a text that are shown
POSITIVE, NEGATIVE, NEUTRAL = (26, 127, 55), (207, 34, 46), (154, 103, 0)  # background at full strength
FULL = {"advantage": 2.0, "gap": 0.5, "entropy": 2.0}  # values of full strength; the last two in nats
MIN_WIDTH = 40  # columns of each side of a pair; a narrower terminal has one below the other


class SamplesView:
    def __init__(self, color: str, *, cut: bool, names: tuple[str, str], console: Console | None = None) -> None:
        """Set up how samples are shown.

        Args:
            color: advantage, gap, entropy or none.
            cut: show at most CUT characters of a text.
            names: the names of both runs.
        """
        self._console = console or Console(highlight=False, soft_wrap=False)
        self._names = [_line(name, "") for name in names]
        self._style_of = _style if self._console.color_system in ("256", "truecolor") else _named_style
        self._color = color
        self._cut = cut

    def show(self, sample: Sample) -> None:
        self._console.print(
            Rule(_line(f"step {sample.step}  {sample.uid} #{sample.sample_index}", "bold"), align="left")
        )
        self._console.print(self._summary(sample))
        self._console.print(self._shortened(Text(printable(sample.prompt), style="dim")))
        self._console.print(self.response(sample))
        self._console.print()

    def show_pair(self, pair: PromptPair) -> None:
        first, second = pair.mean_scores
        change = f"mean score {first:.4g} -> {second:.4g}"
        self._console.print(Rule(_line(f"step {pair.step}  {pair.uid}  {change}", "bold"), align="left"))
        self._console.print(self._shortened(Text(printable(pair.prompt), style="dim")))
        rows = list(zip_longest(*pair.sides))
        if self._console.width < 2 * MIN_WIDTH:
            for name, side in zip(self._names, pair.sides, strict=True):
                for sample in side:
                    self._console.print(name, self._summary(sample), sep="  ")
                    self._console.print(self.response(sample))
        else:
            table = Table(show_lines=True, expand=True)
            for name in self._names:
                table.add_column(name, ratio=1)
            for row in rows:
                table.add_row(*(Text("-") if sample is None else self._cell(sample) for sample in row))
            self._console.print(table)
        self._console.print()

    def response(self, sample: Sample) -> Text:
        """The response's tokens, coloured; those of tools and users are dim."""
        strengths, mask = self._strengths(sample), sample.response_mask
        text = Text()
        labels = ArchivedTurn.labels(sample.turns)
        for index, piece in enumerate(sample.token_texts):
            if index in labels:
                text.append("\n" * (index > 0) + labels[index] + "\n", "bold")
            style = None if strengths is None else self._style_of(strengths[index], self._color)
            text.append(printable(piece), "dim italic" if mask is not None and not mask[index] else style)
        return self._shortened(text)

    def _cell(self, sample: Sample) -> Text:
        return Text("\n").join([self._summary(sample), self.response(sample)])

    def _summary(self, sample: Sample) -> Text:
        parts = ", ".join(f"{name} {_number(value)}" for name, value in sample.parts.items())
        fields = [f"score {_number(sample.score)}{f' ({parts})' if parts else ''}"]
        fields.append(f"{sample.length} tokens, {sample.finish_reason or '-'}")
        fields += [sample.data_source] if sample.data_source else []
        if sample.advantages is not None and sample.length:
            low, high = float(np.min(sample.advantages)), float(np.max(sample.advantages))
            fields.append(f"advantage {_number(low)}{'' if low == high else f' to {_number(high)}'}")
        return _line("  ".join(fields), "cyan")

    def _strengths(self, sample: Sample) -> np.ndarray | None:
        """-1 to 1 for each token, (length,); None if the run did not record what colours it."""
        values = values_of(sample, self._color)
        if values is None or len(values) != len(sample.token_texts):
            return None
        return np.clip(np.nan_to_num(values.astype(np.float64)) / FULL[self._color], -1.0, 1.0)

    def _shortened(self, text: Text) -> Text:
        if not self._cut or len(text) <= CUT:
            return text
        left_out = len(text) - CUT
        return text[:CUT].append(f" ... {left_out} more characters (--full)", "reverse")


def values_of(sample: Sample, color: str) -> np.ndarray | None:
    """What colours the tokens, (length,); None where it was not recorded."""
    if color == "gap" and sample.gap is not None:
        return -sample.gap
    return {"advantage": sample.advantages, "entropy": sample.entropies}.get(color)


def _style(strength: float, color: str) -> str | None:
    """White on a background between black and the colour of the sign."""
    if strength == 0:
        return None
    full = NEUTRAL if color == "entropy" else POSITIVE if strength > 0 else NEGATIVE
    share = 0.35 + 0.65 * abs(strength)
    red, green, blue = (round(share * part) for part in full)
    return f"white on rgb({red},{green},{blue})"


def _named_style(strength: float, color: str) -> str | None:
    """Of the 16 colours, or fewer: coloured text, and a coloured background from half of the full strength on."""
    if strength == 0:
        return None
    name = "yellow" if color == "entropy" else "green" if strength > 0 else "red"
    return f"black on {name}" if abs(strength) >= 0.5 else name


def _line(text: str, style: str) -> Text:
    return Text(printable(text, one_line=True), style=style, overflow="fold")


def _number(value: object) -> str:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return printable(str(value), one_line=True)[:80]
    return "nan" if math.isnan(value) else f"{value:.4g}"
