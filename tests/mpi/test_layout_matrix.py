"""Every layout of 1 to 8 ranks trains as one rank does: policies under the PPO and SFT losses, and critics.

In CI the layouts of 8 ranks in which any two sizes above 1 meet that have not met on fewer, of which
tests/mpi/test_engine.py has those of 2 and 4; with --exhaustive the whole matrix of every world.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import cache

import numpy as np
import pytest
import torch

from hpcrl.algorithms.metrics import Metric, finish, merge
from hpcrl.batch.data_proto import DataProto
from hpcrl.batch.ragged import Ragged
from hpcrl.config.derive import check
from hpcrl.engine.engine import TrainEngine
from hpcrl.jobs.train import Train
from hpcrl.model.params import SCALAR_HEADS, role_layout
from hpcrl.model.shape import ModelShape
from hpcrl.runtime.exits import InputError
from hpcrl.runtime.groups import GroupCache, RoleGroups, make_groups
from hpcrl.runtime.layout import Layout
from hpcrl.runtime.world import World
from hpcrl.workers.actor import ActorWorker, CriticWorker
from hpcrl.workers.model_worker import ModelWorker
from hpcrl.workers.supervised import SftActorWorker
from tests.mpi.layouts import EXPERT_SIZES, MIXTURE, SHAPE, SIZES, assert_slices, gradients, make_batch, part_of

AXES: dict[str, Sequence[int]] = {
    "tp": (1, 2, 4),
    "pp": (1, 2, 4),
    "vpp": (1, 2),
    "cp": (1, 2, 4, 8),
    "ep": (1, 2, 4, 8),
    "etp": (1, 2, 4),
}
SHAPES = {"dense": SHAPE, "mixture": MIXTURE}
NUMBER = {"dense": {1: 1, 2: 5, 4: 13, 8: 24}, "mixture": {1: 1, 2: 11, 4: 55, 8: 162}}  # layouts, by ranks
SGD = {"optimizer": "sgd", "lr": 0.05, "clip_grad": 0.0, "weight_decay": 0.0}
Pair = tuple[tuple[str, int], tuple[str, int]]


def matrix(shape: ModelShape, size: int) -> Iterator[Layout]:
    """All that the model takes."""
    for sizes in itertools.product(*AXES.values()):
        try:
            yield role_layout(shape, "actor", ranks=tuple(range(size)), **dict(zip(AXES, sizes, strict=True)))
        except (InputError, ValueError):
            continue


def pairs(layout: Layout) -> set[Pair]:
    """Any two of its sizes above 1."""
    sizes = [(axis, getattr(layout, axis)) for axis in AXES]
    return set(itertools.combinations([(axis, size) for axis, size in sizes if size > 1], 2))


@cache
def covering() -> list[Layout]:
    """Of the mixture's on 8 ranks: greedily those that bring most pairs that have not been met."""
    smaller = [
        (size, sizes) for table in (SIZES, EXPERT_SIZES) for size, named in table.items() for sizes in named.values()
    ]
    met = set().union(*(pairs(Layout(tuple(range(size)), **sizes)) for size, sizes in smaller))
    chosen, left = [], list(matrix(MIXTURE, 8))
    while new := max(left, key=lambda layout: len(pairs(layout) - met), default=None):
        if pairs(new) <= met:
            break
        chosen.append(new)
        met |= pairs(new)
        left.remove(new)
    return chosen


def name_of(layout: Layout) -> str:
    return "".join(f"{axis}{getattr(layout, axis)}" for axis in AXES if getattr(layout, axis) > 1) or "dp"


SAMPLES = 9
CONFIG = Train.schema().model_validate(
    {
        "model": {"moe": {"aux_loss_coeff": 0.3, "z_loss_coeff": 0.1}},
        "data": {"train_files": ["none"], "max_prompt_length": 30, "max_response_length": 30},
        "actor": {
            "ppo_mini_batch_size": 5,
            "ppo_max_token_len_per_gpu": 64,
            "entropy_coeff": 0.1,
            "use_kl_loss": True,
            "optim": SGD,
        },
        "critic": {"ppo_max_token_len_per_gpu": 64, "optim": SGD},
        "sft": {"max_token_len_per_gpu": 64, "optim": SGD},
        "rollout": {"temperature": 0.7},
    }
)
LOSSES: dict[str, Callable[[ModelWorker, DataProto], list[dict[str, Metric]]]] = {
    "ppo": lambda worker, batch: worker.update_actor(batch).meta_info["metrics"],
    "value": lambda worker, batch: worker.update_critic(batch),
    "sft": lambda worker, batch: [worker.update(batch), worker.update(batch)],
}


