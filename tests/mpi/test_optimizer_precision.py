"""Training in bf16 keeps the weights that it updates in fp32, and moments in the dtype that is asked for."""

from __future__ import annotations

import sys
import types

import pytest
import torch
from megatron.core.optimizer import distrib_optimizer

from hpcrl.config.schema import OptimConfig
from hpcrl.engine.checkpoint.sharded_load import load_sharded
from hpcrl.engine.engine import TrainEngine
from tests.mpi.layouts import SHAPE, make_batch, part_of, policy_loss, role_groups, save_sharded

ADAM = OptimConfig(lr=1e-5)
SGD = OptimConfig(optimizer="sgd", lr=1e-5)
COMPACT = OptimConfig(lr=1e-2, betas=[0.9, 0.95], exp_avg_dtype="bfloat16", exp_avg_sq_dtype="bfloat16")


@pytest.mark.world(2)
@pytest.mark.parametrize("optim", [ADAM, SGD], ids=["adam", "sgd"])
def test_updates_below_the_resolution_of_bf16_add_up_and_are_saved(world, world_tmp_path, optim):
    groups = role_groups(world.rank, world.size)["dp2"]
    mine = part_of(make_batch(), groups)

    def make(seed: int) -> TrainEngine:
        return TrainEngine(SHAPE, groups, optim=optim, dtype=torch.bfloat16, total_steps=9, seed=seed)

    def weights(engine: TrainEngine) -> tuple[torch.Tensor, torch.Tensor]:
        """This rank's part, in bf16 and in fp32."""
        half, main = engine.optimizer._get_model_and_main_params_data_float16()
        return tuple(torch.cat([tensor.flatten() for tensor in tensors]) for tensors in (half, main))

    def step(engine: TrainEngine) -> None:
        engine.train(mine, max_tokens=64, loss=policy_loss, entropy=True)

    engine = make(3)
    half, main = weights(engine)
    assert half.dtype == torch.bfloat16 and main.dtype == torch.float32 and torch.equal(half.float(), main)
    step(engine)
    then_half, then_main = weights(engine)
    assert (then_main != main).float().mean() > 0.9, "nearly all main weights have moved"
    assert (then_half == half).float().mean() > 0.9, "by less than the weights that run can show"
    assert torch.equal(then_main.bfloat16(), then_half)

    save_sharded(engine, world_tmp_path / "actor", groups)
    again = make(4)
    load_sharded(again, world_tmp_path / "actor")
    assert torch.equal(weights(again)[1], then_main)
    for _ in range(2):
        step(engine), step(again)
    for uninterrupted, resumed in zip(weights(engine), weights(again), strict=True):
        assert torch.equal(uninterrupted, resumed)


@pytest.mark.world(1)
@pytest.mark.parametrize("fused", [False, True], ids=["torch", "transformer_engine"])
@pytest.mark.parametrize("optim", [COMPACT, ADAM], ids=["bf16", "fp32"])
def test_moments_are_restored(world, world_tmp_path, monkeypatch, optim, fused):
    """Also where megatron, since Transformer Engine is there, looks for an Adam's counter in another place. Its
    FusedAdam is not used."""
    optimizers = types.ModuleType("transformer_engine.pytorch.optimizers")
    optimizers.FusedAdam = None
    for name in ("transformer_engine", "transformer_engine.pytorch") if fused else ():
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    if fused:
        monkeypatch.setitem(sys.modules, optimizers.__name__, optimizers)
    dtypes = {name: getattr(torch, dtype) for name, dtype in optim.chosen().state(is_matrix=True).items()}
    monkeypatch.setattr(distrib_optimizer, "HAVE_APEX_OR_TE", fused)
    monkeypatch.setattr(distrib_optimizer, "USING_TE_OPTIMIZER", fused)
    groups, batch = role_groups(world.rank, world.size)["single"], make_batch()
    engine, again = (TrainEngine(SHAPE, groups, optim=optim, total_steps=9, seed=seed) for seed in (3, 4))

    def state(engine: TrainEngine) -> list[dict[str, torch.Tensor]]:
        return list(engine.optimizer.optimizer.state.values())

    for _ in range(2):
        engine.train(batch, max_tokens=64, loss=policy_loss, entropy=True)
    save_sharded(engine, world_tmp_path / "actor", groups)
    load_sharded(again, world_tmp_path / "actor")
    for step in (2, 3):
        for mine, restored in zip(state(engine), state(again), strict=True):
            assert mine["step"] == restored["step"] == step
            for name in ("exp_avg", "exp_avg_sq"):
                assert mine[name].dtype == restored[name].dtype == dtypes[name]
                assert torch.equal(mine[name], restored[name])
        for each in (engine, again):
            each.train(batch, max_tokens=64, loss=policy_loss, entropy=True)
    assert all(torch.equal(weight, again.named_shards()[name]) for name, weight in engine.named_shards().items())
