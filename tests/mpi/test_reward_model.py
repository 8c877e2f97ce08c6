"""The reward model and `hpcrl rm`: layouts agree, a resumed run is the uninterrupted one, right answers win."""

from __future__ import annotations

import json
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hpcrl.algorithms.value_loss import bradley_terry_loss
from hpcrl.batch.data_proto import DataProto, TensorBatch
from hpcrl.batch.ragged import Ragged
from hpcrl.config.schema import Config, OptimConfig
from hpcrl.controller.controller import Controller, run_program
from hpcrl.engine.checkpoint.store import load_path
from hpcrl.engine.engine import TrainEngine
from hpcrl.jobs.rm import RewardModel
from hpcrl.runtime.exits import InputError
from hpcrl.runtime.groups import RoleGroups, make_groups
from hpcrl.runtime.job import run_directory
from hpcrl.runtime.layout import Layout
from hpcrl.runtime.world import World
from hpcrl.workers.frozen import RewardModelWorker
from hpcrl.workers.supervised import PreferenceDataWorker
from tests.mpi.lab import run_job
from tests.mpi.layouts import SGD, SHAPE, SOME_LAYOUTS, assert_slices, gradients, make_batch, save_sharded

pytestmark = pytest.mark.ci_world(2)

ROOT = Path(__file__).parents[2]
NUM_PAIRS = 7


def reward_engine(groups: RoleGroups, head: str = "reward", optim: OptimConfig | None = SGD) -> TrainEngine:
    engine = TrainEngine(SHAPE, groups, head=head, optim=optim, seed=5)
    for name, weight in engine.named_shards().items():
        if name == f"{head}_head.weight":
            weight.normal_(0.0, 0.3, generator=torch.Generator().manual_seed(1))
    return engine


def pair_loss(outputs: dict[str, torch.Tensor], batch: TensorBatch):
    chosen, rejected = outputs["scores"].view(-1, 2).unbind(1)
    return bradley_terry_loss(chosen, rejected, NUM_PAIRS)


def part_of(batch: DataProto, groups: RoleGroups) -> DataProto:
    """This replica's pairs."""
    pairs = np.array_split(np.arange(NUM_PAIRS), groups.layout.dp)[groups.coord.dp]
    return batch[(2 * pairs[:, None] + [0, 1]).reshape(-1)]


