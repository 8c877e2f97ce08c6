from __future__ import annotations

import itertools

from tests.covering import choose, pairs


def test_every_pair_of_values_meets_in_far_fewer_cases() -> None:
    axes = ["ab", "cde", "fgh", "ijklm"]
    cases = list(itertools.product(*axes))
    chosen = choose(cases)
    assert set().union(*map(pairs, chosen)) == set().union(*map(pairs, cases))
    assert 15 <= len(chosen) <= 20 < len(cases) == 90
