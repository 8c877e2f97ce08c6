"""The first lines of the report: is a run learning, is it healthy, what to look at.

A rule is a pure function of a run. It returns a Finding with the chart or the section that shows it, or None. A change
is the mean of the last fifth of the steps less that of the first fifth; its noise is the standard error of the
difference, from second differences of neighbouring values, which a trend hardly enters.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from statistics import fmean, median
from typing import NamedTuple

from hpcrl.observe.read.attempts import FAILED, HANG, KILLED
from hpcrl.observe.read.recorded_run import RecordedRun
from hpcrl.observe.read.runlog import RunLog
from hpcrl.observe.report.charts import anchor

FEWEST_VALUES = 4  # of a metric; second differences of fewer say nothing about its noise
CERTAIN = 3.0  # standard errors that a change needs; 1 of 700 changes of pure noise has as many
PEAK_CERTAIN = 5.0  # of a fall from the highest fifth, which is chosen among all fifths
LEAST_SHARE = 0.02  # of the first value that a change needs; smaller ones do not matter
BLURRED = 0.25  # of the first value; a plateau is claimed only if a change of this size would show
AT_CEILING = 0.95  # accuracy that hardly can rise
COLLAPSED = 0.5  # of the highest mean that is lost; dips of healthy runs lose less
TRUNCATED, MOSTLY_TRUNCATED = 0.1, 0.5  # share of responses at the limit: if it rises; in any case
TRUNCATION_RISE = 0.05  # in the truncated share, from the first fifth to the last
ENTROPY_SHARE = 0.1  # of the entropy at the start; policies that still explore stay above
ENTROPY_TIMES = 2.0  # the entropy at the start; learning lowers it
PPO_KL, MUCH_PPO_KL = 0.1, 0.5  # nats of one update; 0.001 to 0.05 are usual
REFERENCE_KL = 1.0  # nats per token from the reference; above it the texts have little in common
GAP, LARGE_GAP = 0.05, 0.3  # nats between log-probs of rollout and training; bf16 gives 0.005 to 0.03
GROWN = 1.5  # times the response length at the start
SPIKE = 50.0  # times the median gradient norm of all steps and of the nearest; batches of healthy runs reached 34
NEAREST = 5  # steps on each side, among which the gradients of a loss that falls are alike
FEW_FAILURES = 1.0  # failed scores or turns of a step in the mean
ABORTED = 0.1  # share of empty responses
OVERFITTED = 1.1  # times the lowest validation loss
SLOW_STEPS = 0.1  # share of the steps in which one rank was reported as slow
LOST_STEPS = 0.05  # share of the steps that had to be taken again
MOST_SENTENCES = 3


class Finding(NamedTuple):
    """severity: good, look or bad. anchor: id of the chart or the section. advice: what to look at, "" for nothing."""

    severity: str
    text: str
    anchor: str
    advice: str = ""


class Trend(NamedTuple):
    """Means of the first fifth, the last, the one before it and the highest; `error`: standard error of a change."""

    first: float
    last: float
    before: float
    peak: float
    error: float
    steps: int

    @property
    def change(self) -> float:
        return self.last - self.first

    def rises(self, least: float = 0.0) -> bool:
        return self.change > max(CERTAIN * self.error, LEAST_SHARE * abs(self.first), least)

    def falls(self) -> bool:
        return -self.change > max(CERTAIN * self.error, LEAST_SHARE * abs(self.first))

    def mirrored(self) -> Trend:
        """Of the negative values, without a peak."""
        return Trend(-self.first, -self.last, -self.before, -self.last, self.error, self.steps)


def finite_values(log: RunLog, key: str) -> list[float]:
    return [value for _, value in log.series(key) if math.isfinite(value)]


def trend_of(series: Sequence[tuple[int, float]]) -> Trend | None:
    """None for fewer than FEWEST_VALUES finite values."""
    finite = [(step, value) for step, value in series if math.isfinite(value)]
    values = [value for _, value in finite]
    if len(values) < FEWEST_VALUES:
        return None
    width = max(len(values) // 5, 1)
    means = [fmean(values[start : start + width]) for start in range(len(values) - width, -1, -width)][::-1]
    bends = [a - 2 * b + c for a, b, c in zip(values, values[1:], values[2:], strict=False)]
    noise = math.sqrt(fmean(bend * bend for bend in bends) / 6)  # a second difference has 6 times the variance
    first = fmean(values[:width])
    error = noise * math.sqrt(2 / width)
    return Trend(first, means[-1], means[-2], max(means), error, finite[-1][0] - finite[0][0])


class Objective(NamedTuple):
    """What training improves: its name in words, its values, the chart. is_share: of 1, shown in percent."""

    name: str
    series: list[tuple[int, float]]
    panel: str
    is_share: bool = False
    is_loss: bool = False

    def shown(self, value: float) -> str:
        return f"{100 * value:.0f}%" if self.is_share else f"{value:.3g}"

    def points(self, value: float) -> str:
        return f"{100 * value:.1f}" if self.is_share else f"{value:.2g}"


VALIDATION = r"val-core/(.*)/(acc|reward|score)/mean@(\d+)"
OBJECTIVES = (  # the first that has enough values
    ("validation accuracy", "val/rewards/accuracies", "Accuracy"),
    ("validation accuracy", "val/accuracy", "Accuracy"),
    ("reward", "critic/score/mean", "Reward"),
    ("validation loss", "val/loss", "Loss"),
    ("accuracy", "rewards/accuracies", "Accuracy"),
    ("loss", "train/loss", "Loss"),
)


def validation_of(log: RunLog) -> Objective | None:
    """The mean over the data sources, of each the metric of most samples; accuracy before rewards."""
    matches = [match for match in (re.fullmatch(VALIDATION, tag) for tag in log.tags()) if match]
    kind = "acc" if any(match[2] == "acc" for match in matches) else next((match[2] for match in matches), "")
    most: dict[str, re.Match[str]] = {}
    for match in sorted(matches, key=lambda match: int(match[3])):
        if match[2] == kind:
            most[match[1]] = match
    keys = [match[0] for match in most.values()]
    series = [(step, fmean(row[key] for key in keys)) for step, row in log.rows.items() if keys and _has(row, keys)]
    of = f" (mean of {len(keys)} sources)" if len(keys) > 1 else ""
    name = "validation accuracy" if kind == "acc" else "validation reward"
    return Objective(name + of, series, "Accuracy", is_share=kind == "acc") if trend_of(series) else None


def _has(row: dict[str, float], keys: Sequence[str]) -> bool:
    return all(math.isfinite(row.get(key, math.nan)) for key in keys)


def objective_of(log: RunLog) -> Objective | None:
    if validation := validation_of(log):
        return validation
    for name, key, panel in OBJECTIVES:
        if trend_of(series := log.series(key)):
            return Objective(name, series, panel, is_share=panel == "Accuracy", is_loss=panel == "Loss")
    return None


def learning(log: RunLog) -> Finding:
    """The first sentence."""
    objective = objective_of(log)
    if objective is None:
        steps = sum(step > 0 for step in log.rows)
        return Finding("look", f"{steps} steps are too few to see whether the run learns.", "learning")
    trend = trend_of(objective.series)
    assert trend is not None
    better = trend.mirrored() if objective.is_loss else trend
    figures = f"from {objective.shown(trend.first)} to {objective.shown(trend.last)}"
    size = f"({objective.points(trend.change)[:1] if trend.change < 0 else '+'}{objective.points(abs(trend.change))}, "
    figures += f" {size}noise {objective.points(trend.error)}) over {trend.steps} steps"
    up, down = ("fell", "rose") if objective.is_loss else ("rose", "fell")
    place, name = anchor(objective.panel), objective.name.capitalize()
    dropped = better.peak - better.last
    if not objective.is_loss and dropped > max(PEAK_CERTAIN * better.error, COLLAPSED * abs(better.peak)):
        text = f"The run collapsed: {objective.name} fell from {objective.shown(better.peak)} at its highest to "
        text += f"{objective.shown(better.last)} (noise {objective.points(better.error)}) over {trend.steps} steps."
        advice = "the gradient norm, the KL and the entropy just before the fall, "
        return Finding("bad", text, place, advice + "then resume from a checkpoint before it")
    if better.rises():
        goes_on = ", and still " + ("falls" if objective.is_loss else "rises")
        still = goes_on if better.last - better.before > CERTAIN * better.error else ""
        return Finding("good", f"{name} {up} {figures}{still}.", place)
    if better.falls():
        advice = "the learning rate, which may be too high, and the samples of the last step"
        return Finding("bad", f"{name} {down} {figures}: the run gets worse.", place, advice)
    if objective.is_share and trend.last >= AT_CEILING:
        return Finding("good", f"{name} stays at its ceiling, {figures}.", place)
    besides = training_reward(log) if "validation" in objective.name else ""
    if better.change > better.error:
        return Finding("look", f"{name} may have improved, {figures}: not yet beyond its noise{besides}.", place)
    if CERTAIN * better.error > BLURRED * abs(better.first):
        text = f"{name} shows no change, {figures}, but its noise would hide one{besides}; take more steps or samples."
        return Finding("look", text, place)
    advice = "the learning rate, and whether samples of one prompt differ in their scores"
    if besides:
        advice = "what differs between training and validation: prompts, temperature, samples"
    return Finding("look", f"{name} did not change beyond its noise, {figures}{besides}.", place, advice)


def training_reward(log: RunLog) -> str:
    """Part of a sentence on validation: that the reward of the training samples rises; "" if it does not."""
    trend = trend_of(log.series("critic/score/mean"))
    if trend is None or not trend.rises():
        return ""
    return f", while the reward of the training samples rose from {trend.first:.3g} to {trend.last:.3g}"


def truncation(run: RecordedRun) -> Finding | None:
    trend = trend_of(run.log.series("response_length/clip_ratio"))
    if trend is None or trend.last < TRUNCATED:
        return None
    rising = trend.rises(TRUNCATION_RISE)
    if not rising and trend.last < MOSTLY_TRUNCATED:
        return None
    text = f"{trend.last:.0%} of the responses are cut at the length limit, after {trend.first:.0%} at the start."
    severity = "bad" if rising and trend.last >= MOSTLY_TRUNCATED else "look"
    advice = "data.max_response_length, and whether responses repeat"
    return Finding(severity, text, anchor("At the limit, aborted"), advice)


def entropy(run: RecordedRun) -> Finding | None:
    trend = trend_of(run.log.series("actor/entropy"))
    if trend is None or trend.first <= 0:
        return None
    objective = objective_of(run.log)
    course = trend_of(objective.series) if objective else None
    if course is not None and objective and objective.is_share and course.last >= AT_CEILING:
        return None
    figures = f"from {trend.first:.2g} to {trend.last:.2g} nats"
    place = anchor("Entropy")
    if trend.last < ENTROPY_SHARE * trend.first and trend.falls():
        text = f"The entropy collapsed, {figures}: the policy hardly explores."
        return Finding("bad", text, place, "actor.clip_ratio_high and actor.entropy_coeff")
    if trend.last > ENTROPY_TIMES * trend.first and trend.rises() and not (course and course.rises()):
        text = f"The entropy exploded, {figures}: texts become random."
        return Finding("bad", text, place, "the learning rate and actor.entropy_coeff")
    return None


def divergence(run: RecordedRun) -> Finding | None:
    update, reference = (trend_of(run.log.series(f"actor/{key}")) for key in ("ppo_kl", "kl_loss"))
    place = anchor("KL")
    if update and abs(update.last) > PPO_KL:
        severity = "bad" if abs(update.last) > MUCH_PPO_KL else "look"
        text = f"One update moves the policy by a KL of {update.last:.2g} nats."
        return Finding(severity, text, place, "the learning rate and the number of updates of a batch")
    if reference and reference.last > REFERENCE_KL:
        text = f"The policy is {reference.last:.2g} nats per token from its reference."
        return Finding("look", text, place, "actor.kl_loss_coef")
    return None


def log_prob_gap(run: RecordedRun) -> Finding | None:
    gaps = [abs(value) for value in finite_values(run.log, "training/rollout_log_probs_diff_mean")]
    trend = trend_of(list(enumerate(gaps)))
    if trend is None or trend.last < GAP:
        return None
    text = f"Log-probs of rollout and training differ by {trend.last:.2g} nats in the mean."
    severity, place = "bad" if trend.last > LARGE_GAP else "look", anchor("Log-prob gap: rollout - training")
    return Finding(severity, text, place, "staleness and precision of the rollout, algorithm.rollout_correction")


def length_hack(run: RecordedRun) -> Finding | None:
    length, reward = (trend_of(run.log.series(key)) for key in ("response_length/mean", "critic/score/mean"))
    validation = validation_of(run.log)
    course = trend_of(validation.series) if validation else None
    if not (length and reward and course) or not (length.rises() and reward.rises()) or course.rises():
        return None
    if length.last < GROWN * length.first:
        return None
    text = f"The reward pays for length: responses grew from {length.first:.0f} to {length.last:.0f} tokens and the "
    text += "training reward rose, but validation did not."
    advice = "the longest samples of the last step and the reward that they got"
    return Finding("bad", text, anchor("Response length"), advice)


def gradients(run: RecordedRun) -> Finding | None:
    key = next((key for key in ("actor/grad_norm", "train/grad_norm") if run.log.series(key)), "")
    series = [(step, value) for step, value in run.log.series(key) if step > 0]
    broken = [step for step, value in series if not math.isfinite(value)]
    place = anchor("Gradient norm")
    if broken:
        text = f"The gradient was not finite in {len(broken)} steps, first in step {broken[0]}."
        return Finding("bad", text, place, "the batch of this step and the precision")
    if len(series) < FEWEST_VALUES:
        return None
    values = [value for _, value in series]
    at = values.index(max(values))
    (step, most), near = series[at], values[max(at - NEAREST, 0) : at] + values[at + 1 : at + 1 + NEAREST]
    usual = max(median(values), median(near))
    if most <= SPIKE * usual or usual <= 0:
        return None
    text = f"The gradient norm was {most:.3g} in step {step}, {most / usual:.0f} times the usual one."
    return Finding("look", text, place, "actor.optim.clip_grad and the learning rate")


def failures(run: RecordedRun) -> Finding | None:
    """Of rewards and environments; responses without text."""
    empty = finite_values(run.log, "response/aborted_ratio")
    if empty and fmean(empty) > ABORTED:
        text, place = f"{fmean(empty):.0%} of the responses are empty.", anchor("At the limit, aborted")
        return Finding("look", text, place, "the warnings, and the timeouts of the rollout")
    kinds = ("timeouts", "crashes", "errors")
    for name, folder in (("scores", "reward"), ("turns of environments", "env")):
        counts = {kind: finite_values(run.log, f"{folder}/{kind}") for kind in kinds}
        means = {kind: fmean(values) for kind, values in counts.items() if values}
        if sum(means.values()) > FEW_FAILURES:
            listed = ", ".join(f"{mean:.1f} {kind}" for kind, mean in means.items() if mean)
            text, place = f"In a step, {name} fail: {listed} in the mean.", anchor("Failed scores and turns")
            return Finding("look", text, place, "the warnings of the run")
    return None


def overfitting(run: RecordedRun) -> Finding | None:
    values = finite_values(run.log, "val/loss")
    if len(values) < FEWEST_VALUES or values[-1] < OVERFITTED * min(values) or min(values) <= 0:
        return None
    text = f"The validation loss is {values[-1]:.3g} after {min(values):.3g} at its lowest: the run overfits."
    return Finding("look", text, anchor("Loss"), "an earlier checkpoint or fewer epochs")


def waiting_ranks(run: RecordedRun) -> Finding | None:
    reports = [straggler.rank for straggler in run.stragglers]
    steps = sum(step > 0 for step in run.log.rows)
    rank = max(set(reports), key=reports.count) if reports else 0
    if not reports or reports.count(rank) < max(SLOW_STEPS * steps / 10, 1):  # a report stands for 10 steps
        return None
    last = next(straggler for straggler in reversed(run.stragglers) if straggler.rank == rank)
    text = f"The other ranks wait for rank {rank} on {last.node}, {last.ratio:.2g} times as busy in {last.phase}."
    return Finding("look", text, "ranks", "that node, or how the work is split between ranks")


def slices(run: RecordedRun) -> Finding | None:
    lost = sum(attempt.lost_steps or 0 for attempt in run.attempts)
    steps = sum(step > 0 for step in run.log.rows)
    if run.state in (FAILED, HANG, KILLED):
        text = f"The run ended early ({run.state}) after step {max(run.log.rows, default=0)}."
        return Finding("bad", text, "slices", "why it ended, and the warnings")
    if lost > LOST_STEPS * steps:
        text = f"{lost} steps were lost in {len(run.attempts)} starts and taken again."
        return Finding("look", text, "slices", "trainer.save_freq, which may be too rare")
    return None


RULES: tuple[Callable[[RecordedRun], Finding | None], ...] = (
    length_hack,
    gradients,
    entropy,
    divergence,
    truncation,
    log_prob_gap,
    overfitting,
    failures,
    slices,
    waiting_ranks,
)  # of two findings of one severity, the first matters more


class Verdict(NamedTuple):
    """sentences: one to three; others: findings for which there was no room."""

    sentences: list[Finding]
    others: list[Finding]


def verdict_of(run: RecordedRun) -> Verdict:
    first = learning(run.log)
    findings = [finding for finding in (rule(run) for rule in RULES) if finding]
    findings.sort(key=lambda finding: finding.severity != "bad")
    if not findings:
        findings = [Finding("good", "Nothing else stands out.", "learning")] if first.severity == "good" else []
    worst = next((finding for finding in (first, *findings) if finding.severity == "bad" and finding.advice), None)
    worst = worst or next((finding for finding in (*findings, first) if finding.advice), None)
    sentences = [first, *findings[:1]]
    if worst:
        sentences.append(Finding("look", f"Look at {worst.advice}.", worst.anchor))
    return Verdict(sentences, findings[1:])
