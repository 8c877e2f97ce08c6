"""Muon updates every layout as it updates whole matrices on one rank."""

from __future__ import annotations

import pytest
import torch

from hpcrl.config.schema import OptimConfig
from hpcrl.engine.checkpoint.sharded_load import load_sharded
from hpcrl.engine.engine import TrainEngine
from hpcrl.model.shape import ModelShape, projections_in
from tests.mpi.layouts import (
    DEEPSEEK,
    EXPERT_SIZES,
    MIXTURE,
    SHAPE,
    SIZES,
    TIED,
    gradients,
    make_batch,
    part_of,
    policy_loss,
    role_groups,
    save_sharded,
    slice_errors,
)

MUON = OptimConfig(optimizer="muon", lr=1e-3, weight_decay=0.1, clip_grad=0.0)
SHAPES = {"dense": SHAPE, "mixture": MIXTURE, "deepseek": DEEPSEEK, "tied": TIED}
LAYOUTS = [
    pytest.param(name, kind, marks=pytest.mark.world(size), id=f"{kind}-{name}")
    for size in (1, 2, 4)
    for kind in SHAPES
    for name in {**SIZES.get(size, {}), **(EXPERT_SIZES.get(size, {}) if kind in ("mixture", "deepseek") else {})}
    if (size == 2 and kind in ("dense", "mixture")) or name in ("single", "tp2", "pp2dp2", "tp2ep2etp2", "cp2dp2")
]


def step(engine: TrainEngine) -> dict[str, torch.Tensor]:
    """Train one step; return the changes of this rank's weights."""
    before = {name: tensor.clone() for name, tensor in engine.named_shards().items()}
    engine.train(part_of(make_batch(), engine.groups), max_tokens=64, loss=policy_loss, entropy=True)
    return {name: tensor - before[name] for name, tensor in engine.named_shards().items()}


def matrices(engine: TrainEngine, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: each for name, each in tensors.items() if each.dim() == 2 and ".layers." in name}


@pytest.mark.parametrize(("layout", "kind"), LAYOUTS)
def test_a_step_is_that_of_one_rank(world, layout, kind):
    groups = role_groups(world.rank, world.size)
    alone, engine = (TrainEngine(SHAPES[kind], groups[name], optim=MUON, seed=3) for name in ("alone", layout))
    for _ in range(2):
        whole, mine = step(alone), step(engine)
        errors = slice_errors(engine, matrices(engine, mine), matrices(alone, whole))
        print(max(errors.values()))
        assert max(errors.values()) <= 1e-5
