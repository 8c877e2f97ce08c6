"""Correction of the mismatch between the policy that wrote the tokens and the one that is trained.

Modes. Decoupled: three policies, rollout, old (recomputed by the training engine) and current; weights and rejection
come from old against rollout, once per step. Bypass: old is rollout, and the loss itself calls `correct_rollout` with
the current policy's log-probs. "When Speed Kills Stability", Liu et al. 2025, richardli.xyz/rl-collapse.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from hpcrl.algorithms.aggregation import Reduce, one_replica
from hpcrl.algorithms.metrics import Metric
from hpcrl.algorithms.off_policy import importance_weights, off_policy_metrics, reject
from hpcrl.algorithms.parameters import Registry, param

if TYPE_CHECKING:
    from torch import Tensor

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
    """The bounds of a statistic, in nats; only k1 has a lower one."""

    level: str  # token, seq_sum, seq_mean, seq_max
    estimator: str  # k1, k2, k3
    upper: float
    lower: float | None = None

    @property
    def option(self) -> str:
        return f"{self.level}_{self.estimator}"


def parse_criteria(options: str, threshold: float | str | None) -> tuple[Criterion, ...]:
    """A k1 threshold bounds a ratio: "lower_upper", or u for "1/u_u", kept as logarithms; those of k2 and k3 are upper
    bounds. Quirk of verl: k1 is -log_ratio, so that the ratio bounded is rollout / training, not its inverse.

    Args:
        options: names of criteria, comma separated, repeated ones dropped.
        threshold: one for all, or as many as options.
    """
    names = list(dict.fromkeys(name.strip() for name in options.split(",") if name.strip()))
    unknown = [name for name in names if name not in OPTIONS]
    if unknown or not names:
        raise ValueError(f"rollout_rs is {options!r}; expected, comma separated, some of {', '.join(OPTIONS)}")
    specs = [] if threshold is None else [part.strip() for part in str(threshold).split(",") if part.strip()]
    if len(specs) not in (1, len(names)):
        given = f"rollout_rs_threshold is {threshold!r}"
        raise ValueError(f"{given}; expected one for all, or {len(names)}, comma separated, for {', '.join(names)}")
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
    """`algorithm.rollout_correction`, with the names and defaults of verl's YAML (its dataclass says sequence)."""

    rollout_is: Literal["token", "sequence"] | None = param(None, help="level of the importance weights; null: none")
    rollout_is_threshold: float | str = param(2.0, gt=0, help='upper bound of weights; "lo_hi" is IcePop')
    rollout_is_batch_normalize: bool = param(False, help="divide weights by their mean over the batch")
    rollout_rs: str | None = param(None, help="rejection options, comma-separated: token_k1, seq_mean_k3, ...")
    rollout_rs_threshold: float | str | None = param(
        None, gt=0, help='bounds of the options, comma-separated: "0.5_2.0", or one number for all'
    )
    bypass_mode: bool = param(False, help="the rollout's log-probs are the old ones; no forward pass for them")
    loss_type: Literal["ppo_clip", "reinforce"] = param("ppo_clip", help="policy loss of bypass mode")

    def __post_init__(self) -> None:
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


TOKEN_TIS: dict[str, Any] = {"rollout_is": "token", "rollout_is_threshold": 2.0}
SEQ_TIS: dict[str, Any] = {"rollout_is": "sequence", "rollout_is_threshold": 2.0}
TOKEN_ICEPOP: dict[str, Any] = {"rollout_is": "token", "rollout_is_threshold": "0.5_5.0"}
GEO_RS: dict[str, Any] = {"rollout_rs": "seq_mean_k1", "rollout_rs_threshold": "0.999_1.001"}
K3_RS: dict[str, Any] = {"rollout_rs": "seq_mean_k3", "rollout_rs_threshold": 0.01}
SEQ_RS: dict[str, Any] = {"rollout_rs": "seq_sum_k1", "rollout_rs_threshold": "0.5_2.0"}
PPO_CLIP: dict[str, Any] = {"bypass_mode": True, "loss_type": "ppo_clip"}
REINFORCE: dict[str, Any] = {"bypass_mode": True, "loss_type": "reinforce"}

