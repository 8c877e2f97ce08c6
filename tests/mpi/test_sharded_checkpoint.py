"""A checkpoint goes on where it stopped, whatever the layout it is loaded under."""

from __future__ import annotations

import os
import pickle
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex

from hpcrl.config.schema import OptimConfig
from hpcrl.engine.checkpoint.sharded_load import load_sharded
from hpcrl.engine.engine import TrainEngine
from hpcrl.runtime.exits import InputError
from tests.mpi.layouts import (
    DEEPSEEK,
    DELTA,
    GPT_OSS,
    HYBRID,
    SHAPE,
    SIZES,
    SOME,
    SOME_LAYOUTS,
    TIED,
    assert_slices,
    gradients,
    has_layout,
    make_batch,
    part_of,
    policy_loss,
    save_sharded,
    value_engine,
)

WIDER = replace(SHAPE, ffn_hidden_size=128)
ADAM = OptimConfig(lr=1e-2, lr_warmup_steps=4, weight_decay=0.1, clip_grad=0.0)
SGD = OptimConfig(optimizer="sgd", lr=0.1, momentum=0.9, clip_grad=0.0)


def train(engine: TrainEngine, batch, steps: int) -> dict:
    mine = part_of(batch, engine.groups)
    for _ in range(steps):
        result = engine.train(mine, max_tokens=64, loss=policy_loss, entropy=True)
    return result


def weights(engine: TrainEngine) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in engine.named_shards().items()}


# of which optimizer and model, how many of the layouts are saved, and every how many-th of them is loaded
LOADED = {
    "adam": (ADAM, SHAPE, SOME, 5),
    "adam-tied": (ADAM, TIED, ("single", "pp2", "pp2vpp2"), 4),
    "sgd": (SGD, SHAPE, ("single", "dp2"), 4),
    "delta": (ADAM, DELTA, ("tp2",), 2),
    "hybrid": (ADAM, HYBRID, ("tp2",), 2),
    "adam-everywhere": (ADAM, SHAPE, (), 1),
}


def saved(kind: str, layout) -> object:
    optim, shape, chosen, every = LOADED[kind]
    place, marks = layout.values[0], list(layout.marks)
    of_four = layout.marks[0].args == (4,)
    if place not in chosen or (of_four and place == "pp2vpp2"):
        marks.append(pytest.mark.exhaustive)
    elif kind != "adam" or of_four:
        marks.append(pytest.mark.slow)
    return pytest.param(place, optim, shape, every, id=f"{kind}-{place}", marks=marks)


