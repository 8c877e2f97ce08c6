"""The teacher role: on any ranks and in any layout, it tells the student what it would tell it on one rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from hpcrl.batch.data_proto import DataProto, TensorBatch
from hpcrl.config.derive import check
from hpcrl.config.schema import Config
from hpcrl.controller.controller import Controller, run_program
from hpcrl.controller.register import Dispatch, register
from hpcrl.engine.engine import TrainEngine
from hpcrl.runtime.exits import InputError
from hpcrl.runtime.groups import RoleGroups, make_groups
from hpcrl.runtime.layout import Layout
from hpcrl.workers.frozen import TeacherWorker
from hpcrl.workers.model_worker import ModelWorker
from hpcrl.workers.team import teacher_shape
from tests.mpi.layouts import SGD, SHAPE, TOKENS, Policy, make_batch, seeded

TOPK = 6
COLUMNS = ("teacher_log_prob", "teacher_topk_log_probs", "teacher_topk_ids")
TEACHER = {"num_layers": 2, "hidden_size": 32, "ffn_hidden_size": 48, "init_std": 0.2}
EVERYWHERE = {"all": "*"}
APART = {"low": "0", "high": "1"}
HALVES = {"low": "0-1", "high": "2-3"}
PLACEMENTS = [
    pytest.param(pools, actor, teacher, marks=pytest.mark.world(size))
    for size, pools, actor, teacher in [
        (1, EVERYWHERE, {}, {}),
        (2, APART, {"pool": "low"}, {"pool": "high"}),
        (2, EVERYWHERE, {"pp": 2}, {"tp": 2}),
        (2, EVERYWHERE, {"tp": 2}, {}),
        (4, HALVES, {"pool": "low", "pp": 2}, {"pool": "high", "tp": 2}),
        (4, EVERYWHERE, {"tp": 2}, {"tp": 2, "pp": 2}),
    ]
]


def loss(outputs: dict[str, torch.Tensor], batch: TensorBatch) -> tuple[torch.Tensor, dict[str, Any]]:
    """Forward KL over the teacher's likeliest, and k1 on the sampled token."""
    log_p = batch.tokens["teacher_topk_log_probs"].padded_vectors(TOPK)
    kl = (log_p.exp() * (log_p - outputs["topk_log_probs"])).sum(2)
    k1 = outputs["log_probs"] * (outputs["log_probs"].detach() - batch.padded("teacher_log_prob"))
    return ((kl + k1) * batch.padded("response_mask")).sum() / TOKENS, {}


class Student(Policy):
    """Makes samples, and learns from what a teacher says of them."""

    def __init__(self, groups: RoleGroups) -> None:
        super().__init__(groups, SHAPE, seeded(3), optim=SGD)

    @register(Dispatch.DP_COMPUTE_PROTO, reads=("position",), writes=("input_ids", "response_mask"))
    def write(self, batch: DataProto) -> DataProto:
        samples = make_batch()[batch.samples["position"]]
        return samples.select(["input_ids", "response_mask"])

    @register(Dispatch.DP_COMPUTE_METRIC, reads=("input_ids", "response_mask", *COLUMNS))
    def learn(self, batch: DataProto) -> float:
        return self.engine.train(batch, max_tokens=64, loss=loss, topk_ids="teacher_topk_ids")["grad_norm"]


def config_of(**sections: Any) -> Config:
    distillation = {"enabled": True, "distillation_loss": {"loss_mode": "forward_kl_topk", "topk": TOPK}}
    sections = {"teacher": {"model": TEACHER, "init_from": "somewhere"}, "distillation": distillation} | sections
    data = {"train_files": ["prompts.jsonl"], "max_prompt_length": 30, "max_response_length": 30}
    return Config.model_validate({"data": data, "algorithm": {"adv_estimator": "reinforce_plus_plus"}} | sections)


