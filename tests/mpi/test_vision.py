"""Vision-language models under every layout: `transformers`' log-probs and gradients; weights back bit for bit."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from hpcrl.batch.data_proto import DataProto
from hpcrl.batch.pictures import PictureColumn
from hpcrl.batch.ragged import Ragged
from hpcrl.engine.refit.planner import Resharding
from hpcrl.engine.refit.refit import Refit
from hpcrl.model.families.config_json import read_shape
from hpcrl.model.shape import ModelShape
from hpcrl.model.tower import divide
from hpcrl.model.vision import Vision
from hpcrl.rollout.engines.engine import CacheLayout, max_kv_bytes
from hpcrl.rollout.engines.native.engine import NativeEngine
from hpcrl.rollout.protocol import PromptPicture, Request, SamplingParams, Trajectory
from hpcrl.runtime.groups import GroupCache, make_groups
from hpcrl.runtime.layout import Layout
from hpcrl.workers.response_columns import response_columns
from tests.model.vision_models import (
    VISION_MODELS,
    Sample,
    make_samples,
    make_vision_batch,
    make_vision_model,
    save_vision_model,
    their_log_probs,
)
from tests.mpi.layouts import EXPERT_LAYOUTS, LAYOUTS, SGD, TOKENS, Policy, part_of, role_groups, seeded
from tests.mpi.test_hf import check_written_back, tensors, write

# Each kind of slice, each family and each trained part meets some other; the rest is exhaustive.
QUICK = {("qwen2.5-vl", "all", "single"), ("qwen2.5-vl", "all", "tp2"), ("qwen3-vl", "none", "pp2")}
SLOW = {
    *(("qwen3-vl", "all", layout) for layout in ("single", "tp2", "cp2", "tp2pp2", "pp2cp2vpp2")),
    *(("qwen2.5-vl", "merger", layout) for layout in ("dp2", "pp2vpp2", "tp2cp2")),
    *(("qwen3.5", "all", "tp2"), ("qwen3.5", "merger", "pp2vpp2")),
    *(("qwen3-vl", "merger", "tp2dp2"), ("qwen2.5-vl", "none", "tp4")),
    *(("qwen3-vl-moe", "all", layout) for layout in ("tp2ep2", "pp2vpp2ep2")),
}


def case(name: str, train: str, layout) -> object:
    place = (name, train, layout.values[0])
    own = [] if place in QUICK else [pytest.mark.slow] if place in SLOW else [pytest.mark.exhaustive]
    return pytest.param(*place, marks=[*layout.marks, *own])


TRAINED = ("none", "merger", "tower", "all")
CASES = [case(name, train, layout) for name in VISION_MODELS for train in TRAINED for layout in LAYOUTS]
CASES = [each for each in CASES if each.values[0] != "qwen3.5" or "cp" not in each.values[2]]
CASES += [case("qwen3-vl-moe", train, layout) for train in TRAINED for layout in EXPERT_LAYOUTS]


@pytest.mark.parametrize(("name", "train", "layout"), CASES)
def test_transformers_agrees_before_and_after_training(
    world, world_tmp_path: Path, name: str, train: str, layout: str
) -> None:
    theirs, source, target = make_vision_model(name), world_tmp_path / "source", world_tmp_path / "target"
    expected = world_tmp_path / "expected"
    if world.rank == 0:
        save_vision_model(theirs, source, max_shard_size="20KB")
        target.mkdir()
        (world_tmp_path / "trained").mkdir()
    world.barrier()
    groups, batch, shape = role_groups(world.rank, world.size)[layout], make_vision_batch(theirs), read_shape(source)
    shape = replace(shape, vision=replace(shape.vision, train=train, lr=SGD.lr / 2 if train == "all" else None))
    worker = Policy(groups, shape, seeded(1), optim=SGD, total_updates=1)
    worker.load(str(source), weights_only=True)
    check(worker, batch, theirs)
    check_written_back(world, worker, source, target)

    found = worker.engine.train(part_of(batch, groups), max_tokens=120, loss=loss)
    write(world, worker, world_tmp_path / "trained", source)
    norm = train_theirs(theirs, batch, shape.vision)
    assert found["grad_norm"] == pytest.approx(norm, rel=1e-4)
    if world.rank == 0:
        save_vision_model(theirs, expected)
        changes, ours = tensors(expected), tensors(world_tmp_path / "trained")
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
        for name, parameter in theirs.named_parameters():
            if parameter.requires_grad:
                parameter -= ((vision.lr if "visual." in name else None) or SGD.lr) * parameter.grad
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


ROLLOUTS = {
    1: [(Layout((0,)), Layout((0,)))],
    2: [(Layout((0, 1), tp=2), Layout((0, 1))), (Layout((0, 1), pp=2), Layout((0, 1), tp=2))],
    4: [(Layout((0, 1, 2, 3), tp=2, pp=2), Layout((0, 1, 2, 3), tp=2))],
}
SAMPLING = SamplingParams(12, temperature=0.8, eos_token_ids=(1,))


@pytest.fixture(scope="module")
def cache(world) -> GroupCache:
    return GroupCache(world.rank)


@pytest.mark.ci_world(2)
@pytest.mark.parametrize(
    ("name", "limits"),
    [
        *((name, limits) for name in VISION_MODELS if name != "qwen3-vl-moe" for limits in ("ample", "scarce")),
        pytest.param("qwen3-vl-moe", "ample", marks=pytest.mark.exhaustive),
        pytest.param("qwen3-vl-moe", "scarce", marks=pytest.mark.slow),
    ],
)
def test_rollout_says_what_training_says(
    world, world_tmp_path: Path, cache, monkeypatch: pytest.MonkeyPatch, name: str, limits: str
) -> None:
    """With prompts in parts and preempted sequences too, and after a refit of all weights, the tower's too. Training
    does not run its tower where it has the engine's features; where it has the engine's choice of experts, it keeps it.
    """
    theirs, source = make_vision_model(name), world_tmp_path / "source"
    if world.rank == 0:
        save_vision_model(theirs, source)
    world.barrier()
    shape, samples, batch = read_shape(source), make_samples(theirs), make_vision_batch(theirs)
    column = batch.pictures
    for training, rollout in ROLLOUTS[world.size]:
        if shape.num_experts:
            training, rollout = replace(training, ep=training.tp), replace(rollout, etp=rollout.tp)
        groups = make_groups({"actor": training, "rollout": rollout}, world.rank, cache)
        worker = Policy(groups["actor"], shape, seeded(1))
        worker.load(str(source), weights_only=True)
        part = groups["rollout"]
        bytes_of_all = max_kv_bytes(shape, part.layout.tp, 4, 16, 150)
        fixed = 16 * CacheLayout.of(shape, part.layout.tp, 150).sequence_bytes(4)
        engine = NativeEngine(
            shape,
            part.tp,
            part.coord.tp,
            part.layout.tp,
            torch.float32,
            max_num_seqs=16,
            max_num_batched_tokens=1000 if limits == "ample" else 13,
            max_model_len=150,
            kv_cache_bytes=bytes_of_all if limits == "ample" else fixed + (bytes_of_all - fixed) // 8,
        )
        refit = Refit(Resharding(shape, training, rollout, itemsize=4), world.comm, world.rank, torch.float32)
        refit.run(worker.engine.named_shards(), engine.weights())
        refit.close()
        encoded: list[int] = []
        features = engine.encode(column.grids, partial(patches_of, column, shape.vision.patch_width, encoded))
        assert encoded == divide(column.grids, rollout.tp)[part.coord.tp]
        for number, its_features in enumerate(features):  # whatever it is encoded with, bit for bit
            own = [column.values.row(number).reshape(-1, shape.vision.patch_width)]
            alone = engine.encode(column.grids[[number]], lambda _, own=own: own, divided=False)
            assert torch.equal(alone[0], its_features)
        requests = [
            request(sample, row, column, features, index) for row, sample in enumerate(samples) for index in (0, 1)
        ]
        has_experts = shape.num_experts > 0
        completions = engine.generate(requests, replace(SAMPLING, routed_experts=has_experts), seed=1, step=1)
        columns = response_columns(requests, [Trajectory.from_completion(done) for done in completions]).tokens
        choice, shown = columns.pop("routed_experts", None), np.repeat(np.arange(len(samples)), 2)
        mine = np.array_split(np.arange(len(requests)), training.dp)[groups["actor"].coord.dp]
        options = {"max_tokens": 150, "temperature": 0.8, "record_routing": has_experts}
        for pictures in (column, replace(column, values=as_rows(features), are_features=True)):
            tower = worker.engine.chunks[0].vision
            if pictures.are_features and tower is not None:
                monkeypatch.delattr(type(tower), "forward")
            drawn = DataProto({**columns, "pictures": pictures.take(shown)})
            found = worker.engine.log_probs(part_of(drawn, groups["actor"]), **options)
            for place, row in enumerate(mine if found else ()):
                gap = np.abs(found["log_probs"].row(place) - completions[row].log_probs).max()
                assert gap < 1e-4, (training, rollout, row, gap)
                assert choice is None or same_choice(found["routed_experts"].row(place), choice.row(row), shape)
        monkeypatch.undo()
        if choice is not None:
            other = replace(choice, values=np.where(choice.values < 0, choice.values, choice.values ^ 1))
            drawn = DataProto({**columns, "pictures": column.take(shown), "routed_experts": other})
            found = worker.engine.log_probs(part_of(drawn, groups["actor"]), **options)
            for place, row in enumerate(mine if found else ()):
                assert np.abs(found["log_probs"].row(place) - completions[row].log_probs).max() > 1e-2
                assert same_choice(found["routed_experts"].row(place), other.row(row), shape)


def same_choice(found: np.ndarray, expected: np.ndarray, shape: ModelShape) -> bool:
    """Of the experts of all tokens but the last, which the engine has not run; a choice is a set."""
    sets = [np.sort(each.reshape(-1, len(shape.routed.layers), shape.moe_topk)[:-1]) for each in (found, expected)]
    return np.array_equal(*sets)


def patches_of(column: PictureColumn, width: int, encoded: list[int], numbers: list[int]) -> list[np.ndarray]:
    """The patches of these pictures, whose numbers are added to `encoded`."""
    encoded.extend(numbers)
    return [column.values.row(number).reshape(-1, width) for number in numbers]


def as_rows(features: list[torch.Tensor]) -> Ragged:
    return Ragged.from_rows([each.flatten().numpy() for each in features], np.float32)


def request(sample: Sample, row: int, column: PictureColumn, features: list[torch.Tensor], index: int) -> Request:
    pictures = tuple(
        PromptPicture(int(column.keys[item]), picture, features[item]) for item, picture in column.of_row(row)
    )
    return Request(sample.ids[: -sample.num_response], f"file:{row}:0", index, pictures=pictures)
