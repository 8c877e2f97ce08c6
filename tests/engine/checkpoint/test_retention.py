"""Which checkpoints stay."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hpcrl.engine.checkpoint.store import Retention

NAN = float("nan")
SCORES = {10: 0.5, 20: 0.9, 30: None, 40: 0.7, 50: 0.9, 60: NAN, 70: 0.1}


def kept(**rules) -> list[int]:
    return sorted(SCORES.keys() - Retention(**rules).steps_to_drop(SCORES))


def test_what_stays() -> None:
    assert kept() == list(SCORES)
    assert kept(last=2) == [60, 70]
    assert kept(last=1, every=20) == [20, 40, 60, 70]
    assert kept(last=1, best=1, metric="score") == [50, 70]  # the newer of two equal ones
    assert kept(last=1, best=3, metric="score") == [20, 40, 50, 70]
    assert kept(last=1, best=2, metric="loss", larger_is_better=False) == [10, 70]
    assert kept(last=1, every=30, best=2, metric="score") == [20, 30, 50, 60, 70]


@given(
    st.dictionaries(st.integers(1, 99), st.none() | st.floats(), min_size=1),
    st.integers(1, 5),
    st.none() | st.integers(1, 9),
    st.none() | st.integers(1, 5),
    st.booleans(),
)
def test_the_newest_stay_whatever_the_metric_says(values, last, every, best, larger) -> None:
    rules = Retention(last, every, best, "score" if best else None, larger)
    left = values.keys() - rules.steps_to_drop(values)
    assert set(sorted(values)[-last:]) <= left
    assert {step for step in values if every and step % every == 0} <= left
    # Dropping is done once: what is left now stays as long as nothing new comes.
    assert rules.steps_to_drop({step: values[step] for step in left}) == set()
