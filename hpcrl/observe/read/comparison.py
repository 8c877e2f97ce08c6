"""Evaluations side by side: the level of each, and its paired difference to the first, over the problems of both.

Means over problems have standard errors; their formulas are pure functions of arrays."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hpcrl.observe.read.evaluation import Evaluation, Problem, Way, read_evaluations
from hpcrl.runtime.exits import InputError

Z = 1.959963984540054  # 97.5% quantile of the normal distribution
POOLED = "all"  # the data source of the problems of all sources, each problem with the same weight


@dataclass(frozen=True)
class Estimate:
    """A mean over problems. standard_error: NaN for one problem, which has none."""

    mean: float
    standard_error: float
    num_problems: int

    @property
    def interval(self) -> tuple[float, float]:
        """The 95% interval: mean -+ t * standard_error, with t of num_problems - 1 degrees of freedom."""
        half = t_quantile(self.num_problems - 1) * self.standard_error
        return self.mean - half, self.mean + half


@dataclass(frozen=True)
class Difference(Estimate):
    """The mean over problems of second minus first. wins: problems where the second is higher; losses: lower."""

    wins: int
    losses: int

    @property
    def ties(self) -> int:
        return self.num_problems - self.wins - self.losses


def mean_over_problems(values: np.ndarray) -> Estimate:
    """Mean and standard error of one number per problem, such as the mean score of its samples.

    The standard error is sqrt(sum_i (v_i - mean)^2 / (P (P - 1))): that of the central limit theorem for problems drawn
    from a larger population (Miller 2024, "Adding Error Bars to Evals", arXiv 2411.00640). The samples of a problem are
    one cluster, so it covers both the choice of the problems and the sampling of responses; more samples per problem
    reduce the second part only.

    Args:
        values: float64 (P,).
    """
    count = len(values)
    error = math.sqrt(float(np.var(values, ddof=1)) / count) if count > 1 else math.nan
    return Estimate(float(np.mean(values)), error, count)


def paired_difference(first: np.ndarray, second: np.ndarray) -> Difference:
    """Mean and standard error of second - first over the same problems (Miller 2024: paired differences).

    What makes a problem easy or hard for both cancels, so the standard error is usually smaller than that of two
    separate means.

    Args:
        first, second: float64 (P,), one number per problem in the same order.
    """
    change = second - first
    estimate = mean_over_problems(change)
    wins, losses = int(np.sum(change > 0)), int(np.sum(change < 0))
    return Difference(estimate.mean, estimate.standard_error, estimate.num_problems, wins, losses)


def pass_at_k(num_right: np.ndarray, n: int, k: int) -> np.ndarray:
    """Unbiased estimate, per problem, of the probability that one of k samples is right.

    Returns float64 (P,): 1 - C(n - c, k) / C(n, k) (Chen et al. 2021, "Evaluating Large Language Models Trained on
    Code", arXiv 2107.03374, equation 1). Raises ValueError unless 1 <= k <= n.

    Args:
        num_right: int64 (P,), right samples of n.
    """
    if not 1 <= k <= n:
        raise ValueError(f"pass@{k} of {n} samples; expected k between 1 and {n}")
    counts, place = np.unique(num_right, return_inverse=True)
    of_count = [1 - math.comb(n - right, k) / math.comb(n, k) for right in counts.tolist()]
    return np.array(of_count)[place]


def ks_of(n: int) -> list[int]:
    """The k of pass@k: 1, 2, 4, ... below n, and n."""
    return [2**power for power in range(n.bit_length()) if 2**power < n] + [n]


def t_quantile(degrees: int) -> float:
    """97.5% quantile of Student's t distribution (Abramowitz and Stegun 1964, 26.7.5): within 0.8% from 2 degrees of
    freedom, 11% too small for one; NaN for none."""
    if degrees < 1:
        return math.nan
    terms = (
        Z,
        (Z**3 + Z) / 4,
        (5 * Z**5 + 16 * Z**3 + 3 * Z) / 96,
        (3 * Z**7 + 19 * Z**5 + 17 * Z**3 - 15 * Z) / 384,
        (79 * Z**9 + 776 * Z**7 + 1482 * Z**5 - 1920 * Z**3 - 945 * Z) / 92160,
    )
    return sum(term / degrees**power for power, term in enumerate(terms))


@dataclass(frozen=True)
class Level:
    """What an evaluation reached on a data source in one way of sampling.

    estimates: `acc` (or `reward`), and `pass@k` for k > 1 where all values are 0 or 1. length: mean response tokens.
    truncated: share of the responses.
    """

    name: str
    source: str
    way: Way
    estimates: Mapping[str, Estimate]
    length: float
    truncated: float


@dataclass(frozen=True)
class Change:
    """Differences of an evaluation to the first one, by metric, over the problems of both."""

    name: str
    source: str
    way: Way
    differences: Mapping[str, Difference]


@dataclass(frozen=True)
class Comparison:
    """notes: what is compared only in part, a sentence each."""

    evaluations: Sequence[Evaluation]
    levels: Sequence[Level]
    changes: Sequence[Change]
    notes: Sequence[str]

    @property
    def ways(self) -> list[Way]:
        return list(dict.fromkeys(level.way for level in self.levels))

    def as_json(self) -> dict[str, Any]:
        """Values for JSON: null for a standard error that one problem does not have."""
        names = ("weights", "step", "files", "max_response_length")
        return {
            "evaluations": [
                {"name": one.name, "path": str(one.path), **{name: one.settings.get(name) for name in names}}
                for one in self.evaluations
            ],
            "levels": [
                _row(level, level.estimates) | {"response_length": level.length, "truncated": level.truncated}
                for level in self.levels
            ],
            "differences": [
                _row(change, change.differences, baseline=self.evaluations[0].name) for change in self.changes
            ],
            "notes": list(self.notes),
        }


def compare_evaluations(paths: Sequence[str | os.PathLike[str]]) -> Comparison:
    """Compare evaluations, given as folders of runs or as their evaluation.json; each with the first.

    Problems are matched by their contents: data source, prompt and answer. Raises InputError, one line, for
    evaluations that cannot be compared.
    """
    evaluations = read_evaluations(paths)
    if not evaluations:
        raise InputError("no evaluation to compare; name the folders of runs")
    levels = [level for one in evaluations for level in _levels(one)]
    changes, notes = list[Change](), list[str]()
    first = evaluations[0]
    for other in evaluations[1:]:
        _check_rows(first, other)
        notes += _check_ways(first, other)
        changes += _changes(first, other)
        notes += _notes(first, other)
    return Comparison(evaluations, levels, changes, list(dict.fromkeys(notes)))


Key = tuple[str, int]  # digest, and how many problems before it have the same


def _by_group(evaluation: Evaluation) -> dict[tuple[Way, str], dict[Key, Problem]]:
    """(way, data source) -> problems; the sources of a way are followed by POOLED if it has several."""
    groups: dict[tuple[Way, str], dict[Key, Problem]] = {}
    for way in dict.fromkeys(problem.way for problem in evaluation.problems):
        repeats = Counter[str]()
        sources: dict[str, dict[Key, Problem]] = {}
        for problem in evaluation.problems:
            if problem.way == way:
                sources.setdefault(problem.source, {})[problem.digest, repeats[problem.digest]] = problem
                repeats[problem.digest] += 1
        groups |= {(way, source): problems for source, problems in sources.items()}
        pooled = {key: problem for problems in sources.values() for key, problem in problems.items()}
        if len(sources) > 1 and POOLED not in sources and len({one.variable for one in pooled.values()}) == 1:
            groups[way, POOLED] = pooled
    return groups


def _levels(evaluation: Evaluation) -> Iterator[Level]:
    for (way, source), problems in _by_group(evaluation).items():
        members = list(problems.values())
        estimates = {name: mean_over_problems(values) for name, values in _metrics(evaluation, members).items()}
        lengths = float(np.mean([problem.lengths for problem in members]))
        truncated = sum(problem.truncated for problem in members) / (len(members) * way.n)
        yield Level(evaluation.name, source, way, estimates, lengths, truncated)


def _metrics(evaluation: Evaluation, problems: Sequence[Problem]) -> dict[str, np.ndarray]:
    """Metric -> float64 (P,), a number for each problem."""
    way, variable = problems[0].way, problems[0].variable
    if any(problem.variable != variable for problem in problems):
        raise InputError(f"{evaluation.path}: {problems[0].source} has both acc and reward; evaluate again")
    values = np.array([problem.values for problem in problems], np.float64)
    metrics = {variable: values.mean(axis=1)}
    if np.isin(values, (0, 1)).all():
        num_right = values.sum(axis=1).astype(np.int64)
        metrics |= {f"pass@{k}": pass_at_k(num_right, way.n, k) for k in ks_of(way.n) if k > 1}
    return metrics


def _changes(first: Evaluation, other: Evaluation) -> Iterator[Change]:
    mine, theirs = _by_group(first), _by_group(other)
    has_common = False
    for way, source in mine:
        before, after = mine[way, source], theirs.get((way, source), {})
        common = [key for key in before if key in after]
        if not common:
            continue
        has_common = True
        names = [{problems[key].variable for key in common} for problems in (before, after)]
        if names[0] != names[1]:
            raise InputError(
                f"{source} is scored by {'/'.join(names[0])} in {first.name} and by {'/'.join(names[1])} in "
                f"{other.name}; expected the same; evaluate both with the same reward function"
            )
        old = _metrics(first, [before[key] for key in common])
        new = _metrics(other, [after[key] for key in common])
        differences = {name: paired_difference(old[name], new[name]) for name in old if name in new}
        yield Change(other.name, source, way, differences)
    if not has_common:
        raise InputError(
            f"{first.name} ({_num_problems(first)} problems) and {other.name} ({_num_problems(other)}) have no problem "
            "in common; evaluate both on the same data.val_files"
        )


def _check_rows(first: Evaluation, other: Evaluation) -> None:
    """Raise InputError if a file has changed between the evaluations."""
    digests = {(problem.file, problem.row): problem.digest for problem in first.problems}
    for problem in other.problems:
        if digests.get((problem.file, problem.row), problem.digest) != problem.digest:
            raise InputError(
                f"row {problem.row} of {problem.file} has another prompt, answer or data source in {other.name} "
                f"than in {first.name}; evaluate both on the same file"
            )


def _check_ways(first: Evaluation, other: Evaluation) -> list[str]:
    """Notes about the ways that only one of them has. Raises InputError if no way is common."""
    ways = [list(dict.fromkeys(problem.way for problem in one.problems)) for one in (first, other)]
    if not set(ways[0]) & set(ways[1]):
        listed = [" and ".join(f"({way})" for way in of_one) for of_one in ways]
        raise InputError(
            f"{first.name} was sampled with {listed[0]} and {other.name} with {listed[1]}; evaluate one of them with "
            "the rollout.val_kwargs of the other"
        )
    sides = ((first, other, ways[0], ways[1]), (other, first, ways[1], ways[0]))
    return [
        f"({way}) of {one.name} is not compared: {against.name} was not sampled in this way"
        for one, against, own, others in sides
        for way in own
        if way not in others
    ]


def _notes(first: Evaluation, other: Evaluation) -> list[str]:
    notes = []
    digests = [Counter(_digests(one)) for one in (first, other)]
    common = (digests[0] & digests[1]).total()
    if not common == digests[0].total() == digests[1].total():
        notes.append(
            f"{common} problems are common: {first.name} has {digests[0].total()}, {other.name} {digests[1].total()}"
        )
    limits = [one.settings.get("max_response_length") for one in (first, other)]
    if limits[0] != limits[1]:
        notes.append(
            f"responses of {first.name} have at most {limits[0]} tokens and those of {other.name} {limits[1]} "
            "(data.max_response_length)"
        )
    return notes


def _digests(evaluation: Evaluation) -> list[str]:
    """The digest of each problem, once however many ways it was sampled in."""
    return list({(problem.file, problem.row): problem.digest for problem in evaluation.problems}.values())


def _num_problems(evaluation: Evaluation) -> int:
    return len(_digests(evaluation))


def _row(row: Level | Change, estimates: Mapping[str, Estimate], **more: Any) -> dict[str, Any]:
    metrics = {name: _plain(estimate) for name, estimate in estimates.items()}
    return {"name": row.name, "data_source": row.source, "way": row.way._asdict(), **more, "metrics": metrics}


def _plain(estimate: Estimate) -> dict[str, Any]:
    low, high = estimate.interval
    row: dict[str, Any] = {
        "mean": estimate.mean,
        "standard_error": None if math.isnan(estimate.standard_error) else estimate.standard_error,
        "interval": None if math.isnan(low) else [low, high],
        "num_problems": estimate.num_problems,
    }
    if isinstance(estimate, Difference):
        row |= {"wins": estimate.wins, "losses": estimate.losses, "ties": estimate.ties}
    return row
