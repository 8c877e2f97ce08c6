"""Metrics merge to what one pass over everything gives."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hpcrl.algorithms.metrics import (
    EffectiveSampleSize,
    ExplainedVariance,
    Max,
    Mean,
    Min,
    NoiseProxy,
    Pearson,
    Spread,
    Std,
    Sum,
    finish,
    finish_over_steps,
    merge,
    to_floats,
)

ZERO = {"sum", "spread", "noise"}  # of nothing; the others are NaN
pairs = st.lists(st.tuples(st.floats(-1e3, 1e3), st.floats(-1e3, 1e3), st.booleans()), max_size=30)


def measured(rows: list[tuple[float, float, bool]]) -> dict:
    x, y, mask = (torch.tensor([row[i] for row in rows], dtype=torch.float64) for i in range(3))
    return {
        "mean": Mean.of(x, mask),
        "max": Max.of(x, mask),
        "min": Min.of(x, mask),
        "sum": Sum((x * mask).sum()),
        "std": Std.of(x, mask),
        "spread": Spread.of(x, mask, ddof=0),
        "ess": EffectiveSampleSize.of(x.abs() + 1, mask),
        "noise": NoiseProxy(Mean.of(x.square(), mask), 2.0),
        "explained": ExplainedVariance.of(x, y, mask),
        "pearson": Pearson.of(x, y, mask),
    }


def close(a: dict[str, float], b: dict[str, float]) -> bool:
    return a.keys() == b.keys() and all(np.isclose(a[k], b[k], rtol=1e-6, atol=1e-7, equal_nan=True) for k in a)


@given(pairs, st.lists(st.integers(0, 30), max_size=5))
def test_any_split_merges_to_the_whole(rows, cuts):
    edges = [0, *sorted(cuts), 30]
    parts = [measured(rows[a:b]) for a, b in zip(edges, edges[1:], strict=False)]
    whole = finish(measured(rows))
    spread = [row[0] for row in rows if row[2]], [row[1] for row in rows if row[2]]
    if min(np.std(values) if values else 0 for values in spread) < 1e-3:
        whole.pop("pearson")  # without variance it is rounding or NaN
        parts = [{key: metric for key, metric in part.items() if key != "pearson"} for part in parts]
    left = merge(parts)
    right = merge([parts[0], merge(parts[1:])])
    on_floats = merge(to_floats(part) for part in parts)
    assert close(finish(left), whole) and close(finish(right), whole) and close(finish(on_floats), whole)


@given(pairs)
def test_against_numpy(rows):
    x, y = (np.array([row[i] for row in rows if row[2]]) for i in range(2))
    found = finish(measured(rows))
    if len(x) < 2:
        assert math.isnan(found["std"]) and math.isnan(found["explained"])
        assert found["spread"] == 0 and found["noise"] == 0
        return
    assert found["max"] == x.max() and found["min"] == x.min()
    assert np.isclose(found["mean"], x.mean()) and np.isclose(found["std"], x.std(ddof=1))
    assert np.isclose(found["spread"], x.std(), rtol=1e-6, atol=1e-9)
    weights = np.abs(x) + 1
    assert np.isclose(found["ess"], weights.sum() ** 2 / (weights**2).sum() / len(x), rtol=1e-6)
    assert np.isclose(found["noise"], max(0, ((x**2).mean() - 2) / (len(x) - 1)))
    assert np.isclose(found["explained"], 1 - (y - x).var(ddof=1) / (y.var(ddof=1) + 1e-5), rtol=1e-6)
    if x.std() > 1e-3 and y.std() > 1e-3:
        assert np.isclose(found["pearson"], np.corrcoef(x, y)[0, 1], atol=1e-6)


def test_std_does_not_cancel_far_from_zero():
    x = 1e8 + torch.tensor([0.0, 1.0, 2.0, 3.0], dtype=torch.float64)
    parts = [{"s": Std.of(x[:1], torch.ones(1))}, {"s": Std.of(x[1:], torch.ones(3))}]
    assert finish(merge(parts))["s"] == pytest.approx(1.2909944)


def test_nothing_is_nan_and_nan_shows():
    nothing = torch.zeros(0)
    assert all(math.isnan(value) for key, value in finish(measured([])).items() if key not in ZERO)
    assert math.isnan(finish(merge([{"m": Max(1.0)}, {"m": Max(math.nan)}, {"m": Max(2.0)}]))["m"])
    assert math.isnan(finish(merge([{"m": Min(math.nan)}, {"m": Min(2.0)}]))["m"])
    assert finish(merge([{"m": Max.of(nothing, nothing)}, {"m": Max(-3.0)}])) == {"m": -3.0}


def test_padding_may_hold_anything():
    x, mask = torch.tensor([1.0, math.nan, 3.0]), torch.tensor([1, 0, 1])
    found = {"mean": Mean.of(x, mask), "std": Std.of(x, mask), "pearson": Pearson.of(x, x, mask)}
    assert finish(found) == pytest.approx({"mean": 2.0, "std": math.sqrt(2), "pearson": 1.0})


def test_keys_of_one_part_only_stay_and_kinds_must_agree():
    assert finish(merge([{"a": Sum(1.0)}, {"b": Mean(3.0, 2.0)}, {"a": Sum(2.0)}])) == {"a": 3.0, "b": 1.5}
    assert merge([]) == {}
    with pytest.raises(ValueError, match="metric 'a' is Sum and Max"):
        merge([{"a": Sum(1.0)}, {"a": Max(1.0)}])


def test_metrics_hold_no_graph():
    x = torch.ones(2, requires_grad=True)
    for metric in measured_with_grad(x).values():
        assert all(not part.requires_grad for part in metric)


def measured_with_grad(x: torch.Tensor) -> dict:
    mask = torch.ones(2)
    return {"mean": Mean.of(x, mask), "max": Max.of(x, mask), "std": Std.of(x, mask)}


def test_over_steps_keys_may_be_missing_and_nan_is_no_number() -> None:
    steps = [{"a": Max(math.nan)}, {"a": Max(2.0), "b": Mean(4.0, 2.0)}, {"a": Max(1.0), "b": Mean(6.0, 1.0)}, {}]
    assert finish_over_steps(steps) == {"a": 2.0, "b": 4.0}
    assert finish_over_steps(reversed(steps)) == {"a": 2.0, "b": 4.0}
    assert math.isnan(finish_over_steps([{"c": Mean(0.0, 0.0)}])["c"])
