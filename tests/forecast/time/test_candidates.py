"""Candidates: placements, and layouts that the config's rules allow."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcrl.config.loader import load_config
from hpcrl.forecast.memory.memory import TrainingPlan, with_keys
from hpcrl.forecast.time.candidates import AXES, Space

ROOT = Path(__file__).parents[3]


def test_layouts_of_a_dense_model() -> None:
    """Llama 3.1 8B on 16 ranks: 8 query groups, 32 layers, tensor parallelism inside a node."""
    space = Space(load_config(ROOT / "configs" / "grpo_8b.yaml"), 2, varied=("tp", "pp"))
    found = {tuple(keys.values())[:2] for keys in space.grids("actor", 16)}
    assert found == {(tp, pp) for tp in (1, 2, 4, 8) for pp in (1, 2, 4, 8, 16) if 16 % (tp * pp) == 0}
    assert [tuple(keys.values())[0] for keys in space.grids("rollout", 16)] == [1, 2, 4, 8]


@pytest.mark.parametrize(("name", "nodes"), [("grpo_8b", 2), ("ppo_70b", 8)])
@pytest.mark.parametrize("mode", ["sync", "one_step_off", "bounded_staleness"])
def test_placements_are_accepted(name: str, nodes: int, mode: str) -> None:
    """Of each mode, with every model whole on each rank; rank 0 is in no pool of an asynchronous job."""
    config = load_config(ROOT / "configs" / f"{name}.yaml")
    space = Space(config, nodes, modes=(mode,))
    placements = list(space.placements())
    assert len(set(placements)) == len(placements) >= 3
    whole = {f"placement.{role}.{axis}": 1 for role in space.specs for axis in AXES}
    for placement in placements:
        roles = TrainingPlan(with_keys(config, space.joined(placement, [whole]))).derived.roles
        found = {role: roles[role].ranks for its, _ in placement.sets for role in its}
        assert found == {role: tuple(ranks) for its, ranks in placement.sets for role in its}
        assert found.keys() == space.specs.keys()
        assert mode == "sync" or all(0 not in ranks for ranks in found.values())
