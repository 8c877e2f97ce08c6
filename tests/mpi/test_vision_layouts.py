"""Options of training with pictures, under layouts: adapters, recomputed activations and offloaded parts train what one
rank trains without them; and one micro-batch of all samples what one for each sample does."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import peft
import pytest
import torch

from hpcrl.batch.data_proto import DataProto
from hpcrl.batch.ragged import Ragged
from hpcrl.config.schema import OptimConfig, RecomputeConfig
from hpcrl.engine.engine import TrainEngine
from hpcrl.model.families.config_json import read_shape, shape_from_hf
from hpcrl.model.hf_export import ADAPTER_CONFIG, adapter_config, peft_shards
from hpcrl.model.shape import ATTENTION_PROJECTIONS, Lora, ModelShape
from hpcrl.model.tower import encode
from hpcrl.model.vision import Trained
from hpcrl.runtime.groups import RoleGroups
from hpcrl.workers.weight_transfer import ExportWorker
from tests.model.vision_models import VISION_MODELS, make_vision_batch, make_vision_model, save_vision_model
from tests.mpi.layouts import (
    EXPERT_LAYOUTS,
    LAYOUTS,
    ROUTER_LOSSES,
    SGD,
    Policy,
    assert_slices,
    gradients,
    part_of,
    policy_loss,
    seeded,
)
from tests.mpi.test_lora import lora_engine
from tests.mpi.test_offload import ALL
from tests.mpi.test_vision import check

FULL, MANY = {"granularity": "full"}, 10_000
OPTIONS: dict[str, dict[str, Any]] = {
    "selective": {"recompute": {"granularity": "selective", "modules": ["core_attn", "mlp"]}},
    "full": {"recompute": FULL},
    "one_layer": {"recompute": {**FULL, "method": "block", "num_layers": 1}},
    "offload": {"offload": ALL},
    "lora": {"lora": True},
    "together": {"lora": True, "recompute": FULL, "offload": ALL},
}
QUICK = {("qwen2.5-vl", "none", "together", "tp2"), ("qwen3-vl", "all", "selective", "pp2")}
SLOW = {
    ("qwen3-vl", "none", "full", "single"),
    ("qwen2.5-vl", "all", "full", "cp2"),
    ("qwen3-vl-moe", "all", "offload", "tp2ep2"),
    ("qwen3-vl-moe", "none", "together", "pp2vpp2"),
    ("qwen3-vl", "all", "selective", "pp2cp2vpp2"),
    ("qwen3-vl-moe", "none", "full", "tp2ep2etp2"),
}


def case(name: str, train: str, option: str, layout: Any) -> object:
    place = (name, train, option, layout.values[0])
    own = [] if place in QUICK else [pytest.mark.slow] if place in SLOW else [pytest.mark.exhaustive]
    return pytest.param(*place, marks=[*layout.marks, *own])


def is_allowed(name: str, train: str, option: str) -> bool:
    """What `hpcrl.workers.team.check_vision` allows."""
    if train == "none":
        return True
    recompute = OPTIONS[option].get("recompute", {})
    return "lora" not in OPTIONS[option] and (name == "qwen2.5-vl" or recompute.get("granularity") != "full")


CASES = [
    case(name, train, option, layout)
    for name in VISION_MODELS
    for train in ("none", "all")
    for option in OPTIONS
    for layout in [*LAYOUTS, *(EXPERT_LAYOUTS if name == "qwen3-vl-moe" else ())]
    if is_allowed(name, train, option)
]


@cache
def model(name: str, train: Trained) -> tuple[ModelShape, DataProto]:
    """Its shape, and samples with patches where the tower is trained, and with its features otherwise."""
    theirs = make_vision_model(name)
    shape, batch = shape_from_hf(theirs.config.to_dict()), make_vision_batch(theirs)
    assert shape.vision is not None
    column = batch.pictures
    if train == "none":
        grids = torch.from_numpy(column.grids.astype("int64"))
        patches = torch.from_numpy(column.values.values).view(-1, shape.vision.patch_width)
        with torch.no_grad():
            features = encode(theirs.model.visual, patches, grids)
        each = (grids.prod(1) // shape.vision.merge_size**2).tolist()
        rows = [part.flatten().numpy() for part in features.split(each)]
        column = replace(column, values=Ragged.from_rows(rows, "float32"), are_features=True)
    return replace(shape, vision=replace(shape.vision, train=train)), DataProto({**batch.tokens, "pictures": column})


def lora_of(shape: ModelShape) -> Lora:
    return Lora(3, 6.0, ATTENTION_PROJECTIONS) if shape.has_stacked_experts else Lora(3, 6.0)


def make_engine(shape: ModelShape, groups: RoleGroups, *, lora: bool = False, **options: Any) -> TrainEngine:
    if lora:
        return lora_engine(shape, groups, lora_of(shape), **options, **ROUTER_LOSSES)
    return TrainEngine(shape, groups, optim=SGD, seed=3, **options, **ROUTER_LOSSES)


class OneRank:
    """What one rank makes of the samples in two steps, which nothing recomputes or offloads."""

    def __init__(self, alone: RoleGroups, name: str, train: Trained, lora: bool) -> None:
        shape, batch = model(name, train)
        engine = make_engine(shape, alone, lora=lora)
        self.steps = []
        for _ in range(2):
            metrics = engine.train(batch, max_tokens=MANY, loss=policy_loss, entropy=True)
            assert metrics["grad_norm"] > 1e-3
            self.steps.append((metrics, gradients(engine)))
        self.weights = {name: weight.clone() for name, weight in engine.named_shards().items()}


@pytest.fixture(scope="module")
def one_rank(groups: dict[str, RoleGroups]) -> Any:
    return cache(lambda *which: OneRank(groups["alone"], *which))


@pytest.mark.parametrize(("name", "train", "option", "layout"), CASES)
def test_options_train_as_one_rank_without_them(
    groups, one_rank, name: str, train: Trained, option: str, layout: str
) -> None:
    options = dict(OPTIONS[option])
    shape, batch = model(name, train)
    if "recompute" in options:
        options["recompute"] = RecomputeConfig(**options["recompute"])
        if shape.num_experts and option == "selective":
            options["recompute"].modules.append("moe")
    expected = one_rank(name, train, "lora" in options)
    engine = make_engine(shape, groups[layout], **options)
    mine = part_of(batch, groups[layout])
    for metrics, its_gradients in expected.steps:
        with engine.offload.on_device("gradients"):
            found = engine.train(mine, max_tokens=120, loss=policy_loss, entropy=True)
            for key in found.keys() - {"lr", "skipped_updates"}:
                assert found[key] == pytest.approx(metrics[key], rel=1e-4), key
            assert_slices(engine, gradients(engine), its_gradients)
    with engine.offload.on_device("parameters"):
        assert_slices(engine, engine.named_shards(), expected.weights)


@pytest.mark.parametrize(
    ("name", "train", "layout"),
    [
        pytest.param("qwen3-vl-moe", "all", "single", marks=[pytest.mark.world(1), pytest.mark.slow]),
        pytest.param("qwen2.5-vl", "none", "single", marks=[pytest.mark.world(1), pytest.mark.exhaustive]),
        pytest.param("qwen3-vl", "all", "tp2", marks=[pytest.mark.world(2), pytest.mark.exhaustive]),
        pytest.param("qwen2.5-vl", "all", "cp2", marks=pytest.mark.world(2)),
    ],
)
def test_packed_equals_separate(groups, name: str, train: Trained, layout: str) -> None:
    """Log-probs of all samples in one micro-batch are those of each alone, and the gradient is their sum."""
    shape, batch = model(name, train)
    packed, separate = (make_engine(shape, groups[layout]) for _ in range(2))
    options = {"max_tokens": MANY, "temperature": 1.0}
    together = packed.log_probs(batch, **options)["log_probs"]
    for row in range(len(batch)):
        alone = separate.log_probs(batch[[row]], **options)["log_probs"]
        torch.testing.assert_close(together.row(row), alone.row(0), rtol=0, atol=1e-5)
    longest = int(batch.fetch("input_ids").lengths.max())
    found, expected = (
        engine.train(batch, max_tokens=size, loss=policy_loss, entropy=True)
        for engine, size in ((packed, MANY), (separate, longest))
    )
    assert found == pytest.approx(expected, rel=1e-5)
    expected_of = gradients(separate)
    for tensor, gradient in gradients(packed).items():
        assert (gradient - expected_of[tensor]).norm() < 1e-5 * expected["grad_norm"], tensor


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        pytest.param("qwen2.5-vl", "tp2", marks=[pytest.mark.world(2), pytest.mark.slow]),
        pytest.param("qwen3-vl", "pp2", marks=[pytest.mark.world(2), pytest.mark.exhaustive]),
        pytest.param("qwen3-vl-moe", "tp2ep2", marks=[pytest.mark.world(2), pytest.mark.exhaustive]),
    ],
)
def test_peft_computes_what_was_trained(world, groups, world_tmp_path: Path, name: str, layout: str) -> None:
    """The adapters of a language model over the directory that it came from; the tower gets none."""
    theirs, source, target = make_vision_model(name), world_tmp_path / "source", world_tmp_path / "adapter"
    if world.rank == 0:
        save_vision_model(theirs, source)
        target.mkdir()
    world.barrier()
    batch, shape = make_vision_batch(theirs), read_shape(source)
    lora = lora_of(shape)
    worker = Policy(groups[layout], shape, seeded(1), optim=OptimConfig(lr=1e-2), lora=lora)
    worker.load(str(source), weights_only=True)
    for _ in range(2):
        worker.engine.train(part_of(batch, groups[layout]), max_tokens=MANY, loss=policy_loss, entropy=True)
    assert ExportWorker(worker, world.comm).write_adapter(str(target)) is None
    if world.rank == 0:
        (target / ADAPTER_CONFIG).write_text(json.dumps(adapter_config(shape, lora, str(source))))
    world.barrier()
    adapted = peft.PeftModel.from_pretrained(theirs, target).eval()
    names = [name for name in adapted.state_dict() if "lora_" in name]
    assert len(names) == len(peft_shards(shape, lora)) and not any("visual" in name for name in names)
    assert all(weight.abs().max() > 0.01 for name, weight in adapted.state_dict().items() if "lora_B" in name)
    check(worker, batch, adapted.get_base_model())
