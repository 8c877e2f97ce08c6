"""What an update and log-probs copy to and from a device, wait for and launch, counted on the strict device.

On a GPU each wait empties the queue of launches, so that the device is idle until the host has launched more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

from hpcrl.algorithms.aggregation import LossNorm
from hpcrl.algorithms.metrics import finish
from hpcrl.batch.data_proto import DataProto
from hpcrl.batch.ragged import Ragged
from hpcrl.config.derive import check
from hpcrl.config.schema import Config, OptimConfig, RecomputeConfig
from hpcrl.engine.engine import TrainEngine
from hpcrl.model.shape import Lora, ModelShape
from hpcrl.runtime.groups import RoleGroups
from hpcrl.workers.actor_objective import ActorObjective
from tests.mpi.layouts import GPT_OSS, MIXTURE, ROUTER_LOSSES, SGD, SHAPE
from tests.strict_device.load import Counts, in_place_of_cuda, load_on_all_ranks

pytestmark = pytest.mark.ci_world(2)

LENGTH, PROMPT = 16, 10  # tokens of each sample, which need no padding, and of its prompt


class Work(NamedTuple):
    samples: int
    micro_batches: int
    layers: int = 2


@pytest.fixture(scope="module")
def device(world: Any) -> Iterator[torch.device]:
    device = load_on_all_ranks(world)
    with in_place_of_cuda(device):
        yield device


@pytest.fixture(scope="module")
def objective() -> ActorObjective:
    actor = {"entropy_coeff": 0.3, "use_kl_loss": True}
    data = {"train_files": ["none"], "max_response_length": LENGTH - PROMPT}
    sections = {"data": data, "actor": actor, "algorithm": {"adv_estimator": "grpo"}, "rollout": {"n": 2}}
    config = Config.model_validate(sections)
    return ActorObjective(config, check(config, 1))


@pytest.fixture
def counted(
    groups: dict[str, RoleGroups],
    device: torch.device,
    objective: ActorObjective,
    monkeypatch: pytest.MonkeyPatch,
) -> Callable[..., tuple[Counts, Counts]]:
    # Megatron keeps this number where the first model of a process has been.
    monkeypatch.setattr(MoEAuxLossAutoScaler, "main_loss_backward_scale", None)

    def counted(
        work: Work, optim: OptimConfig = SGD, shape: ModelShape = SHAPE, layout: str = "alone", **engine_options: Any
    ) -> tuple[Counts, Counts]:
        """Of an update, its metrics included, and of log-probs and entropies."""
        shape = replace(shape, num_layers=work.layers)
        engine = TrainEngine(shape, groups[layout], optim=optim, **engine_options)
        batch = samples(work.samples)
        options: dict[str, Any] = {"max_tokens": LENGTH * work.samples // work.micro_batches, "temperature": 0.7}
        norm = LossNorm(float(work.samples * (LENGTH - PROMPT)), float(work.samples))

        def update() -> None:
            metrics = engine.train(batch, loss=objective.normalised(norm, key=(0, 0)), entropy=True, **options)
            finish({name: metric for name, metric in metrics.items() if isinstance(metric, tuple)})

        update()  # Adam's first step makes its state
        begin = Counts.now()
        update()
        middle = Counts.now()
        engine.log_probs(batch, entropy=True, **options)
        return middle.since(begin), Counts.now().since(middle)

    return counted


def samples(number: int) -> DataProto:
    generator = np.random.default_rng(0)
    lengths = np.full(number, LENGTH)
    ids = generator.integers(0, SHAPE.vocab_size, number * LENGTH, dtype=np.int32)
    columns = ("response_mask", "old_log_probs", "ref_log_prob", "advantages", "rollout_log_probs")
    tokens = {
        name: Ragged.from_lengths(np.ones(number * (LENGTH - PROMPT), np.float32), lengths - PROMPT) for name in columns
    }
    places = {"prompt": np.arange(number), "sample_index": np.zeros(number, np.int64)}
    return DataProto({"input_ids": Ragged.from_lengths(ids, lengths), **tokens}, places)


WORKS = [Work(2, 1), Work(6, 1), Work(4, 2), Work(8, 4), Work(2, 1, layers=4)]


def test_transfers_and_waits_do_not_depend_on_samples_and_layers(counted):
    found = {work: counted(work) for work in WORKS}
    for work, (update, log_probs) in found.items():
        # of a micro-batch: its index tensors, and its columns for the loss
        assert update.to_device == 2 * work.micro_batches
        # of an update: the gradient norm, and all metrics
        assert update.to_host == update.synchronisations == 2
        assert log_probs.to_device == work.micro_batches
        assert log_probs.to_host == log_probs.synchronisations == 2  # the two columns
    launches = {work: (update.launches, log_probs.launches) for work, (update, log_probs) in found.items()}
    assert launches[Work(2, 1)] == launches[Work(6, 1)]
    for one, two, four in zip(*(launches[Work(2 * micros, micros)] for micros in (1, 2, 4)), strict=True):
        assert four - two == 2 * (two - one)
    # of a layer and micro-batch, by the plain operations of which kernels run several in one launch on a GPU
    per_layer = [(deep - flat) // 2 for deep, flat in zip(launches[WORKS[-1]], launches[WORKS[0]], strict=True)]
    assert per_layer[0] <= 170 and per_layer[1] <= 60


EXPERTS = replace(MIXTURE, dense_layers=())
LORA = Lora(rank=8, alpha=16.0, targets=("q_proj", "gate_proj", "up_proj", "down_proj"))
RECOMPUTE = RecomputeConfig(granularity="selective", modules=["moe"])


@pytest.mark.parametrize(
    "shape, options",
    [(EXPERTS, ROUTER_LOSSES), (EXPERTS, {"recompute": RECOMPUTE}), (GPT_OSS, {}), (EXPERTS, {"lora": LORA})],
    ids=["losses", "recompute", "biases", "lora"],
)
def test_experts_wait_in_no_layer(counted, shape, options):
    for layers in (2, 4):
        update, log_probs = counted(Work(2, 1, layers), shape=shape, **options)
        assert update.to_device == 2 and update.to_host == update.synchronisations == 3  # one for the routers' metrics
        assert log_probs.to_device == 1 and log_probs.to_host == log_probs.synchronisations == 2


def test_experts_of_several_ranks_wait_once_in_a_layer(counted):
    """And where this test's backend copies what it sends through the host: the numbers of rows, the rows, their weights
    and the outputs; in the backward pass the gradients of the last three."""
    flat, deep = (counted(Work(2, 1, layers), shape=EXPERTS, layout="ep2") for layers in (2, 4))
    update, log_probs = ((more.to_host - less.to_host) // 2 for less, more in zip(flat, deep, strict=True))
    assert (update, log_probs) == (1 + 4 + 3, 1 + 4)


def test_launches_of_a_micro_batch_do_not_depend_on_the_number_of_experts(counted):
    few, many = (
        [counted(Work(2 * micros, micros), shape=replace(EXPERTS, num_experts=experts)) for micros in (1, 2)]
        for experts in (8, 16)
    )
    of_micro_batch = [
        [two.launches - one.launches for one, two in zip(*each, strict=True)]  # those of the optimizer drop out
        for each in (few, many)
    ]
    assert of_micro_batch[0] == of_micro_batch[1]


def test_adam_waits_as_often_as_sgd(counted):
    """In addition this test's backend copies the buffers of gradients and of weights through the host."""
    found = [counted(work, OptimConfig(lr=1e-3))[0] for work in (Work(4, 1), Work(4, 2), Work(4, 1, layers=4))]
    assert [each.to_device for each in found] == [4, 6, 4]
    assert {each.synchronisations for each in found} == {6}