@pytest.mark.parametrize("layout", SOME_LAYOUTS)
def test_layouts_agree(groups, layout):
    batch = make_batch(2 * NUM_PAIRS)
    mine = part_of(batch, groups[layout])
    engine, alone = reward_engine(groups[layout]), reward_engine(groups["alone"])
    found = engine.scores(mine, max_tokens=64)
    assert (found is not None) == groups[layout].is_last_stage
    if found is not None:
        expected = alone.scores(mine, max_tokens=10_000)
        assert expected.dtype == torch.float32 and expected.shape == (len(mine),) and expected.std() > 0.1
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)
    for _ in range(2):
        found = engine.train(mine, max_tokens=64, loss=pair_loss, unit=2)
        expected = alone.train(batch, max_tokens=10_000, loss=pair_loss, unit=2)
        assert expected["grad_norm"] > 1e-2
        assert found["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-4)
        assert_slices(engine, gradients(engine), gradients(alone))


@pytest.mark.world(1)
def test_the_score_is_read_at_the_last_token(groups):
    """A critic with the same weights says it before a token appended to the sequence."""
    batch = make_batch()
    ids = batch.fetch("input_ids")
    one_more = [[*ids.row(i), 3] for i in range(len(ids))]
    ones = Ragged.from_lengths(np.ones(len(ids), np.float32), np.ones(len(ids), np.int64))
    longer = DataProto({"input_ids": Ragged.from_rows(one_more, np.int32), "response_mask": ones})
    expected = reward_engine(groups["alone"], "value").values(longer, max_tokens=100)["values"]
    found = reward_engine(groups["alone"]).scores(batch, max_tokens=100)
    torch.testing.assert_close(found, torch.from_numpy(expected.values), rtol=0, atol=1e-5)


@pytest.mark.world(1)
def test_micro_batching_changes_nothing(groups):
    batch = make_batch(2 * NUM_PAIRS)
    whole = reward_engine(groups["alone"])
    expected = whole.train(batch, max_tokens=10_000, loss=pair_loss, unit=2)
    for max_tokens in (54, 80, 130):
        engine = reward_engine(groups["alone"])
        found = engine.train(batch, max_tokens=max_tokens, loss=pair_loss, unit=2)
        assert found["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-5)
        assert found["margin"].finish() == pytest.approx(expected["margin"].finish(), rel=1e-5)
        assert_slices(engine, gradients(engine), gradients(whole))


@pytest.fixture(scope="session")
def folder(world: World, tmp_path_factory) -> Path:
    """Countdown pairs, made once by rank 0; runs go beside them."""
    folder = world.broadcast_object(str(tmp_path_factory.mktemp("rm")) if world.rank == 0 else None)
    if world.rank == 0:
        tool = [sys.executable, str(ROOT / "tools" / "prepare_countdown.py"), "--out", folder]
        subprocess.run([*tool, "--sft-rows", "1", "--preference-rows", "6000"], check=True, capture_output=True)
    world.barrier()
    return Path(folder)


def make_config(folder: Path, name: str, placement: dict[str, Any], pairs: int = 64, **options: Any) -> Config:
    return RewardModel.schema().model_validate(
        {
            "run": {"name": name, "dir": str(folder / "runs")},
            "model": {"tokenizer": str(ROOT / "configs" / "tokenizer"), "hidden_size": 64, "ffn_hidden_size": 96},
            "placement": placement,
            "data": {
                "train_files": [str(folder / "preference.parquet")],
                "val_files": [str(folder / "preference_val.parquet")],
                "train_max_samples": pairs,
                "max_prompt_length": 16,
                "max_response_length": 18,
            },
            "rm": {"batch_size": 3, "max_token_len_per_gpu": 192, "eval_freq": 2, "eval_samples": 9, **options},
            "trainer": {"save_freq": 2},
        }
    )


def run(world: World, config: Config) -> dict[int, dict[str, float]]:
    """Lines of metrics by step, without times and sizes."""
    run_job(world, "rm", config)
    lines = [json.loads(line) for line in (run_directory(config) / "metrics.jsonl").read_text().splitlines()]
    apart = ("timing_s/", "perf/", "memory/")
    return {line["step"]: {k: v for k, v in line.items() if not k.startswith(apart)} for line in lines}


def placements(size: int) -> dict[str, dict[str, Any]]:
    named = {
        1: {},
        2: {"tp2": {"tp": 2}, "pp2": {"pp": 2}, "dp2": {}},
        4: {"tp2pp2": {"tp": 2, "pp": 2}, "dp4": {}},  # of three pairs, one replica of four gets none
    }[size]
    everywhere = {name: {"reward": sizes} for name, sizes in named.items()}
    if size == 4:
        everywhere["without_rank_0"] = {"pools": {"late": "1-3"}, "reward": {"pool": "late"}}
    return everywhere


@pytest.mark.slow
def test_runs_on_any_layout_agree(world, folder):
    options = {"total_training_steps": 3, "optim": {"optimizer": "sgd", "lr": 0.5}}
    expected = run(world, make_config(folder, "one", {"pools": {"all": "0"}}, **options))
    assert expected[1]["train/loss"] == pytest.approx(np.log(2), abs=1e-6)  # the head starts at 0
    for name, placement in placements(world.size).items():
        found = run(world, make_config(folder, name, placement, **options))
        for step, line in expected.items():
            assert found[step].keys() == line.keys()
            for key, value in line.items():
                # rewards of both signs cancel in their means, so that a share of the mean bounds nothing
                assert found[step][key] == pytest.approx(value, rel=1e-4, abs=1e-5), (name, step, key)


def test_resumed_equals_uninterrupted_bitwise(world, folder):
    placement = {"reward": {1: {}, 2: {"pp": 2}, 4: {"tp": 2}}[world.size]}
    make = lambda name, steps: make_config(folder, name, placement, total_training_steps=steps)  # noqa: E731
    straight = run(world, make("straight", 4))
    run(world, make("halted", 2))
    assert run(world, make("halted", 4)) == straight


@pytest.mark.slow
@pytest.mark.world(2)
def test_learns_what_is_right_and_its_checkpoint_scores(world, folder):
    """Accuracy on held-out problems; a frozen reward model of another layout gives the numbers of the trained one."""
    options = {
        "batch_size": 64,
        "max_token_len_per_gpu": 8192,
        "total_training_steps": 40,
        "optim": {"lr": 3e-3, "lr_warmup_steps": 5},
        "eval_freq": 40,
        "eval_samples": 300,
    }
    config = make_config(folder, "learned", {"reward": {"pp": 2}}, pairs=-1, **options)
    last = run(world, config)[40]
    assert last["val/accuracy"] > 0.65
    assert last["val/margin"] > 0.5 and last["val/loss"] < 0.6

    inputs = RewardModel(world, config, None, Namespace()).read_inputs()
    layouts = {"reward": Layout((0, 1))}  # two replicas
    worker = RewardModelWorker(make_groups(layouts, world.rank)["reward"], inputs.shape, config)
    checkpoint = world.broadcast_object(load_path(run_directory(config), print))
    layouts["data"] = layouts["reward"]
    workers = {"reward": worker, "data": PreferenceDataWorker(layouts["data"], world.rank, inputs, config)}

    def program(controller: Controller) -> np.ndarray:
        controller["reward"].load_frozen(str(checkpoint)).get()
        rows = np.arange(300)
        assignment = np.random.default_rng(0).integers(0, 2, 600).astype(np.int32)
        samples = {"row": np.repeat(rows, 2), "side": np.tile([0, 1], 300), "replica_of_2": assignment}
        batch = DataProto({}, samples, {"split": "val"})
        batch = batch.union(controller["data"].load(batch).get())
        return controller["reward"].compute_rm_score(batch).get().samples["rm_score"]

    scores = run_program(world, workers, {name: type(of) for name, of in workers.items()}, layouts, program)
    if world.rank == 0:
        assert scores.dtype == np.float32
        margin = scores[0::2] - scores[1::2]
        assert margin.mean() == pytest.approx(last["val/margin"], abs=1e-4)
        assert (margin > 0).mean() == pytest.approx(last["val/accuracy"], abs=1e-6)


def test_weights_of_another_head_are_no_reward_model(world, folder, world_tmp_path):
    """A critic's number means something else; an actor's checkpoint has no `reward` at all."""
    config = make_config(folder, "refused", {})
    inputs = RewardModel(world, config, None, Namespace()).read_inputs()
    groups = make_groups({"reward": Layout(tuple(range(world.size)))}, world.rank)["reward"]
    save_sharded(TrainEngine(inputs.shape, groups, head="value"), world_tmp_path / "reward", groups)
    worker = RewardModelWorker(groups, inputs.shape, config)
    with pytest.raises(InputError, match="reward_head"):
        worker.load_frozen(str(world_tmp_path))
    with pytest.raises(InputError, match="cannot load checkpoint"):
        worker.load_frozen(str(world_tmp_path / "nothing"))