def program(controller: Controller) -> dict[str, Any]:
    batch = DataProto({}, {"position": np.arange(len(make_batch()))})
    batch = batch.union(controller["actor"].write(batch).get())
    batch = batch.union(controller["teacher"].compute_teacher_log_prob(batch).get())
    sampled = batch.fetch("teacher_log_prob")
    norms = controller["actor"].learn(batch).get()
    return {"sampled": sampled, "norms": norms, **{name: batch.fetch(name) for name in COLUMNS}}


@pytest.mark.parametrize(("pools", "actor", "teacher"), PLACEMENTS)
def test_student_learns_from_a_teacher_anywhere(world, pools, actor, teacher):
    rollout = {"pool": actor.get("pool", "all")}
    placement = {"pools": pools, "actor": actor, "teacher": teacher, "rollout": rollout}
    config = config_of(placement=placement)
    derived = check(config, world.size)
    shape = teacher_shape(config, SHAPE)
    assert (shape.hidden_size, shape.vocab_size) == (32, SHAPE.vocab_size)
    layouts = {
        role: Layout(placed.ranks, tp=placed.tp, pp=placed.pp)
        for role, placed in derived.roles.items()
        if role != "rollout"
    }
    groups = make_groups({**layouts, **{f"alone{rank}": Layout((rank,)) for rank in range(world.size)}}, world.rank)
    build: dict[str, Callable[[], ModelWorker]] = {
        "actor": lambda: Student(groups["actor"]),
        "teacher": lambda: TeacherWorker(groups["teacher"], shape, config, derived),
    }
    workers = {role: make() for role, make in build.items() if role in groups}
    kinds = {"actor": Student, "teacher": TeacherWorker}
    found = run_program(world, workers, kinds, layouts, program)
    if found is None:
        return

    batch = make_batch()
    alone = TrainEngine(shape, groups["alone0"], seed=config.run.seed)
    expected = alone.topk_log_probs(batch, max_tokens=10_000, temperature=1.0, k=TOPK)
    for name, column in zip(COLUMNS[:2], ("log_probs", "topk_log_probs"), strict=True):
        torch.testing.assert_close(found[name].values, expected[column].values, rtol=0, atol=1e-4)
    assert found["sampled"].equal(found["teacher_log_prob"])
    assert (found["teacher_topk_ids"].values == expected["topk_ids"].values).mean() > 0.99

    batch.tokens |= {name: found[name] for name in COLUMNS}
    student = TrainEngine(SHAPE, groups["alone0"], optim=SGD, seed=3)
    norm = student.train(batch, max_tokens=10_000, loss=loss, topk_ids="teacher_topk_ids")["grad_norm"]
    assert norm > 1e-3
    assert found["norms"] == pytest.approx([norm] * len(found["norms"]), rel=1e-4)


@pytest.mark.world(1)
@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({"vocab_size": 64}, "teacher.model.vocab_size=64, and the policy's vocabulary has 45 tokens"),
        ({"path": "somewhere"}, "somewhere/config.json cannot be read"),
        ({"init_from": "somewhere"}, "teacher.model gives init_from"),
        (
            {"max_position_embeddings": 59},
            "= 60 exceeds the 59 tokens that the model of teacher.model",
        ),
    ],
)
def test_teacher_that_does_not_fit(model, message):
    with pytest.raises(InputError, match=message) as error:
        teacher_shape(config_of(teacher={"model": TEACHER | model}), SHAPE)
    assert "\n" not in str(error.value)


@pytest.mark.world(1)
def test_more_tokens_of_the_teacher_than_there_are():
    loss = {"loss_mode": "forward_kl_topk", "topk": 46}
    with pytest.raises(InputError, match="topk=46 exceeds the vocabulary of 45 tokens; use 45 or less"):
        teacher_shape(config_of(distillation={"distillation_loss": loss}), SHAPE)
    own = config_of(teacher={}, distillation={"distillation_loss": {**loss, "topk": 45}})
    assert teacher_shape(own, SHAPE) is SHAPE
