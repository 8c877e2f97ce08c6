"""`algorithm.rollout_correction` and what its values mean; without torch, so that a login node can check a template."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

LEVELS = ("token", "sequence")
LOSS_TYPES = ("ppo_clip", "reinforce")
OPTIONS = (
    *(f"{level}_{estimator}" for level in ("token", "seq_sum", "seq_mean") for estimator in ("k1", "k2", "k3")),
    *("seq_max_k2", "seq_max_k3"),
)


class Bounds(NamedTuple):
    """Of a weight. Without lower it is truncated at upper (TIS); with lower it is 0 outside [lower, upper] (IcePop)."""

    upper: float
    lower: float | None = None


def parse_bounds(threshold: float | str) -> Bounds:
    """2.0 or "2.0": upper; "0.5_5.0": lower and upper."""
    expected = 'expected an upper bound such as 2.0, or "lower_upper" such as "0.5_5.0", positive'
    try:
        if isinstance(threshold, bool):
            raise ValueError
        numbers = [float(part) for part in str(threshold).split("_", 1)]
    except ValueError:
        raise ValueError(f"rollout_is_threshold is {threshold!r}; {expected}") from None
    if not all(number > 0 for number in numbers) or numbers[0] > numbers[-1]:
        raise ValueError(f"rollout_is_threshold is {threshold!r}; {expected}, lower <= upper")
    return Bounds(numbers[-1], numbers[0] if len(numbers) == 2 else None)


class Criterion(NamedTuple):
    """What a statistic, in nats, must not exceed; k1 has a lower bound too."""

    level: str  # token, seq_sum, seq_mean, seq_max
    estimator: str  # k1, k2, k3
    upper: float
    lower: float | None = None

    @property
    def option(self) -> str:
        return f"{self.level}_{self.estimator}"


def parse_criteria(options: str, threshold: float | str | None) -> tuple[Criterion, ...]:
    """options: comma separated, repeated ones dropped; threshold: one for all, or as many as options.

    A k1 threshold bounds a ratio: "lower_upper", or u for "1/u_u", kept as logarithms; those of k2 and k3 are upper
    bounds. Quirk of verl: k1 is -log_ratio, so that the ratio bounded is rollout / training, not its inverse.
    """
    names = list(dict.fromkeys(name.strip() for name in options.split(",") if name.strip()))
    unknown = [name for name in names if name not in OPTIONS]
    if unknown or not names:
        raise ValueError(f"rollout_rs is {options!r}; expected, comma separated, some of {', '.join(OPTIONS)}")
    specs = [] if threshold is None else [part.strip() for part in str(threshold).split(",") if part.strip()]
    if len(specs) not in (1, len(names)):
        found = f"rollout_rs_threshold is {threshold!r}"
        raise ValueError(f"{found}; expected one for all, or {len(names)}, comma separated, for {', '.join(names)}")
    return tuple(map(_criterion, names, specs * len(names) if len(specs) == 1 else specs))


def _criterion(option: str, spec: str) -> Criterion:
    level, estimator = option.rsplit("_", 1)
    parts = spec.split("_", 1)
    try:
        numbers = [float(part) for part in parts]
    except ValueError:
        numbers = []
    positive = bool(numbers) and all(number > 0 for number in numbers)
    if estimator == "k1" and positive:
        lower, upper = numbers if len(numbers) == 2 else (1 / numbers[0], numbers[0])
        if lower <= upper:
            return Criterion(level, estimator, math.log(upper), math.log(lower))
    elif positive and len(numbers) == 1:
        return Criterion(level, estimator, numbers[0])
    expected = '"lower_upper" or an upper bound of 1 or more' if estimator == "k1" else "one positive number"
    raise ValueError(f"rollout_rs_threshold for {option} is {spec!r}; expected {expected}")


@dataclass(frozen=True)
class RolloutCorrection:
    """`algorithm.rollout_correction`, with the names and defaults of verl's YAML (its dataclass says sequence).

    rollout_is: importance weights per `token` or `sequence`; None: none.
    rollout_is_threshold: an upper bound truncates weights (TIS); "lower_upper" zeroes those outside (IcePop).
    rollout_is_batch_normalize: divide the weights by their mean over the batch.
    rollout_rs: rejection options, comma separated; all must pass. See `rejection`.
    rollout_rs_threshold: one for all options, or one for each, comma separated.
    bypass_mode: old log-probs are the rollout's, and loss_type (ppo_clip or reinforce) is the loss.
    """

    rollout_is: str | None = None
    rollout_is_threshold: float | str = 2.0
    rollout_is_batch_normalize: bool = False
    rollout_rs: str | None = None
    rollout_rs_threshold: float | str | None = None
    bypass_mode: bool = False
    loss_type: str = "ppo_clip"

    def __post_init__(self) -> None:
        if self.rollout_is not in (None, *LEVELS):
            raise ValueError(f"rollout_is is {self.rollout_is!r}; expected null, {' or '.join(LEVELS)}")
        if self.loss_type not in LOSS_TYPES:
            raise ValueError(f"loss_type is {self.loss_type!r}; expected {' or '.join(LOSS_TYPES)}")
        if self.rollout_is is not None:
            parse_bounds(self.rollout_is_threshold)
        if self.rollout_rs is not None:
            parse_criteria(self.rollout_rs, self.rollout_rs_threshold)

    @property
    def bounds(self) -> Bounds:
        return parse_bounds(self.rollout_is_threshold)

    @property
    def criteria(self) -> tuple[Criterion, ...]:
        return () if self.rollout_rs is None else parse_criteria(self.rollout_rs, self.rollout_rs_threshold)
