"""Communication between replicas that megatron starts during computation: the same bits as after it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hpcrl.config.schema import DdpConfig, OptimConfig
from hpcrl.engine.data_parallel import Overlap
from hpcrl.engine.engine import TrainEngine
from hpcrl.model.shape import Lora, ModelShape
from hpcrl.runtime.exits import InputError
from hpcrl.runtime.groups import RoleGroups
from tests.mpi.lab import metrics, on
from tests.mpi.layouts import MIXTURE, ROUTER_LOSSES, SGD, SHAPE, TIED, make_batch, part_of, policy_loss

ADAM = OptimConfig(lr=1e-2)
NOT_CLIPPED = OptimConfig(lr=1e-2, clip_grad=0.0)
BOTH = {"overlap_grad_reduce": True, "overlap_param_gather": True}
ONE_AT_A_TIME = {"overlap_grad_reduce": True, "bucket_size": 1}  # one parameter per bucket
LORA = Lora(4, 8.0, ("q_proj", "up_proj"))


def trained(groups: RoleGroups, ddp: DdpConfig | None, shape: ModelShape, **options: Any) -> tuple[list, dict]:
    """Metrics of two updates of two mini-batches each, with log-probs between them, and the weights after them."""
    engine = TrainEngine(shape, groups, seed=3, ddp=ddp, **ROUTER_LOSSES, **options)
    mine, found = part_of(make_batch(), groups), []
    for _ in range(2):
        with engine.update():
            for mini in (mine, part_of(make_batch(seed=1), groups)):
                found.append(engine.train(mini, max_tokens=48, loss=policy_loss, temperature=0.7, entropy=True))
        with engine.offload.on_device("parameters"):
            weights = {name: weight.clone() for name, weight in engine.named_shards().items()}
        found.append(engine.log_probs(mine, max_tokens=48, temperature=0.7))
    return found, weights


def assert_same_bits(
    groups: RoleGroups, ddp: dict, shape: ModelShape, *, same_norms: bool = True, **options: Any
) -> None:
    expected, expected_weights = trained(groups, None, shape, **options)
    found, weights = trained(groups, DdpConfig(**ddp), shape, **options)
    assert all(torch.equal(weights[name], weight) for name, weight in expected_weights.items())
    for here, there in zip(found, expected, strict=True):
        for name, value in there.items():
            if name == "log_probs":
                assert (here[name].values == value.values).all()
            else:  # several buckets divide the gradient over the ranks, which add up its squares, in other parts
                assert here[name] == (value if same_norms else pytest.approx(value, rel=1e-5)), name


CASES = {
    "dp2": ("dp2", SHAPE, {"optim": ADAM}),
    "cp2": ("cp2", SHAPE, {"optim": ADAM}),
    "dp2-tied-bf16": ("dp2", TIED, {"optim": ADAM, "dtype": torch.bfloat16, "gradient_accumulation_fusion": True}),
    "dp2-offload": ("dp2", SHAPE, {"optim": ADAM, "offload": ("parameters", "gradients", "optimizer")}),
    "ep2": ("ep2", MIXTURE, {"optim": ADAM}),
    "tp2dp2": ("tp2dp2", TIED, {"optim": ADAM}),
    "pp2dp2": ("pp2dp2", TIED, {"optim": ADAM}),
    "pp2cp2vpp2": ("pp2cp2vpp2", SHAPE, {"optim": ADAM}),
    "ep2-of-four": ("ep2", MIXTURE, {"optim": ADAM}),
}
SIZES = {"tp2dp2": 4, "pp2dp2": 4, "pp2cp2vpp2": 4, "ep2-of-four": 4}


@pytest.mark.parametrize(
    ("layout", "shape", "options"),
    [pytest.param(*case, id=name, marks=pytest.mark.world(SIZES.get(name, 2))) for name, case in CASES.items()],
)
def test_overlap_changes_no_bit(groups, layout, shape, options):
    assert_same_bits(groups[layout], BOTH, shape, **options)


@pytest.mark.world(2)
def test_buckets_of_one_parameter_change_no_weight(groups):
    gather = {"overlap_param_gather": True}
    assert_same_bits(groups["dp2"], ONE_AT_A_TIME | gather, SHAPE, same_norms=False, optim=NOT_CLIPPED)
    assert_same_bits(groups["dp2"], ONE_AT_A_TIME, SHAPE, same_norms=False, optim=SGD)
    assert_same_bits(groups["dp2"], ONE_AT_A_TIME, SHAPE, same_norms=False, optim=NOT_CLIPPED, lora=LORA)


@pytest.mark.ci_world(2)
def test_a_job_with_overlap_is_the_job_without(lab):
    """Several mini-batches per step, after which the rollout reads the actor's weights."""
    sections = {"algorithm": {"adv_estimator": "grpo", "use_kl_in_reward": False}, "rollout": {"n": 2}}
    expected = metrics(lab.run("after_computation", on(2), **sections))
    found = metrics(lab.run("during_computation", on(2), model={"ddp": BOTH}, **sections))
    assert found == expected
    assert len(found) == 2 and found[2]["actor/grad_norm"] > 0


def test_what_cannot_overlap_is_an_error(groups):
    alone = groups["alone"]
    for sharded, has_adapters in ((False, False), (True, True)):
        with pytest.raises(InputError, match="model.ddp.overlap_param_gather=true, but .*; set it to null"):
            Overlap.of(DdpConfig(**BOTH), SHAPE, alone, sharded=sharded, has_adapters=has_adapters)
    assert Overlap.of(DdpConfig(), SHAPE, alone, sharded=True, has_adapters=False) == Overlap()
