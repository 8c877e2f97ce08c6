"""Low-rank adapters: any layout trains what one rank trains, the base stays, and merged weights compute the same."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import peft
import pytest
import torch
import transformers

from hpcrl.config.schema import OptimConfig, RecomputeConfig
from hpcrl.engine.checkpoint.sharded_load import load_sharded
from hpcrl.engine.engine import TrainEngine
from hpcrl.model.build import copy_boxes, initial_weight, local_shards
from hpcrl.model.families.config_json import read_shape
from hpcrl.model.hf_export import ADAPTER_CONFIG, adapter_config
from hpcrl.model.shape import ATTENTION_PROJECTIONS, Lora, ModelShape, is_adapter
from hpcrl.runtime.exits import InputError
from hpcrl.runtime.groups import RoleGroups
from hpcrl.workers.weight_transfer import ExportWorker
from tests.model.families import make_model
from tests.mpi.layouts import (
    GPT_OSS,
    MIXTURE,
    SGD,
    SHAPE,
    TIED,
    Policy,
    assert_slices,
    gradients,
    make_batch,
    part_of,
    policy_loss,
    role_groups,
    save_sharded,
    seeded,
)
from tests.mpi.test_hf import check, write

SMALL = replace(MIXTURE, num_layers=3, num_experts=4)
LORA = Lora(rank=3, alpha=6.0)
SOME = Lora(rank=2, alpha=8.0, targets=("q_proj", "v_proj", "o_proj", "up_proj"))
# Small, because a step turns rounding of large ones into other attention.
OF_ATTENTION = Lora(rank=2, alpha=2.0, targets=ATTENTION_PROJECTIONS)


def lora_engine(shape: ModelShape, groups: RoleGroups, lora: Lora = LORA, **options) -> TrainEngine:
    """Of adapters that do something."""
    engine = TrainEngine(shape, groups, lora=lora, seed=3, **{"optim": SGD, **options})
    with engine.offload.on_device("parameters"):
        weights = engine.named_shards()
        for shard in local_shards(shape, groups, "lm", lora):
            if shard.name.endswith("lora_B"):
                drawn = initial_weight(shape, shard.name.replace("lora_B", "lora_A"), shard.global_shape, 4)
                copy_boxes(drawn, weights[shard.name], shard)
    return engine


# Of a model with layers of both kinds, PEFT on transformers 5 drops the adapters of dense layers.
ALL_EXPERTS = {"qwen3-moe": {"mlp_only_layers": []}}
# PEFT has no adapters of experts without a gate.
TARGETS = {"nemotron-h": replace(LORA, targets=ATTENTION_PROJECTIONS)}
NAMES = {id(SHAPE): "dense", id(TIED): "tied", id(MIXTURE): "mixture", id(GPT_OSS): "gpt-oss"}


SLOW, EXHAUSTIVE = pytest.mark.slow, pytest.mark.exhaustive


def case(
    size: int, layout: str, shape: ModelShape, lora: Lora = LORA, *, mark: pytest.MarkDecorator | None = None
) -> object:
    marks = [pytest.mark.world(size), *([mark] if mark else [])]
    return pytest.param(layout, shape, lora, marks=marks, id=f"{layout}-{NAMES[id(shape)]}-{len(lora.targets)}")


@pytest.mark.parametrize(
    ("layout", "shape", "lora"),
    [
        case(1, "single", SHAPE),
        case(1, "single", MIXTURE, mark=EXHAUSTIVE),
        case(2, "tp2", SHAPE),
        case(2, "pp2", SHAPE, mark=EXHAUSTIVE),
        case(2, "tp2", TIED, SOME, mark=SLOW),
        case(2, "tp2", MIXTURE, mark=EXHAUSTIVE),
        case(2, "ep2", MIXTURE, mark=SLOW),
        case(2, "etp2", MIXTURE),
        case(2, "tp2", GPT_OSS, OF_ATTENTION, mark=SLOW),
        case(4, "tp2pp2", SHAPE, mark=EXHAUSTIVE),
        case(4, "tp2cp2", TIED, SOME, mark=SLOW),
        case(4, "tp2ep2etp2", MIXTURE, mark=SLOW),
        case(4, "pp2vpp2ep2", MIXTURE),
    ],
)
def test_adapters_train_as_on_one_rank(groups, layout, shape, lora):
    """Which keeps its activations, where the layout's ranks compute theirs again."""
    batch = make_batch()
    mine = part_of(batch, groups[layout])
    engine = lora_engine(shape, groups[layout], lora, recompute=RecomputeConfig(granularity="full"))
    alone = lora_engine(shape, groups["alone"], lora)
    base = {name: weight.clone() for name, weight in engine.named_shards().items() if not is_adapter(name)}
    for _ in range(2):
        found = engine.train(mine, max_tokens=64, loss=policy_loss, temperature=0.7, entropy=True)
        expected = alone.train(batch, max_tokens=64, loss=policy_loss, temperature=0.7, entropy=True)
        assert expected["grad_norm"] > 1e-3
        assert found["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-4)
        assert gradients(alone).keys() == {name for name in alone.named_shards() if is_adapter(name)}
        assert_slices(engine, gradients(engine), gradients(alone))
    assert_slices(engine, engine.named_shards(), alone.named_shards())
    assert all(torch.equal(engine.named_shards()[name], weight) for name, weight in base.items())


@pytest.mark.parametrize(
    ("layout", "shape"),
    [
        pytest.param("single", MIXTURE, marks=pytest.mark.world(1)),
        pytest.param("tp2", TIED, marks=pytest.mark.world(2)),
        pytest.param("pp2vpp2ep2", MIXTURE, marks=pytest.mark.world(4)),
    ],
)
def test_base_and_merged_models_are_plain_ones(groups, layout, shape):
    """The first bit for bit, the second to rounding; neither changes the weights."""
    mine = part_of(make_batch(), groups[layout])
    engine, plain = lora_engine(shape, groups[layout]), TrainEngine(shape, groups[layout], seed=3)
    before = {name: weight.clone() for name, weight in engine.named_shards().items()}

    def log_probs(of: TrainEngine) -> torch.Tensor:
        found = of.log_probs(mine, max_tokens=64, temperature=1.0)
        return torch.from_numpy(found["log_probs"].values) if found else torch.zeros(1)

    with engine.without_adapters():
        base = log_probs(engine)
    assert torch.equal(base, log_probs(plain))
    weights, merged = plain.named_shards(), engine.merged_shards()
    assert set(merged) == set(weights) and len(merged) == len(weights)
    for name, weight in weights.items():
        weight.copy_(merged[name])
    adapted = log_probs(engine)
    torch.testing.assert_close(adapted, log_probs(plain), rtol=0, atol=1e-4)
    assert not groups[layout].is_last_stage or (adapted - base).abs().max() > 0.1
    assert all(torch.equal(weight, before[name]) for name, weight in engine.named_shards().items())


@pytest.mark.world(2)
def test_offloaded_between_phases(groups):
    """The frozen weights leave and come back too: training, reference and merged weights have the same bits."""
    mine, parts = part_of(make_batch(), groups["tp2"]), ("parameters", "gradients", "optimizer")
    options = {"lora": LORA, "optim": OptimConfig(lr=1e-2)}
    engine, away = (TrainEngine(SHAPE, groups["tp2"], offload=its, **options) for its in ((), parts))
    for _ in range(2):
        found = away.train(mine, max_tokens=64, loss=policy_loss, entropy=True)
        assert found == engine.train(mine, max_tokens=64, loss=policy_loss, entropy=True)
    with engine.without_adapters(), away.without_adapters():
        reference, expected = (of.log_probs(mine, max_tokens=64, temperature=1.0) for of in (away, engine))
    assert reference["log_probs"].equal(expected["log_probs"])
    merged = away.merged_shards()
    with away.offload.on_device("parameters"):
        assert all(torch.equal(merged[name], weight) for name, weight in engine.merged_shards().items())


@pytest.mark.parametrize(
    ("layout", "other", "shape"),
    [
        pytest.param("tp2", "pp2", TIED, marks=[pytest.mark.world(2), SLOW]),
        pytest.param("pp2ep2", "tp2ep2etp2", SMALL, marks=[pytest.mark.world(4), SLOW]),
    ],
)
def test_resumed_in_another_layout(groups, layout, other, shape, world_tmp_path: Path):
    """Base, adapters and their moments come back: the next step of Adam is the one that was left."""
    adam = OptimConfig(lr=1e-2)
    batch, (saved, resumed) = make_batch(), (groups[layout], groups[other])
    engine = lora_engine(shape, saved, optim=adam)
    engine.train(part_of(batch, saved), max_tokens=64, loss=policy_loss, entropy=True)
    save_sharded(engine, world_tmp_path / "actor", saved)
    again, alone = (TrainEngine(shape, its, lora=LORA, optim=adam, seed=8) for its in (resumed, groups["alone"]))
    for one in (again, alone):
        load_sharded(one, world_tmp_path / "actor")
    assert_slices(again, again.named_shards(), alone.named_shards())
    for one, mine in ((engine, saved), (again, resumed)):
        one.train(part_of(batch, mine), max_tokens=64, loss=policy_loss, entropy=True)
    alone.train(batch, max_tokens=64, loss=policy_loss, entropy=True)
    assert_slices(engine, engine.named_shards(), alone.named_shards())
    assert_slices(again, again.named_shards(), alone.named_shards())
    for plain in (TrainEngine(shape, resumed, seed=3), TrainEngine(shape, resumed, optim=adam, seed=3)):
        with pytest.raises(InputError, match="merge them with `hpcrl convert`"):
            load_sharded(plain, world_tmp_path / "actor", optimizer=False, strict=False)


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        pytest.param("llama-3.1", "tp2", marks=pytest.mark.world(2)),
        pytest.param("qwen2", "pp2", marks=[pytest.mark.world(2), EXHAUSTIVE]),
        pytest.param("mixtral", "etp2", marks=[pytest.mark.world(2), SLOW]),
        pytest.param("llama", "tp2pp2", marks=[pytest.mark.world(4), EXHAUSTIVE]),
        pytest.param("qwen3.5", "tp2", marks=[pytest.mark.world(2), SLOW]),
        pytest.param("nemotron-h", "tp2", marks=[pytest.mark.world(2), SLOW]),
        pytest.param("qwen3-moe", "pp2ep2", marks=[pytest.mark.world(4), SLOW]),
    ],
)
def test_peft_computes_what_was_trained(world, world_tmp_path: Path, name: str, layout: str) -> None:
    """Over the directory that the base came from; and `transformers` what the merged directory says."""
    source, target = world_tmp_path / "source", world_tmp_path / "adapter"
    merged, lora = world_tmp_path / "merged", TARGETS.get(name, LORA)
    if world.rank == 0:
        make_model(name, **ALL_EXPERTS.get(name, {})).save_pretrained(source)
        target.mkdir()
        merged.mkdir()
    world.barrier()
    groups, batch, shape = role_groups(world.rank, world.size)[layout], make_batch(), read_shape(source)
    worker = Policy(groups, shape, seeded(1), optim=OptimConfig(lr=1e-2), lora=lora)
    worker.load(str(source), weights_only=True)
    for _ in range(2):
        worker.engine.train(part_of(batch, groups), max_tokens=60, loss=policy_loss, entropy=True)
    assert ExportWorker(worker, world.comm).write_adapter(str(target)) is None
    world.barrier()
    if world.rank == 0:
        (target / ADAPTER_CONFIG).write_text(json.dumps(adapter_config(shape, lora, str(source))))
    world.barrier()
    assert (
        max(float(weight.abs().max()) for name, weight in worker.engine.named_shards().items() if "lora_B" in name)
        > 0.01
    )
    base = transformers.AutoModelForCausalLM.from_pretrained(source).eval()
    theirs = peft.PeftModel.from_pretrained(base, target).eval()
    check(worker, batch, theirs)
    with theirs.disable_adapter(), worker.engine.without_adapters():
        check(worker, batch, theirs)
    write(world, worker, merged, source)
    check(worker, batch, transformers.AutoModelForCausalLM.from_pretrained(merged).eval())
