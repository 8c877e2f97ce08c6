"""Which nodes and links are named as slow or different."""

from __future__ import annotations

from itertools import combinations

import pytest

from hpcrl.machine.check_job import deviants, late_links, rounds, slow_nodes, slow_pairs


@pytest.mark.parametrize("count", [*range(1, 10), 32, 33])
def test_every_pair_meets_once_and_nobody_twice_in_a_round(count: int) -> None:
    met = rounds(count)
    assert sorted(pair for pairs in met for pair in pairs) == list(combinations(range(count), 2))
    assert all(len({node for pair in pairs for node in pair}) == 2 * len(pairs) for pairs in met)
    assert len(met) <= max(1, count - 1 + count % 2)


def test_a_slow_node_and_a_slow_pair_are_told_apart() -> None:
    fast = dict.fromkeys(combinations(range(5), 2), 10.0)
    assert slow_nodes(fast, 5) == [] and slow_pairs(fast, 5) == []
    bad_node = {pair: 2.0 if 3 in pair else speed for pair, speed in fast.items()}
    assert slow_nodes(bad_node, 5) == [3] and slow_pairs(bad_node, 5) == []
    bad_cable = fast | {(1, 4): 2.0}
    assert slow_nodes(bad_cable, 5) == [] and slow_pairs(bad_cable, 5) == [(1, 4)]
    assert slow_nodes({(0, 1): 5.0}, 2) == [], "of two nodes nobody can say which one is slow"


def test_deviants_are_those_who_differ_from_most() -> None:
    assert deviants(["2.13", "2.13", "2.9", "2.13"]) == ("2.13", [2])
    assert deviants([None, "1"]) == (None, [1])


def test_a_late_link_is_compared_with_its_kind() -> None:
    inside, between = True, False
    assert late_links([1e-6, 20e-6, 1e-6, 21e-6], [inside, between, inside, between]) == []
    assert late_links([1e-6, 20e-6, 1e-6, 9e-6, 1e-6], [inside, between, inside, inside, inside]) == [3]
