"""Offloaded parts of a model are gone between its phases, and nothing else changes: not one bit."""

from __future__ import annotations

import json
from functools import partial

import pytest
import torch

from hpcrl.config.roles import HOST_BLOCK
from hpcrl.config.schema import OptimConfig
from hpcrl.engine.checkpoint.sharded_load import load_sharded
from hpcrl.engine.engine import TrainEngine
from hpcrl.engine.offload import storages_of
from hpcrl.engine.optim import optimizer_tensors
from hpcrl.model.shape import ModelShape
from hpcrl.runtime.groups import RoleGroups
from tests.mpi.lab import Lab, metrics, own_layout
from tests.mpi.layouts import DEEPSEEK, MIXTURE, SHAPE, make_batch, part_of, policy_loss, save_sharded

ALL = ("parameters", "gradients", "optimizer")
ADAM = OptimConfig(lr=1e-2, weight_decay=0.1)
COMPACT = OptimConfig(lr=1e-2, betas=[0.9, 0.95], exp_avg_dtype="bfloat16", exp_avg_sq_dtype="bfloat16")
MOMENTUM = OptimConfig(optimizer="sgd", lr=0.1, momentum=0.9)
FP32, BF16 = torch.float32, torch.bfloat16
CASES = {
    f"{layout}-{name}": pytest.param(layout, shape, optim, dtype, marks=pytest.mark.world(size))
    for size, layout, name, shape, optim, dtype in (
        (1, "single", "adam-fp32", SHAPE, ADAM, FP32),
        (1, "single", "adam-bf16", SHAPE, ADAM, BF16),
        (1, "single", "compact-bf16", SHAPE, COMPACT, BF16),
        (1, "single", "sgd-bf16", SHAPE, MOMENTUM, BF16),
        (2, "dp2", "adam-bf16", SHAPE, ADAM, BF16),
        (2, "tp2", "adam-fp32", SHAPE, ADAM, FP32),
        (2, "pp2vpp2", "sgd-fp32", SHAPE, MOMENTUM, FP32),
        (2, "ep2", "deepseek-fp32", DEEPSEEK, ADAM, FP32),
        (4, "pp2dp2", "adam-bf16", SHAPE, ADAM, BF16),
    )
}
SAVED = {1: ("single", SHAPE), 2: ("ep2", MIXTURE), 4: ("pp2dp2", SHAPE)}


def resident_bytes(engine: TrainEngine) -> dict[str, int]:
    """Bytes under the tensors of each part of the model."""
    every = [parameter for chunk in engine.chunks for parameter in chunk.parameters()]
    parameters = storages_of(parameter.data for parameter in every)
    gradients = storages_of(parameter.main_grad for parameter in every if parameter.requires_grad)
    optimizer = storages_of(optimizer_tensors(engine.optimizer), exclude=parameters)
    parts = dict(zip(ALL, (parameters, gradients, optimizer), strict=True))
    return {name: sum(storage.nbytes() for storage in storages) for name, storages in parts.items()}


def host_addresses(engine: TrainEngine) -> list[int]:
    return [block.data_ptr() for part in engine.offload._parts.values() if part.host for block in part.host.blocks]


def state(engine: TrainEngine) -> list[torch.Tensor]:
    """Copies of the weights and of the optimizer's tensors, in order."""
    with engine.offload.on_device("parameters", "optimizer"):
        return [tensor.clone() for tensor in (*engine.named_shards().values(), *optimizer_tensors(engine.optimizer))]


def assert_same(a: list[torch.Tensor], b: list[torch.Tensor]) -> None:
    assert len(a) == len(b) > 0
    assert all(torch.equal(one, other) for one, other in zip(a, b, strict=True))


