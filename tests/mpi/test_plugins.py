"""A loss and an estimator with parameters of their own, in one file outside the package."""

from __future__ import annotations

from typing import Any

import pytest

from tests.mpi.lab import Lab, metrics

pytestmark = pytest.mark.ci_world(2)

PLUGIN = """
from dataclasses import dataclass

import torch

from hpcrl.algorithms.advantages import register_adv_est
from hpcrl.algorithms.aggregation import TokenLosses, token_mean
from hpcrl.algorithms.parameters import param
from hpcrl.algorithms.policy_losses import Clip, register_policy_loss


@dataclass(frozen=True)
class Sharp(Clip):
    sharpness: float = param(1.0, gt=0, help="exponent of the ratio")


@register_policy_loss("sharp", params=Sharp)
def sharp(log_prob, old_log_prob, advantages, response_mask, params):
    ratio = ((log_prob - old_log_prob) * params.sharpness).exp()
    clipped = ratio.clamp(1 - params.clip_ratio_low, 1 + params.clip_ratio_high)
    knob = token_mean(torch.full_like(ratio, params.sharpness), response_mask)
    return TokenLosses(torch.maximum(-advantages * ratio, -advantages * clipped), {"actor/sharpness": knob})


@dataclass(frozen=True)
class Scaled:
    scale: float = param(1.0, ge=0, help="advantage of a reward of 1")


@register_adv_est("scaled", params=Scaled)
def scaled(token_level_rewards, response_mask, *, params):
    advantages = token_level_rewards.sum(-1, keepdim=True) * response_mask * params.scale
    return advantages, advantages
"""


OPTIMIZER = """
from dataclasses import dataclass

from hpcrl.api import Optimizer, param, register_optimizer


@dataclass(frozen=True)
class Signs:
    scale: float = param(1.0, gt=0, help="factor of the learning rate")


@register_optimizer("signs", params=Signs)
class SignDescent(Optimizer):
    def state(self, *, is_matrix):
        return {"last": "bfloat16" if is_matrix else "float32"}

    def step(self, groups, state, matrices):
        for group in groups:
            for weight in group["params"]:
                weight -= group["lr"] * self.params.scale * weight.grad.sign()
                state[weight]["last"].copy_(weight.grad)


@register_optimizer("whole_signs", params=Signs)
class WholeSignDescent(SignDescent):
    is_sharded = False
"""


def test_a_job_runs_with_an_optimizer_of_a_plugin(world: Any, lab: Lab) -> None:
    file = lab.folder / "signs.py"
    if world.rank == 0:
        file.write_text(OPTIMIZER)
    world.barrier()
    found = []
    cases = (("signs", 1e-3, 1.0), ("signs", 2e-3, 0.5), ("whole_signs", 1e-3, 1.0), ("signs", 1e-3, 2.0))
    for name, lr, scale in cases:
        optim = {"optimizer": name, "lr": lr, name: {"scale": scale}}
        sft = {"batch_size": 8, "total_training_steps": 2, "eval_freq": -1, "optim": optim}
        run = lab.run_sft(f"{name}_{lr}_{scale}", run={"plugins": [str(file)]}, sft=sft)
        found.append([row["train/loss"] for row in metrics(run).values()])
    assert found[0] == found[1] != found[3]
    assert found[2] == pytest.approx(found[0], rel=1e-6)


def test_a_job_runs_with_the_parameters_of_a_plugin(world: Any, lab: Lab) -> None:
    file = lab.folder / "sharp.py"
    if world.rank == 0:
        file.write_text(PLUGIN)
    world.barrier()
    found = {}
    for sharpness, scale in ((1.0, 1.0), (3.0, 1.0), (3.0, 2.0)):
        run = lab.run(
            f"plugin_{sharpness}_{scale}",
            run={"plugins": [str(file)]},
            actor={
                "policy_loss": {"loss_mode": "sharp", "sharp": {"sharpness": sharpness}},
                "use_kl_loss": False,
                "entropy_coeff": 0.0,
            },
            algorithm={"adv_estimator": "scaled", "scaled": {"scale": scale}, "use_kl_in_reward": False},
        )
        found[sharpness, scale] = metrics(run)[2]
    for (sharpness, scale), numbers in found.items():
        assert numbers["actor/sharpness"] == pytest.approx(sharpness)
        assert numbers["critic/advantages/max"] <= scale
    assert found[1.0, 1.0]["actor/grad_norm"] != found[3.0, 1.0]["actor/grad_norm"]
    assert found[3.0, 2.0]["critic/advantages/max"] > found[3.0, 1.0]["critic/advantages/max"]
