"""Activations that are computed twice: the same gradients, and fewer bytes that wait for the backward pass."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hpcrl.config.schema import RecomputeConfig
from hpcrl.engine.engine import TrainEngine
from hpcrl.model.shape import ModelShape
from hpcrl.runtime.exits import InputError
from hpcrl.runtime.groups import RoleGroups
from tests.mpi.layouts import (
    DELTA,
    GPT_OSS,
    HYBRID,
    MIXTURE,
    ROUTER_LOSSES,
    SGD,
    SHAPE,
    gradients,
    make_batch,
    part_of,
    policy_loss,
    role_groups,
)

WAYS: dict[str, dict[str, Any]] = {
    "full": {"granularity": "full"},
    "first_layer": {"granularity": "full", "method": "block", "num_layers": 1},
    "attention": {"granularity": "selective"},
    "mlp": {"granularity": "selective", "modules": ["mlp"]},
}
MIXTURE_WAYS = {"full": WAYS["full"], "moe": {"granularity": "selective", "modules": ["core_attn", "moe"]}}
LAYOUTS = {1: ("single",), 2: ("tp2", "cp2"), 4: ("pp2vpp2", "tp2pp2", "tp2cp2")}
PLACES = [pytest.param(name, marks=pytest.mark.world(size)) for size, names in LAYOUTS.items() for name in names]


def trained(
    groups: RoleGroups, recompute: RecomputeConfig, shape: ModelShape = SHAPE, max_tokens: int = 1000
) -> tuple[dict[str, torch.Tensor], int, dict[str, Any]]:
    """Gradients, bytes that autograd keeps of the forward pass of one micro-batch, weights aside, and metrics."""
    engine = TrainEngine(shape, groups, optim=SGD, seed=3, recompute=recompute, **ROUTER_LOSSES)
    kept: dict[int, int] = {}
    is_backward: list[bool] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if not is_backward and not (tensor.is_leaf and tensor.requires_grad):
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    def give_back(tensor: torch.Tensor) -> torch.Tensor:
        is_backward.append(True)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, give_back):
        metrics = engine.train(part_of(make_batch(), groups), max_tokens=max_tokens, loss=policy_loss, entropy=True)
    return gradients(engine), sum(kept.values()), metrics


@pytest.mark.parametrize("layout", PLACES)
def test_gradients_are_the_same(world, layout: str) -> None:
    assert_same(role_groups(world.rank, world.size)[layout], SHAPE)


@pytest.mark.world(1)
@pytest.mark.parametrize("shape", [DELTA, HYBRID], ids=["delta", "hybrid"])
def test_gradients_of_recurrent_layers_are_the_same(world, shape: ModelShape) -> None:
    """These layers have parts of their own that are computed again, inside those of `full`."""
    assert_same(role_groups(world.rank, world.size)["single"], shape)


def assert_same(groups: RoleGroups, shape: ModelShape) -> None:
    expected, *_ = trained(groups, RecomputeConfig(), shape)
    for way, options in WAYS.items():
        found, *_ = trained(groups, RecomputeConfig(**options), shape)
        assert all(torch.equal(found[name], gradient) for name, gradient in expected.items()), way


@pytest.mark.world(2)
@pytest.mark.parametrize(
    ("layout", "shape"),
    [
        ("tp2ep2", MIXTURE),
        ("pp2vpp2", MIXTURE),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in (("cp2", MIXTURE), ("etp2", GPT_OSS))),
    ],
    ids=["tp2ep2", "pp2vpp2", "cp2", "gpt-oss-etp2"],
)
def test_each_token_of_a_mixture_is_balanced_once(world, layout: str, shape: ModelShape) -> None:
    """A layer that is computed again, after the forward pass of other micro-batches, sees its own sequences."""
    groups = role_groups(world.rank, world.size)[layout]
    expected, _, metrics = trained(groups, RecomputeConfig(), shape, 64)
    assert metrics["moe_aux_loss"] > 1.0
    for way, options in MIXTURE_WAYS.items():
        found, _, again = trained(groups, RecomputeConfig(**options), shape, 64)
        assert all(torch.equal(found[name], gradient) for name, gradient in expected.items()), way
        assert again == metrics, way


@pytest.mark.world(1)
def test_units_of_layers_that_do_not_divide_the_stage_are_refused(world) -> None:
    with pytest.raises(InputError, match=r"model.recompute.num_layers=2 does not divide the 5 layers"):
        trained(role_groups(0, 1)["single"], RecomputeConfig(granularity="full", num_layers=2))


@pytest.mark.world(1)
def test_fewer_bytes_wait(world) -> None:
    groups = role_groups(0, 1)["single"]
    kept = {way: trained(groups, RecomputeConfig(**options))[1] for way, options in {"none": {}, **WAYS}.items()}
    assert kept["full"] < 0.5 * kept["none"]
    assert kept["full"] < kept["first_layer"] < kept["none"]
    assert max(kept["attention"], kept["mlp"]) < kept["none"]