class Pair:
    """The same model twice, with all of one offloaded."""

    def __init__(self, groups: RoleGroups, shape: ModelShape, optim: OptimConfig, dtype: torch.dtype) -> None:
        self.groups, self.mine = groups, part_of(make_batch(), groups)
        self.make = partial(TrainEngine, shape, groups, optim=optim, dtype=dtype, total_steps=9)
        self.plain, self.away = self.make(seed=3), self.make(seed=3, offload=ALL)

    def step(self, engine: TrainEngine) -> tuple[list[float] | None, dict[str, float]]:
        """Log-probs before a step, and the step's metrics."""
        column = engine.log_probs(self.mine, max_tokens=64, temperature=1.0).get("log_probs")
        metrics = engine.train(self.mine, max_tokens=64, loss=policy_loss, entropy=True)
        return (column.values.tolist() if column else None), metrics


@pytest.mark.parametrize(("layout", "shape", "optim", "dtype"), CASES.values(), ids=CASES)
def test_offloading_changes_nothing(groups, layout, shape, optim, dtype) -> None:
    pair = Pair(groups[layout], shape, optim, dtype)
    assert pair.step(pair.plain) == pair.step(pair.away)
    assert all(resident_bytes(pair.plain).values())
    assert not any(resident_bytes(pair.away).values())
    addresses = host_addresses(pair.away)
    assert pair.step(pair.plain) == pair.step(pair.away)
    assert_same(state(pair.plain), state(pair.away))
    assert not any(resident_bytes(pair.away).values())
    assert host_addresses(pair.away) == addresses


def test_checkpoint_of_what_is_offloaded(groups, world, world_tmp_path) -> None:
    """Saved and loaded, it goes on as a model that never left the device; one that is loaded may be offloaded too."""
    layout, shape = SAVED[world.size]
    pair = Pair(groups[layout], shape, COMPACT, BF16)
    pair.step(pair.plain), pair.step(pair.away)
    with pair.away.offload.on_device("parameters", "optimizer"):
        save_sharded(pair.away, world_tmp_path / "actor", pair.groups)
        assert resident_bytes(pair.away)["gradients"] == 0
    again = pair.make(seed=5, offload=ALL)
    with again.offload.on_device("parameters", "optimizer"):
        load_sharded(again, world_tmp_path / "actor")
    assert pair.step(pair.plain) == pair.step(pair.away) == pair.step(again)
    assert_same(state(pair.plain), state(pair.away))
    assert_same(state(pair.plain), state(again))
    assert not any(resident_bytes(again).values())


@pytest.mark.slow
@pytest.mark.world(2)
def test_a_run_with_everything_offloaded_is_the_run_without(world, lab: Lab) -> None:
    assert_same_run(world.size, lab)


@pytest.mark.slow
@pytest.mark.world(1, 4)
def test_it_is_on_other_numbers_of_ranks(world, lab: Lab) -> None:
    assert_same_run(world.size, lab)


def assert_same_run(size: int, lab: Lab) -> None:
    """Cut in two by a checkpoint, at that. The engine has weights of its own then, as the actor's are away."""
    trained = {"param_offload": True, "grad_offload": True, "optimizer_offload": True}
    sections = {"actor": trained, "critic": trained, "ref": {"param_offload": True}}
    placement = own_layout(size)
    plain = lab.run("on_device", placement)
    lab.run("offloaded", placement, trainer={"total_training_steps": 1, "save_freq": 1, "save_hf": True}, **sections)
    offloaded = lab.run("offloaded", placement, trainer={"save_freq": 1}, **sections)
    assert metrics(offloaded) == metrics(plain)

    lines = [json.loads(line) for line in (offloaded / "metrics.jsonl").read_text().splitlines()]
    last, host = lines[-1], {"param": 2, "optimizer": 2, "ref": 1}
    for phase in ("rollout.generate", "ref.compute_ref_log_prob", "critic.update_critic", "actor.update_actor"):
        assert 0.01 < last[f"memory/{phase}/host_gb"] < 100
    assert last["memory/host_buffers_gb"] >= sum(host.values()) * HOST_BLOCK / 2**30
    assert last["perf/refit/gib_aliased"] == 0 < last["perf/refit/gib_copied"] + last["perf/refit/gib_received"]
