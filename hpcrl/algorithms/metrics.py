"""Metrics that can be merged over micro-batches, replicas and steps, in any grouping."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Number: TypeAlias = "float | Tensor"  # a 0-d tensor stays on its device until `to_floats`


class Mean(NamedTuple):
    """total / weight; NaN without weight."""

    total: Number
    weight: Number

    @classmethod
    def of(cls, x: Tensor, mask: Tensor) -> Mean:
        """Mean of x where mask (same shape) is not 0, each entry weighing its mask."""
        x, mask = _fp64(x, mask)
        return cls((x * mask).sum(), mask.sum())

    def merge(self, other: Mean) -> Mean:
        return Mean(self.total + other.total, self.weight + other.weight)

    def finish(self) -> float:
        return float(self.total) / float(self.weight) if self.weight else math.nan


class MeanDifference(NamedTuple):
    """Mean of one group minus that of another; NaN if one of them is empty."""

    first: Mean
    second: Mean

    def merge(self, other: MeanDifference) -> MeanDifference:
        return MeanDifference(self.first.merge(other.first), self.second.merge(other.second))

    def finish(self) -> float:
        return self.first.finish() - self.second.finish()


class Sum(NamedTuple):
    total: Number

    def merge(self, other: Sum) -> Sum:
        return Sum(self.total + other.total)

    def finish(self) -> float:
        return float(self.total)


class Max(NamedTuple):
    """NaN without values (-inf), and if a value is NaN."""

    value: Number

    @classmethod
    def of(cls, x: Tensor, mask: Tensor) -> Max:
        kept = x.detach().double().masked_fill(mask == 0, -math.inf)
        return cls(kept.max() if kept.numel() else -math.inf)

    def merge(self, other: Max) -> Max:
        a, b = self.value, other.value
        if isinstance(a, float) and isinstance(b, float):
            return Max(a if a >= b or a != a else b)
        return Max(b.clamp(min=a) if isinstance(a, float) else a.clamp(min=b))  # type: ignore[union-attr,arg-type]

    def finish(self) -> float:
        value = float(self.value)
        return math.nan if value == -math.inf else value


class Min(NamedTuple):
    """NaN without values (inf), and if a value is NaN."""

    value: Number

    @classmethod
    def of(cls, x: Tensor, mask: Tensor) -> Min:
        kept = x.detach().double().masked_fill(mask == 0, math.inf)
        return cls(kept.min() if kept.numel() else math.inf)

    def merge(self, other: Min) -> Min:
        a, b = self.value, other.value
        if isinstance(a, float) and isinstance(b, float):
            return Min(a if a <= b or a != a else b)
        return Min(b.clamp(max=a) if isinstance(a, float) else a.clamp(max=b))  # type: ignore[union-attr,arg-type]

    def finish(self) -> float:
        value = float(self.value)
        return math.nan if value == math.inf else value


class Std(NamedTuple):
    """Standard deviation with n - 1, merged as by Chan, Golub and LeVeque (1979): sums of x^2 would cancel."""

    n: Number
    mean: Number
    squares: Number  # sum of squared deviations from the mean

    @classmethod
    def of(cls, x: Tensor, mask: Tensor) -> Std:
        x, mask = _fp64(x, mask.bool())
        n = mask.sum()
        mean = (x * mask).sum() / n.clamp(min=1)
        return cls(n, mean, ((x - mean).square() * mask).sum())

    def merge(self, other: Std) -> Std:
        n = self.n + other.n
        step = (other.mean - self.mean) * other.n / _at_least_one(n)
        shift = (other.mean - self.mean) * step * self.n
        return Std(n, self.mean + step, self.squares + other.squares + shift)

    @property
    def variance(self) -> float:
        return float(self.squares) / (float(self.n) - 1) if self.n > 1 else math.nan

    def finish(self) -> float:
        return math.sqrt(self.variance)


class Spread(NamedTuple):
    """Standard deviation with n - ddof, 0 where n is 0 or 1: rollout_corr/*_std.

    verl takes those with ddof 0 as sqrt(E[x^2] - E[x]^2) in fp32, of which the last half of the digits is noise, with
    means over n + 1e-8 in the mask's dtype.
    """

    of_all: Std
    ddof: Number

    @classmethod
    def of(cls, x: Tensor, mask: Tensor, ddof: int) -> Spread:
        return cls(Std.of(x, mask), ddof)

    def merge(self, other: Spread) -> Spread:
        return Spread(self.of_all.merge(other.of_all), self.ddof)

    def finish(self) -> float:
        n = float(self.of_all.n)
        return math.sqrt(float(self.of_all.squares) / (n - float(self.ddof))) if n > 1 else 0.0


class EffectiveSampleSize(NamedTuple):
    """Of importance weights: 1 / E[(w / (E[w] + 1e-8))^2], a share in (0, 1]; NaN where all are 0."""

    n: Number
    total: Number
    squares: Number

    @classmethod
    def of(cls, weights: Tensor, mask: Tensor) -> EffectiveSampleSize:
        weights, mask = _fp64(weights, mask)
        return cls(mask.sum(), (weights * mask).sum(), (weights.square() * mask).sum())

    def merge(self, other: EffectiveSampleSize) -> EffectiveSampleSize:
        return EffectiveSampleSize(self.n + other.n, self.total + other.total, self.squares + other.squares)

    def finish(self) -> float:
        n, total, squares = map(float, self)
        return (total / n + 1e-8) ** 2 / (squares / n) if squares > 0 else math.nan


class ExplainedVariance(NamedTuple):
    """1 - Var(target - prediction) / (Var(target) + 1e-5), as verl's critic/vf_explained_var."""

    residual: Std
    target: Std

    @classmethod
    def of(cls, prediction: Tensor, target: Tensor, mask: Tensor) -> ExplainedVariance:
        return cls(Std.of(target.double() - prediction.double(), mask), Std.of(target, mask))

    def merge(self, other: ExplainedVariance) -> ExplainedVariance:
        return ExplainedVariance(self.residual.merge(other.residual), self.target.merge(other.target))

    def finish(self) -> float:
        return 1 - self.residual.variance / (self.target.variance + 1e-5)


class Pearson(NamedTuple):
    """Correlation of x and y; NaN where one of them does not vary."""

    x: Std
    y: Std
    products: Number  # sum of products of the deviations of x and y

    @classmethod
    def of(cls, x: Tensor, y: Tensor, mask: Tensor) -> Pearson:
        of_x, of_y = Std.of(x, mask), Std.of(y, mask)
        x, valid = _fp64(x, mask.bool())
        y, _ = _fp64(y, mask.bool())
        return cls(of_x, of_y, ((x - of_x.mean) * (y - of_y.mean) * valid).sum())

    def merge(self, other: Pearson) -> Pearson:
        dx, dy = other.x.mean - self.x.mean, other.y.mean - self.y.mean
        weight = self.x.n * other.x.n / _at_least_one(self.x.n + other.x.n)
        products = self.products + other.products + dx * dy * weight
        return Pearson(self.x.merge(other.x), self.y.merge(other.y), products)

    def finish(self) -> float:
        scale = math.sqrt(float(self.x.squares) * float(self.y.squares))
        return min(max(float(self.products) / scale, -1.0), 1.0) if scale > 0 else math.nan


class NoiseProxy(NamedTuple):
    """max(0, (mean power - signal) / (n - 1)) of n samples, 0 for one; `signal` is the same in all parts."""

    power: Mean
    signal: Number

    def merge(self, other: NoiseProxy) -> NoiseProxy:
        return NoiseProxy(self.power.merge(other.power), self.signal)

    def finish(self) -> float:
        n = float(self.power.weight)
        return max(0.0, (self.power.finish() - float(self.signal)) / (n - 1)) if n > 1 else 0.0


Metric: TypeAlias = (
    Mean
    | MeanDifference
    | Sum
    | Max
    | Min
    | Std
    | Spread
    | EffectiveSampleSize
    | ExplainedVariance
    | Pearson
    | NoiseProxy
)


def merge(parts: Iterable[dict[str, Metric]]) -> dict[str, Metric]:
    """Key by key; a key may be missing in some parts. Associative, and commutative up to rounding."""
    merged: dict[str, Metric] = {}
    for part in parts:
        for key, metric in part.items():
            if key not in merged:
                merged[key] = metric
            elif type(merged[key]) is type(metric):
                merged[key] = merged[key].merge(metric)  # type: ignore[arg-type]
            else:
                kinds = f"{type(merged[key]).__name__} and {type(metric).__name__}"
                raise ValueError(f"metric {key!r} is {kinds} in two parts; expected one kind")
    return merged


def to_floats(metrics: dict[str, Metric]) -> dict[str, Metric]:
    """The same metrics with Python floats inside, to be sent or kept. One copy from each device."""
    tensors: dict[torch.device, dict[int, Tensor]] = {}
    for number in _numbers(metrics.values()):
        if not isinstance(number, int | float):
            tensors.setdefault(number.device, {})[id(number)] = number
    read: dict[int, float] = {}
    for on_device in tensors.values():
        import torch

        stacked = torch.stack([tensor.double().reshape(()) for tensor in on_device.values()])
        read |= zip(on_device, stacked.tolist(), strict=True)
    return {key: _floats(metric, read) for key, metric in metrics.items()}


def finish(metrics: dict[str, Metric]) -> dict[str, float]:
    """One number per key."""
    return {key: metric.finish() for key, metric in to_floats(metrics).items()}


def finish_over_steps(steps: Iterable[dict[str, Metric]]) -> dict[str, float]:
    """One number per key of several optimizer steps: the mean over those that have one, or the largest or smallest.

    A key may be missing in some steps; NaN where no step has a number.
    """
    found: dict[str, list[Metric]] = {}
    for step in steps:
        for key, metric in to_floats(step).items():
            found.setdefault(key, []).append(metric)
    return {key: _over_steps(metrics) for key, metrics in found.items()}


def _over_steps(metrics: list[Metric]) -> float:
    values = [value for value in (metric.finish() for metric in metrics) if value == value]
    if not values:
        return math.nan
    if isinstance(metrics[0], Max):
        return max(values)
    if isinstance(metrics[0], Min):
        return min(values)
    return math.fsum(values) / len(values)


def _numbers(values: Iterable[Any]) -> Iterator[Number]:
    for value in values:
        if isinstance(value, tuple):
            yield from _numbers(value)
        else:
            yield value


def _floats(value: Any, read: dict[int, float]) -> Any:
    """`value` with the numbers of tensors in `read`, by the tensor's id."""
    if isinstance(value, tuple):
        return type(value)(*(_floats(each, read) for each in value))
    return read[id(value)] if id(value) in read else float(value)


def _fp64(x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Both in fp64, x with 0 wherever the mask is 0, so that padding may hold anything."""
    return x.detach().double().masked_fill(mask == 0, 0.0), mask.detach().double()


def _at_least_one(count: Number) -> Number:
    return max(count, 1) if isinstance(count, int | float) else count.clamp(min=1)
