"""Muon updates every layout as it updates whole matrices on one rank."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from hpcrl.config.schema import OptimConfig
from hpcrl.engine.checkpoint.sharded_load import load_sharded
from hpcrl.engine.engine import TrainEngine
from hpcrl.engine.optim import optimizer_parts
from hpcrl.model.shape import Lora
from hpcrl.runtime.exits import InputError
from tests.mpi.layouts import (
    DEEPSEEK,
    DELTA,
    EXPERT_SIZES,
    HYBRID,
    MIXTURE,
    SHAPE,
    SIZES,
    TIED,
    gradients,
    has_layout,
    make_batch,
    part_of,
    policy_loss,
    role_groups,
    save_sharded,
    slice_errors,
)

MUON = OptimConfig(optimizer="muon", lr=1e-3, weight_decay=0.1, clip_grad=0.0)
SHAPES = {"dense": SHAPE, "mixture": MIXTURE, "deepseek": DEEPSEEK, "tied": TIED, "delta": DELTA, "hybrid": HYBRID}
OFTEN = {  # by shape: the layouts of 2 and 4 ranks that CI runs
    "dense": ("tp2", "dp2", "pp2vpp2", "tp2cp2"),
    "mixture": ("cp2", "ep2", "etp2", "tp2ep2etp2"),
    "deepseek": ("tp2ep2",),
    "tied": ("pp2dp2",),
    "delta": ("tp2",),
    "hybrid": ("tp2",),
}


def case(kind: str, size: int, layout: str) -> object:
    marks = [pytest.mark.world(size)] + [pytest.mark.exhaustive] * (layout not in OFTEN[kind])
    return pytest.param(layout, kind, marks=marks, id=f"{kind}-{layout}")


LAYOUTS = [
    case(kind, size, layout)
    for size in (2, 4)
    for kind, shape in SHAPES.items()
    for layout in {**SIZES[size], **(EXPERT_SIZES[size] if shape.routed is not None else {})}
    if has_layout(shape, layout)
]


def step(engine: TrainEngine) -> dict[str, torch.Tensor]:
    """Train one step; return the changes of this rank's weights."""
    before = {name: tensor.clone() for name, tensor in engine.named_shards().items()}
    engine.train(part_of(make_batch(), engine.groups), max_tokens=64, loss=policy_loss, entropy=True)
    return {name: tensor - before[name] for name, tensor in engine.named_shards().items()}


def of_layers(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: each for name, each in tensors.items() if each.dim() == 2 and ".layers." in name}


def update_by_hand(gradient: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Of a projection in the first step, in fp64."""
    x = gradient.double() / gradient.double().norm()
    for _ in range(5):
        product = x @ x.T
        x = 3.4445 * x + (-4.7750 * product + 2.0315 * product @ product) @ x
    return -MUON.lr * (0.2 * max(x.shape) ** 0.5 * x + MUON.weight_decay * weight)


@cache
def steps_of_one_rank(kind: str, rank: int, size: int) -> list[dict[str, torch.Tensor]]:
    engine = TrainEngine(SHAPES[kind], role_groups(rank, size)["alone"], optim=MUON, seed=3)
    return [of_layers(step(engine)) for _ in range(2)]


@pytest.mark.parametrize(("layout", "kind"), LAYOUTS)
def test_a_step_is_that_of_one_rank(world, layout, kind):
    engine = TrainEngine(SHAPES[kind], role_groups(world.rank, world.size)[layout], optim=MUON, seed=3)
    for whole in steps_of_one_rank(kind, world.rank, world.size):
        mine = of_layers(step(engine))
        errors = slice_errors(engine, mine, whole)
        assert errors.keys() == mine.keys() and max(errors.values()) <= 1e-5


@pytest.mark.world(1)
def test_projections_are_updated_as_the_hugging_face_file_has_them(world):
    engine = TrainEngine(SHAPE, role_groups(world.rank, world.size)["single"], optim=MUON, seed=3)
    before = {name: tensor.clone() for name, tensor in engine.named_shards().items()}
    changes = step(engine)
    norm = torch.stack([each.norm() for each in of_layers(changes).values()]).norm()
    rows = torch.arange((8 + 2 * 4) * 8)
    kinds = rows // 8 % 4  # of each group of four heads: two queries, a key, a value
    by_matrix = {
        "linear_qkv": [rows[kinds < 2], rows[kinds == 2], rows[kinds == 3]],
        "linear_fc1": list(torch.arange(2 * 96).chunk(2)),
        "linear_proj": [torch.arange(64)],
        "linear_fc2": [torch.arange(64)],
    }
    for name, gradient in of_layers(gradients(engine)).items():
        for part in by_matrix[name.split(".")[-2]]:
            expected = update_by_hand(gradient[part], before[name][part])
            assert (changes[name][part] - expected).norm() <= 1e-5 * norm, name


@pytest.mark.world(2)
@pytest.mark.parametrize(("kind", "dtype"), [("mixture", torch.float32), ("tied", torch.bfloat16)])
def test_a_run_goes_on_from_a_checkpoint(world, world_tmp_path, kind, dtype):
    """With the same bits in the same layout, and the same momentum in another."""
    groups = role_groups(world.rank, world.size)
    make = lambda name, seed: TrainEngine(SHAPES[kind], groups[name], optim=MUON, dtype=dtype, seed=seed)  # noqa: E731
    engine, again, other, alone = make("tp2", 3), make("tp2", 4), make("pp2", 5), make("alone", 6)
    step(engine)
    save_sharded(engine, world_tmp_path / "actor", groups["tp2"])
    for loaded in (again, other, alone):
        load_sharded(loaded, world_tmp_path / "actor")
    momenta = [
        [state["momentum_buffer"] for state in states(each) if "momentum_buffer" in state] for each in (engine, again)
    ]
    assert len(momenta[0]) and all(map(torch.equal, *momenta))
    for _ in range(2):
        step(engine), step(again)
    assert all(torch.equal(tensor, again.named_shards()[name]) for name, tensor in engine.named_shards().items())
    if dtype is torch.float32:
        whole, mine = of_layers(step(alone)), of_layers(step(other))
        assert max(slice_errors(other, mine, whole).values()) <= 1e-5


def states(engine: TrainEngine) -> list[dict[str, torch.Tensor]]:
    return [state for part in optimizer_parts(engine.optimizer) for state in part.optimizer.state.values()]


@pytest.mark.world(1)
def test_adapters_are_refused_in_one_line(world):
    with pytest.raises(InputError, match="optimizer=muon with adapters .*use optimizer=adam, or lora_rank=0"):
        TrainEngine(SHAPE, role_groups(world.rank, world.size)["single"], optim=MUON, lora=Lora(4, 8.0))
