"""Hugging Face models under every layout: `transformers`' log-probs, weights back bit for bit; after training, too."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from hpcrl.batch.data_proto import DataProto
from hpcrl.model.families.config_json import read_shape
from hpcrl.model.hf_export import plan_files, write_beside
from hpcrl.model.hf_files import INDEX
from hpcrl.workers.model_worker import ModelWorker
from hpcrl.workers.weight_transfer import ExportWorker
from tests.model.families import EXPERTS, MODELS, STATES, make_model
from tests.mpi.layouts import (
    EXPERT_LAYOUTS,
    LAYOUTS,
    SGD,
    Policy,
    make_batch,
    part_of,
    policy_loss,
    role_groups,
    seeded,
)

OF_FOUR = [layout for layout in (*LAYOUTS, *EXPERT_LAYOUTS) if 4 in layout.marks[0].args]
CASES = [(name, layout) for name in MODELS for layout in LAYOUTS]
CASES += [(name, layout) for name in EXPERTS for layout in EXPERT_LAYOUTS]
CASES = [(name, layout) for name, layout in CASES if name not in STATES or "cp" not in str(layout.values[0])]


# Families differ in the tensors that are sliced: on 2 ranks each is sliced by rows, and by experts where it has any.
# Two of them meet every layout of 2 ranks, and share those of 4 in which weights are sliced in two ways.
EVERYWHERE = ("llama-3.1", "qwen3-moe")
SLICED = {1: (), 2: ("tp2", "tp2ep2")}
MORE = (
    *(("qwen2-tied", "pp2vpp2"), ("deepseek-v3", "pp2vpp2")),
    *(("qwen2-tied", "tp2pp2"), ("deepseek-v3", "tp2ep2etp2")),
)
# Their weights are sliced as they are on fewer ranks.
UNSLICED = ("tp2dp2", "pp2dp2", "pp2vpp2", "tp2cp2", "pp2cp2", "cp4", "cp2dp2", "ep2", "cp2ep2")
QUICK = {1: ("single",), 2: ("tp2", "tp2ep2"), 4: ("tp2pp2", "pp2cp2vpp2", "tp2ep2etp2", "pp2vpp2ep2")}


def case(name: str, layout) -> object:
    place, marks, size = layout.values[0], list(layout.marks), layout.marks[0].args[0]
    if size == 4:
        shared = EVERYWHERE[OF_FOUR.index(layout) % 2 if layout in LAYOUTS else 1]
        usual = name == shared and place not in UNSLICED
    else:  # what a family's tensors are is seen where they are sliced
        usual = name in EVERYWHERE or (place in SLICED[size] and (place != "tp2" or name not in EXPERTS))
    if not usual and (name, place) not in MORE:
        marks.append(pytest.mark.exhaustive)
    elif place not in QUICK[size] or (name, place) in MORE or name in ("deepseek-v2", "deepseek-v2-lite"):
        marks.append(pytest.mark.slow)
    return pytest.param(name, place, marks=marks)


@pytest.mark.parametrize(("name", "layout"), [case(name, layout) for name, layout in CASES])
def test_transformers_agrees_before_and_after_training(world, world_tmp_path: Path, name: str, layout: str) -> None:
    theirs, source, target = make_model(name), world_tmp_path / "source", world_tmp_path / "target"
    if world.rank == 0:
        theirs.save_pretrained(source, max_shard_size="20KB")
        if name in STATES:
            add_further_layers(source)
        (world_tmp_path / "trained").mkdir()
        target.mkdir()
    world.barrier()
    groups, batch, shape = role_groups(world.rank, world.size)[layout], make_batch(), read_shape(source)
    worker = Policy(groups, shape, seeded(1), optim=SGD, total_updates=1)
    worker.load(str(source), weights_only=True)
    check(worker, batch, theirs)
    check_written_back(world, worker, source, target)

    worker.engine.train(part_of(batch, groups), max_tokens=60, loss=policy_loss, entropy=True)
    write(world, worker, world_tmp_path / "trained", source)
    trained = transformers.AutoModelForCausalLM.from_pretrained(world_tmp_path / "trained").eval()
    changed = [not torch.equal(a, b) for a, b in zip(theirs.parameters(), trained.parameters(), strict=True)]
    assert all(changed)
    check(worker, batch, trained)


def add_further_layers(folder: Path) -> None:
    """Add tensors of layers that predict further tokens, as Qwen's files have them."""
    further = {f"mtp.{name}": torch.randn(3, 4, dtype=torch.bfloat16) for name in ("fc.weight", "layers.0.x.weight")}
    save_file(further, folder / "mtp.safetensors")
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"] |= dict.fromkeys(further, "mtp.safetensors")
    (folder / INDEX).write_text(json.dumps(index))


def check(worker: ModelWorker, batch: DataProto, theirs: transformers.PreTrainedModel) -> None:
    """That the replica's samples get the log-probs that `theirs` gives them. Its TP and CP ranks, which have all of
    them, share the rows."""
    mine, coord, layout = part_of(batch, worker.groups), worker.groups.coord, worker.groups.layout
    found = worker.engine.log_probs(mine, max_tokens=60, temperature=1.0)
    if not worker.groups.is_last_stage:
        return
    ids, log_probs = mine.fetch("input_ids"), found["log_probs"]
    for row in range(coord.cp * layout.tp + coord.tp, len(mine), layout.tp * layout.cp):
        sequence, ours = torch.from_numpy(ids.row(row)).long(), torch.from_numpy(log_probs.row(row))
        with torch.no_grad():
            logits = theirs(sequence.unsqueeze(0)).logits[0].float()
        expected = logits.log_softmax(-1)[:-1].gather(1, sequence[1:, None])[len(sequence) - 1 - len(ours) :, 0]
        torch.testing.assert_close(ours, expected, rtol=0, atol=1e-4)


def check_written_back(world, worker: ModelWorker, source: Path, target: Path) -> None:
    """That unchanged weights come back bit for bit."""
    write(world, worker, target, source)
    if world.rank == 0:
        before, after = tensors(source), tensors(target)
        assert before.keys() == after.keys()
        assert all(torch.equal(after[key], tensor) for key, tensor in before.items())


def write(world, worker: ModelWorker, folder: Path, like: Path) -> None:
    problem = ExportWorker(worker, world.comm).write(str(folder))
    assert problem is None
    world.barrier()
    if world.rank == 0:
        shape, size = worker.engine.shape, worker.groups.layout.size
        write_beside(folder, plan_files(shape, 4, size), shape, 4, "float32", like, None)
    world.barrier()


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}
