"""Candidates: partitions, pools, and layouts that the config's rules allow."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcrl.config.loader import load_config
from hpcrl.forecast.memory.memory import TrainingPlan, with_keys
from hpcrl.forecast.time.space import Knobs, Space, compositions, partitions

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(("members", "number", "count"), [(3, 1, 1), (3, 2, 3), (4, 2, 7), (4, 3, 6), (5, 3, 25)])
def test_partitions_are_as_many_as_stirling_numbers(members: int, number: int, count: int) -> None:
    names = tuple("abcde"[:members])
    found = list(partitions(names, number))
    assert len(found) == len(set(found)) == count
    assert all(sorted(name for each in sets for name in each) == list(names) for sets in found)


def test_compositions_add_up() -> None:
    found = list(compositions(16, 3, 2))
    assert len(set(found)) == len(found) == 21
    assert all(sum(parts) == 16 and all(part > 0 and part % 2 == 0 for part in parts) for parts in found)


def test_layouts_of_a_dense_model() -> None:
    """Llama 3.1 8B on 16 ranks: 8 query groups, 32 layers, tensor parallelism inside a node."""
    space = Space(load_config(ROOT / "configs" / "grpo_8b.yaml"), 2, Knobs(axes=("tp", "pp")))
    found = {tuple(keys.values())[:2] for keys in space.grids("actor", 0, 16)}
    assert found == {(tp, pp) for tp in (1, 2, 4, 8) for pp in (1, 2, 4, 8, 16) if 16 % (tp * pp) == 0}
    assert [tuple(keys.values())[0] for keys in space.grids("rollout", 0, 16)] == [1, 2, 4, 8]


@pytest.mark.parametrize("mode", ["sync", "one_step_off", "bounded_staleness"])
def test_placements_are_accepted(mode: str) -> None:
    """Of each mode, with every model whole on each rank; rank 0 is in no pool of an asynchronous job."""
    config = load_config(ROOT / "configs" / "grpo_8b.yaml")
    space = Space(config, 2, Knobs(modes=(mode,)))  # type: ignore[arg-type]
    placements = list(space.placements())
    assert len(set(placements)) == len(placements) >= 3
    whole = {f"placement.{role}.tp": 1 for role in space.specs}
    for placement in placements:
        keys = {**space.size, **whole, **space.of_placement(placement)}
        roles = TrainingPlan(with_keys(config, keys)).derived.roles
        assert all((roles[role].ranks[0], roles[role].size) == placement.of(role) for role in space.specs)
        assert mode == "sync" or all(0 not in role.ranks for role in roles.values())