@pytest.mark.parametrize(
    ("layout", "optim", "shape", "every"),
    [
        saved(kind, layout)
        for kind in LOADED
        for layout in SOME_LAYOUTS
        if has_layout(LOADED[kind][1], layout.values[0])
    ],
)
def test_load_under_other_layouts(groups, world_tmp_path, world, layout, optim, shape, every):
    """Saved after two steps in `layout` and loaded in all or some layouts, it takes the steps that would have come."""
    make = lambda name, seed: TrainEngine(shape, groups[name], optim=optim, total_steps=9, seed=seed)  # noqa: E731
    batch = make_batch()
    engine = make(layout, 3)
    train(engine, batch, 2)
    folder = world_tmp_path / "actor"
    save_sharded(engine, folder, groups[layout])

    alone = make("alone", 4)
    load_sharded(alone, folder)
    assert alone.steps == 2
    assert_slices(engine, engine.named_shards(), weights(alone))

    names = [name for name in SIZES[world.size] if has_layout(shape, name)]
    others = {name: make(name, 5) for name in names[names.index(layout) % every :: every]}
    for other in others.values():
        load_sharded(other, folder)
        assert_slices(other, other.named_shards(), weights(alone))

    expected_results = [train(alone, batch, 1) for _ in range(2)]
    for other in others.values():
        for expected in expected_results:
            found = train(other, batch, 1)
            # Adam turns 1e-7 of a small gradient into 2 lr of weight, so the second step is compared loosely.
            first = expected is expected_results[0]
            assert found["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-4 if first else 1e-2)
            assert found["lr"] == expected["lr"]
        if optim is SGD:
            assert_slices(other, gradients(other), gradients(alone))
            assert_slices(other, other.named_shards(), weights(alone))


@pytest.mark.slow
@pytest.mark.world(2)
def test_a_frozen_parameter_is_saved_and_left_alone(groups, world_tmp_path):
    """The bias by which experts are chosen is no optimizer's."""
    engine, alone = (
        TrainEngine(DEEPSEEK, groups[layout], optim=ADAM, total_steps=9, seed=3) for layout in ("tp2", "alone")
    )
    biases = {name: tensor for name, tensor in engine.named_shards().items() if name.endswith("expert_bias")}
    assert len(biases) == 4
    for number, bias in enumerate(biases.values()):
        bias.copy_(0.1 * torch.arange(8) + number)
    before = weights(engine)
    train(engine, make_batch(), 2)
    assert {name for name, tensor in weights(engine).items() if torch.equal(tensor, before[name])} == biases.keys()

    save_sharded(engine, world_tmp_path / "actor", groups["tp2"])
    load_sharded(alone, world_tmp_path / "actor")
    assert_slices(engine, engine.named_shards(), weights(alone))


@pytest.mark.slow
@pytest.mark.world(2)
@pytest.mark.parametrize("layout", ["etp2", pytest.param("tp2ep2", marks=pytest.mark.exhaustive)])
def test_biases_and_sinks_are_loaded_under_another_layout(groups, world_tmp_path, layout):
    engine, alone, again = (
        TrainEngine(GPT_OSS, groups[name], optim=ADAM, total_steps=9, seed=seed)
        for name, seed in ((layout, 3), ("alone", 4), (layout, 5))
    )
    train(engine, make_batch(), 2)
    save_sharded(engine, world_tmp_path / "actor", groups[layout])
    load_sharded(alone, world_tmp_path / "actor")
    assert_slices(engine, engine.named_shards(), weights(alone))
    load_sharded(again, world_tmp_path / "actor")
    for name, tensor in engine.named_shards().items():
        assert torch.equal(tensor, again.named_shards()[name]), name
    assert train(again, make_batch(), 1) == train(engine, make_batch(), 1)


@pytest.mark.ci_world(2)
@pytest.mark.parametrize(
    ("layout", "optim"),
    [pytest.param(*layout.values, ADAM, marks=layout.marks) for layout in SOME_LAYOUTS]
    + [pytest.param("dp2", SGD, marks=pytest.mark.world(2), id="dp2-sgd")],
)
def test_same_layout_goes_on_bitwise(groups, world_tmp_path, layout, optim):
    batch = make_batch()
    engine = TrainEngine(SHAPE, groups[layout], optim=optim, total_steps=9, seed=3)
    train(engine, batch, 2)
    save_sharded(engine, world_tmp_path / "actor", groups[layout])
    again = TrainEngine(SHAPE, groups[layout], optim=optim, total_steps=9, seed=4)
    load_sharded(again, world_tmp_path / "actor")
    assert train(engine, batch, 2) == train(again, batch, 2)
    for name, tensor in engine.named_shards().items():
        assert torch.equal(tensor, again.named_shards()[name]), name


@pytest.mark.world(1)
@pytest.mark.parametrize("optim", [ADAM, SGD], ids=["adam", "sgd"])
def test_a_run_goes_on_with_another_learning_rate(groups, world_tmp_path, optim):
    other = optim.model_copy(update={"lr": optim.lr / 2, "min_lr": optim.lr / 4, "lr_warmup_steps": 0})
    engine = TrainEngine(SHAPE, groups["alone"], optim=optim, total_steps=9, seed=3)
    again = TrainEngine(SHAPE, groups["alone"], optim=other, total_steps=9, seed=4)
    train(engine, make_batch(), 1)
    save_sharded(engine, world_tmp_path / "actor", groups["alone"])
    load_sharded(again, world_tmp_path / "actor")
    assert_slices(again, again.named_shards(), weights(engine))
    assert train(again, make_batch(), 1)["lr"] == other.lr and again.steps == 2


@pytest.mark.ci_world(2)
@pytest.mark.parametrize("layout", SOME_LAYOUTS)
def test_actor_weights_start_a_critic_and_a_reference(groups, world_tmp_path, layout):
    actor = TrainEngine(SHAPE, groups[layout], optim=ADAM, seed=3)
    save_sharded(actor, world_tmp_path / "actor", groups[layout])

    reference = TrainEngine(SHAPE, groups[layout], seed=9)
    load_sharded(reference, world_tmp_path / "actor", optimizer=False)
    for name, tensor in actor.named_shards().items():
        assert torch.equal(tensor, reference.named_shards()[name])

    critic = value_engine(groups["alone"], ADAM)
    head = critic.named_shards()["value_head.weight"].clone()
    with pytest.raises(InputError, match="value_head"):
        load_sharded(critic, world_tmp_path / "actor", optimizer=False)
    load_sharded(critic, world_tmp_path / "actor", optimizer=False, strict=False)
    assert torch.equal(critic.named_shards()["value_head.weight"], head)
    body = {name: tensor for name, tensor in actor.named_shards().items() if name != "output_layer.weight"}
    if groups[layout].layout.tp == 1:
        for name, tensor in body.items():
            assert torch.equal(tensor, critic.named_shards()[name])


@pytest.mark.slow
@pytest.mark.ci_world(2)
def test_bfloat16_keeps_its_fp32_weights(groups, world_tmp_path, world):
    make = lambda seed: TrainEngine(  # noqa: E731
        SHAPE, groups["alone"], optim=OptimConfig(lr=1e-4), dtype=torch.bfloat16, seed=seed
    )
    engine, again, batch = make(3), make(4), make_batch()
    train(engine, batch, 2)
    folder = world_tmp_path / f"rank{world.rank}"
    save_sharded(engine, folder, groups["alone"])
    load_sharded(again, folder)
    for _ in range(6):  # steps this small show in bf16 only if the fp32 weights were kept
        assert train(engine, batch, 1) == train(again, batch, 1)
    for name, tensor in engine.named_shards().items():
        assert torch.equal(tensor, again.named_shards()[name])


@pytest.mark.ci_world(2)
def test_what_is_no_checkpoint_is_refused(groups, world_tmp_path, world):
    engine = TrainEngine(SHAPE, groups["alone"], seed=3)
    with pytest.raises(InputError, match="cannot load checkpoint"):
        load_sharded(engine, world_tmp_path / "nothing")

    folder = world_tmp_path / f"rank{world.rank}"
    save_sharded(engine, folder, groups["alone"])
    wider = TrainEngine(WIDER, groups["alone"], seed=3)
    with pytest.raises(InputError, match="shape"):
        load_sharded(wider, folder)

    (folder / ".metadata").write_bytes(pickle.dumps(Attack(folder / "touched")))
    with pytest.raises(InputError, match="hpcrl never writes"):
        load_sharded(engine, folder)
    assert not (folder / "touched").exists()


def elsewhere(folder: Path, metadata: Metadata) -> None:
    """A part in a file that was there before, such as somebody's key."""
    (folder.parent / "key").write_bytes((folder / "__0_0.distcp").read_bytes())
    for part in metadata.storage_data.values():
        part.relative_path = "../key"


def absolute(folder: Path, metadata: Metadata) -> None:
    elsewhere(folder, metadata)
    for part in metadata.storage_data.values():
        part.relative_path = str(folder.parent / "key")


def linked(folder: Path, metadata: Metadata) -> None:
    (folder / "__0_0.distcp").rename(folder.parent / "key")
    (folder / "__0_0.distcp").symlink_to(folder.parent / "key")


def piped(folder: Path, metadata: Metadata) -> None:
    (folder / "__0_0.distcp").unlink()
    os.mkfifo(folder / "__0_0.distcp")


def common_linked(folder: Path, metadata: Metadata) -> None:
    (folder / "common.pt").rename(folder.parent / "key")
    (folder / "common.pt").symlink_to(folder.parent / "key")


def object_in_place_of_a_tensor(folder: Path, metadata: Metadata) -> None:
    """Torch unpickles those, whatever they are."""
    torch.save(Attack(folder / "touched"), folder / "__9_0.distcp")
    part = _StorageInfo("__9_0.distcp", 0, (folder / "__9_0.distcp").stat().st_size)
    for name, entry in metadata.state_dict_metadata.items():
        found = BytesStorageMetadata()
        found.size = entry.size  # which megatron compares first
        metadata.state_dict_metadata[name] = found
        metadata.storage_data[MetadataIndex(name)] = part


def bomb(folder: Path, metadata: Metadata) -> None:
    """A record that unpacks to a thousand times its size."""
    for index in metadata.storage_data:
        name = f"__9_{len(list(folder.iterdir()))}.distcp"
        with zipfile.ZipFile(folder / name, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("archive/data.pkl", b"0" * 10**6)
        metadata.storage_data[index] = _StorageInfo(name, 0, (folder / name).stat().st_size)


def common_bomb(folder: Path, metadata: Metadata) -> None:
    with zipfile.ZipFile(folder / "common.pt", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", b"0" * 10**6)


def behind_the_end(folder: Path, metadata: Metadata) -> None:
    for part in metadata.storage_data.values():
        part.length += 10**9


def packed(folder: Path, metadata: Metadata) -> None:
    for part in metadata.storage_data.values():
        part.transform_descriptors = ("zstd",)


ATTACKS = {
    elsewhere: "expected one in",
    absolute: "expected one in",
    linked: "no links",
    piped: "no links",
    common_linked: "no links",
    object_in_place_of_a_tensor: "expected a tensor",
    bomb: "expected no compression",
    common_bomb: "expected no compression",
    behind_the_end: "after them",
    packed: "has transforms",
}


@pytest.mark.world(1)
@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.__name__)
def test_a_checkpoint_from_a_stranger_is_only_read(groups, tmp_path, attack):
    engine = TrainEngine(SHAPE, groups["alone"], seed=3)
    folder = tmp_path / "actor"
    save_sharded(engine, folder, groups["alone"])
    with open(folder / ".metadata", "rb") as file:
        metadata = pickle.load(file)
    attack(folder, metadata)
    with open(folder / ".metadata", "wb") as file:
        pickle.dump(metadata, file)
    with pytest.raises(InputError, match=ATTACKS[attack]):
        load_sharded(engine, folder)
    assert not (folder / "touched").exists()


class Attack:
    """A pickle that would run a command."""

    def __init__(self, path) -> None:
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)
