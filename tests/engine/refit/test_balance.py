"""Loads of senders against the exact optimum by maximum flow."""

from __future__ import annotations

from collections import defaultdict

from hypothesis import given, settings
from hypothesis import strategies as st

from hpcrl.engine.refit.routes import Demand, balanced
from tests.engine.refit.flow import least_largest_load

demands = st.lists(
    st.builds(
        Demand,
        st.lists(st.integers(0, 15), min_size=1, max_size=6, unique=True),
        st.integers(1, 10**9),
    ),
    min_size=1,
    max_size=24,
)


@settings(deadline=None, max_examples=300)
@given(demands=demands)
def test_the_largest_load_is_the_least_possible(demands: list[Demand]) -> None:
    shares = balanced(demands)
    load: dict[int, int] = defaultdict(int)
    merged: dict[frozenset[int], int] = defaultdict(int)
    for demand, its in zip(demands, shares, strict=True):
        assert sum(its) == demand.nbytes
        assert min(its) >= 0
        merged[frozenset(demand.senders)] += demand.nbytes
        for sender, share in zip(demand.senders, its, strict=True):
            load[sender] += share
    assert max(load.values()) <= 1.02 * least_largest_load(merged) + len(demands)


def test_smaller_loads_are_even_too() -> None:
    """Rank 0 has most to send whatever happens; that is no reason to burden one of the others."""
    assert balanced([Demand([0], 100), Demand([1, 2, 3, 4], 40)]) == [[100], [10, 10, 10, 10]]


def test_loads_even_out_along_a_chain() -> None:
    """Sixteen ranks, each demand can go to either of two neighbours: what burdens one end must travel to the other."""
    shares = balanced([Demand([0], 16_000_000), *(Demand([rank, rank + 1], 1_000_000) for rank in range(15))])
    assert shares[1] == [0, 1_000_000]
    assert all(right >= 0.9 * 1_000_000 for _, right in shares[1:])