PRESETS: Registry[RolloutCorrection] = Registry("rollout correction preset")
for _name, _parts in {
    "disabled": (),
    "decoupled_token_is": (TOKEN_TIS,),
    "decoupled_seq_is": (SEQ_TIS,),
    "decoupled_token_icepop": (TOKEN_ICEPOP,),
    "decoupled_seq_is_rs": (SEQ_TIS, SEQ_RS),
    "decoupled_geo_rs": (GEO_RS,),
    "decoupled_geo_rs_seq_tis": (GEO_RS, SEQ_TIS),
    "decoupled_geo_rs_token_tis": (GEO_RS, TOKEN_TIS),
    "decoupled_k3_rs": (K3_RS,),
    "decoupled_k3_rs_seq_tis": (K3_RS, SEQ_TIS),
    "decoupled_k3_rs_token_tis": (K3_RS, TOKEN_TIS),
    "bypass_ppo_clip": (PPO_CLIP,),
    "bypass_ppo_clip_geo_rs": (PPO_CLIP, GEO_RS),
    "bypass_ppo_clip_k3_rs": (PPO_CLIP, K3_RS),
    "bypass_pg_is": (REINFORCE, SEQ_TIS),
    "bypass_pg_token_icepop": (REINFORCE, TOKEN_ICEPOP),
    "bypass_pg_geo_rs": (REINFORCE, GEO_RS),
    "bypass_pg_geo_rs_seq_tis": (REINFORCE, GEO_RS, SEQ_TIS),
    "bypass_pg_geo_rs_token_tis": (REINFORCE, GEO_RS, TOKEN_TIS),
}.items():
    PRESETS.add(_name, RolloutCorrection(**{key: value for part in _parts for key, value in part.items()}))


def preset(name: str, **overrides: Any) -> RolloutCorrection:
    """The preset with some fields set otherwise, as `rollout_is_threshold=4.0`."""
    known = [field.name for field in fields(RolloutCorrection)]
    unknown = sorted(set(overrides) - set(known))
    if unknown:
        raise ValueError(f"preset {name!r} was given {', '.join(unknown)}; expected fields out of {', '.join(known)}")
    return replace(PRESETS.get(name), **overrides)


class Corrected(NamedTuple):
    """weights: (B, T) in the log-probs' dtype, 0 where the mask was 0, or None; response_mask: (B, T) without what was
    rejected, in its own dtype; metrics: `rollout_corr/*`, mergeable over replicas and micro-batches."""

    weights: Tensor | None
    response_mask: Tensor
    metrics: dict[str, Metric]


def correct_rollout(
    old_log_probs: Tensor,
    rollout_log_probs: Tensor,
    response_mask: Tensor,
    cfg: RolloutCorrection,
    reduce: Reduce = one_replica,
) -> Corrected:
    """Weights, mask and metrics from log_ratio = old_log_probs - rollout_log_probs; all (B, T), log-probs in nats.

    In bypass mode `old_log_probs` are the current policy's. Nothing returned carries gradients. Without rollout_is and
    rollout_rs only the metrics are new. Weights and rejection both read the given mask: a rejected token keeps its
    weight and counts in every metric. `reduce` is called once where rollout_is_batch_normalize is set (by replicas
    without samples too), else never. verl raises where no token of the batch counts; here metrics are NaN.
    """
    shapes = {tuple(x.shape) for x in (old_log_probs, rollout_log_probs, response_mask)}
    if len(shapes) != 1:
        given = f"{tuple(old_log_probs.shape)}, {tuple(rollout_log_probs.shape)} and {tuple(response_mask.shape)}"
        raise ValueError(f"old, rollout log-probs and mask are {given}; expected one shape (B, T); pad them alike")
    unused = response_mask == 0
    log_probs = old_log_probs.detach().masked_fill(unused, 0.0)
    rollout = rollout_log_probs.detach().masked_fill(unused, 0.0)
    log_ratio = log_probs - rollout
    metrics = off_policy_metrics(log_probs, rollout, response_mask)
    weights, mask = None, response_mask
    if cfg.rollout_is is not None:
        weights, of_weights = importance_weights(
            log_ratio, response_mask, cfg.rollout_is, cfg.bounds, cfg.rollout_is_batch_normalize, reduce
        )
        metrics |= of_weights
    if cfg.rollout_rs is not None:
        mask, of_rejection = reject(log_ratio, response_mask, cfg.criteria)
        metrics |= of_rejection
    return Corrected(weights, mask, metrics)
