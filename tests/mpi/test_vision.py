"""Vision-language models under every layout: `transformers`' log-probs and gradients; weights back bit for bit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from hpcrl.model.hf.families import read_shape
from hpcrl.model.vision import Vision
from tests.model.vision_models import VISION_MODELS, make_samples, make_vision_batch, make_vision_model, their_log_probs
from tests.mpi.layouts import LAYOUTS, SGD, TOKENS, Policy, part_of, role_groups, seeded
from tests.mpi.test_hf import tensors, write


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("train", ["none", "merger", "all"])
@pytest.mark.parametrize("name", VISION_MODELS)
def test_transformers_agrees_before_and_after_training(
    world, world_tmp_path: Path, name: str, train: str, layout: str
) -> None:
    theirs, source, target = make_vision_model(name), world_tmp_path / "source", world_tmp_path / "target"
    expected = world_tmp_path / "expected"
    if world.rank == 0:
        theirs.save_pretrained(source, max_shard_size="20KB")
        target.mkdir()
        (world_tmp_path / "trained").mkdir()
    world.barrier()
    groups, batch, shape = role_groups(world.rank, world.size)[layout], make_vision_batch(theirs), read_shape(source)
    shape = replace(shape, vision=replace(shape.vision, train=train))
    worker = Policy(groups, shape, seeded(1), optim=SGD, total_updates=1)
    worker.load(str(source), weights_only=True)
    check(worker, batch, theirs)
    write(world, worker, target, source)
    if world.rank == 0:
        before, after = tensors(source), tensors(target)
        assert before.keys() == after.keys()
        assert all(torch.equal(after[key], tensor) for key, tensor in before.items())

    found = worker.engine.train(part_of(batch, groups), max_tokens=120, loss=loss)
    write(world, worker, world_tmp_path / "trained", source)
    norm = train_theirs(theirs, batch, shape.vision)
    assert found["grad_norm"] == pytest.approx(norm, rel=1e-4)
    if world.rank == 0:
        theirs.save_pretrained(expected)
        changes, ours, before = tensors(expected), tensors(world_tmp_path / "trained"), tensors(source)
        for key, tensor in changes.items():
            torch.testing.assert_close(ours[key], tensor, rtol=0, atol=1e-5 * SGD.lr * norm, msg=key)
    check(worker, batch, theirs)


def loss(outputs: dict[str, torch.Tensor], batch) -> tuple[torch.Tensor, dict]:
    terms = outputs["log_probs"] * batch.padded("advantages") * batch.padded("response_mask")
    return -terms.sum() / TOKENS, {}


def train_theirs(theirs: transformers.PreTrainedModel, batch, vision: Vision) -> float:
    """One step of SGD; returns the norm of the gradient."""
    for name, parameter in theirs.named_parameters():
        _, is_tower, tensor = name.partition("visual.")
        parameter.requires_grad_(not is_tower or vision.is_trained(tensor))
    total = 0.0
    for row, sample in enumerate(make_samples(theirs)):
        weights = torch.from_numpy(batch.fetch("advantages").row(row) * batch.fetch("response_mask").row(row))
        total = total - (their_log_probs(theirs, sample) * weights).sum() / TOKENS
    total.backward()
    trained = [parameter for parameter in theirs.parameters() if parameter.requires_grad]
    with torch.no_grad():
        for parameter in trained:
            parameter -= SGD.lr * parameter.grad
    return float(torch.stack([parameter.grad.norm() for parameter in trained]).norm())


def check(worker, batch, theirs: transformers.PreTrainedModel) -> None:
    mine = part_of(batch, worker.groups)
    rows = np.array_split(np.arange(len(batch)), worker.groups.layout.dp)[worker.groups.coord.dp]
    found = worker.engine.log_probs(mine, max_tokens=120, temperature=1.0)
    if not worker.groups.is_last_stage:
        return
    samples = make_samples(theirs)
    for place, row in enumerate(rows):
        with torch.no_grad():
            expected = their_log_probs(theirs, samples[row])
        ours = torch.from_numpy(found["log_probs"].row(place))
        torch.testing.assert_close(ours, expected, rtol=0, atol=1e-4)