def worker_of(loss: str, groups: RoleGroups, shape: ModelShape) -> ModelWorker:
    derived = check(CONFIG, 1)
    if loss == "ppo":
        return ActorWorker(groups, shape, CONFIG, derived, total_steps=1)
    if loss == "sft":
        return SftActorWorker(groups, shape, CONFIG)
    critic = CriticWorker(groups, shape, CONFIG, derived, total_steps=1)
    for name, weight in critic.engine.named_shards().items():
        if name == SCALAR_HEADS["value"]:
            weight.normal_(0.0, 0.3, generator=torch.Generator().manual_seed(1))
    return critic


def samples(alone: RoleGroups, shape: ModelShape) -> DataProto:
    """With old and reference log-probs near the policy's own, so that ratios are cut off on both sides."""
    batch, generator = make_batch(SAMPLES), torch.Generator().manual_seed(9)
    policy = TrainEngine(shape, alone, seed=CONFIG.run.seed)
    now = policy.log_probs(batch, max_tokens=10_000, temperature=CONFIG.rollout.temperature)["log_probs"]

    def near(spread: float) -> Ragged:
        noise = torch.randn(len(now.values), generator=generator).numpy()
        return Ragged.from_lengths(now.values + spread * noise, now.lengths)

    columns = {"old_log_probs": near(0.3), "ref_log_prob": near(0.3), "values": near(1.0), "returns": near(1.0)}
    places = {"prompt": np.arange(SAMPLES), "sample_index": np.zeros(SAMPLES, dtype=np.int32)}
    return DataProto(batch.tokens | columns, places, {"step": 1, "num_prompts": SAMPLES})


class Alone:
    """What one rank makes of the samples under each loss: metrics, last gradients and weights."""

    def __init__(self, world: World, shape: ModelShape) -> None:
        layouts = {f"alone{rank}": Layout((rank,)) for rank in range(world.size)}
        (self.groups,) = make_groups(layouts, world.rank).values()
        self.shape, self.batch = shape, samples(self.groups, shape)
        self._trained: dict[str, tuple[list[dict[str, float]], ModelWorker]] = {}

    def trained(self, loss: str) -> tuple[list[dict[str, float]], ModelWorker]:
        if loss not in self._trained:
            worker = worker_of(loss, self.groups, self.shape)
            found = LOSSES[loss](worker, self.batch)
            self._trained[loss] = [finish(of_mini) for of_mini in found], worker
        return self._trained[loss]


@pytest.fixture(scope="module")
def alone(world: World) -> dict[str, Alone]:
    return {name: Alone(world, shape) for name, shape in SHAPES.items()}


@pytest.fixture(scope="module")
def cache_of_groups(world: World) -> GroupCache:
    return GroupCache(world.rank)


def assert_trains_as_one_rank(world: World, cache: GroupCache, layout: Layout, alone: Alone, loss: str) -> None:
    """Two optimizer steps, PPO's and the critic's on mini-batches of 5 and 4 prompts, SFT's on all: the same metrics,
    among them the gradient's norm, the same gradients of the second step, the same weights."""
    (groups,) = make_groups({"actor": layout}, world.rank, cache).values()
    worker = worker_of(loss, groups, alone.shape)
    mine = LOSSES[loss](worker, part_of(alone.batch, groups))
    expected, one = alone.trained(loss)
    assert len(mine) == len(expected) == 2
    for number, wanted in enumerate(expected):
        told = world.all_gather_object(mine[number] if groups.is_leader else {})
        assert _role_free(finish(merge(told))) == pytest.approx(_role_free(wanted), rel=1e-4, abs=1e-5)
    assert_slices(worker.engine, gradients(worker.engine), gradients(one.engine))
    assert_slices(worker.engine, worker.engine.named_shards(), one.engine.named_shards())


def _role_free(metrics: dict[str, float]) -> dict[str, float]:
    """What the engine itself tells, such as the gradient's norm, is under the role's name, which differs here."""

    def of_engine(key: str) -> bool:
        return key.endswith(("/grad_norm", "/lr", "/skipped_updates")) or "/moe_" in key

    return {key.partition("/")[2] if of_engine(key) else key: value for key, value in metrics.items()}


@pytest.mark.slow
@pytest.mark.world(8)
@pytest.mark.parametrize("layout", covering(), ids=name_of)
def test_any_two_sizes_meet(world, cache_of_groups, alone, layout):
    """The losses take turns: each meets every size, but not every pair of them."""
    loss = list(LOSSES)[covering().index(layout) % len(LOSSES)]
    assert_trains_as_one_rank(world, cache_of_groups, layout, alone["mixture"], loss)


@pytest.mark.exhaustive
@pytest.mark.world(1, 2, 4, 8)
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("name", SHAPES)
def test_every_layout(world, cache_of_groups, alone, name, loss):
    layouts = list(matrix(SHAPES[name], world.size))
    assert len(layouts) == NUMBER[name][world.size]
    for layout in layouts:
        assert_trains_as_one_rank(world, cache_of_groups, layout, alone[name], loss)
