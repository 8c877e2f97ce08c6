"""A loss and an estimator with parameters of their own, in one file outside the package."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hpcrl.model.hf_export import plan_files, write_beside
from hpcrl.runtime.groups import make_groups
from hpcrl.runtime.layout import Layout
from hpcrl.runtime.user_code import import_file
from hpcrl.workers.weight_transfer import ExportWorker
from tests.mpi.lab import Lab, metrics, on
from tests.mpi.layouts import Policy, seeded

pytestmark = pytest.mark.ci_world(2)

RECURRENT = Path(__file__).parents[1] / "model" / "recurrent_plugin.py"
SIZES = {
    "num_layers": 3,
    "hidden_size": 32,
    "ffn_hidden_size": 48,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "head_dim": 8,
    "vocab_size": 60,
    "init_std": 0.2,
    "family": "toy_recurrent",
}
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


@pytest.mark.slow
def test_a_layer_of_a_plugin_trains_generates_and_resumes(world: Any, lab: Lab) -> None:
    """From a directory with its weights; what rollout says of a token is what training says."""
    shape, source = import_file(RECURRENT).recurrent_shape(**SIZES), lab.folder / "recurrent"
    groups = make_groups({"actor": Layout(tuple(range(world.size)))}, world.rank)["actor"]
    if world.rank == 0:
        source.mkdir()
    world.barrier()
    assert ExportWorker(Policy(groups, shape, seeded(1)), world.comm).write(str(source)) is None
    world.barrier()
    if world.rank == 0:
        write_beside(source, plan_files(shape, 4, world.size), shape, 4, "float32", None, None)
    world.barrier()

    def run(name: str, steps: int, save_freq: int = -1) -> dict[int, dict[str, float]]:
        return metrics(
            lab.run(
                name,
                on(world, tp=world.size),
                run={"plugins": [str(RECURRENT)]},
                model={"path": str(source), "vocab_size": None},
                algorithm={"adv_estimator": "grpo"},
                trainer={"total_training_steps": steps, "save_freq": save_freq},
            )
        )

    whole = run("whole", 4)
    assert max(line["training/rollout_probs_diff_max"] for line in whole.values()) < 1e-4
    run("halves", 2, save_freq=2)
    assert run("halves", 4, save_freq=2) == whole
