"""One mini-batch, cut up over replicas, stages and micro-batches: every loss and its gradients are those of one rank
that takes it whole."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from hpcrl.algorithms.aggregation import MODES
from hpcrl.algorithms.metrics import Metric, finish, merge
from hpcrl.batch.data_proto import DataProto, TensorBatch
from hpcrl.batch.ragged import Ragged
from hpcrl.config.derive import check
from hpcrl.config.schema import Config
from hpcrl.engine.microbatch import needed_count
from hpcrl.runtime.world import World
from hpcrl.workers.actor_objective import ActorObjective
from hpcrl.workers.model_worker import ModelWorker
from tests.mpi.layouts import SGD, SHAPE, Policy, gradients, role_groups, seeded, slice_errors

pytestmark = pytest.mark.world(4)

# clip_cov and kl_cov compare tokens with the others of their micro-batch
LOSSES = "vanilla gspo sapo gpg cispo dppo_tv dppo_kl dro geo_mean bypass_mode".split()
# samples of each replica: as they come, and with one replica that has none
SHARES = {
    "alone": [17],
    "dp2_of_two": [5, 12],
    "dp4": [3, 9, 0, 5],
    "tp2dp2": [17, 0],
    "pp2dp2": [4, 13],
}
COUNTS = (1, 3, 7)  # micro-batches of the replica with the most
SPLITS = [(layout, count) for layout in SHARES for count in COUNTS][1:]  # the first is what all are compared with
CELLS = [(loss, mode) for loss in LOSSES for mode in MODES]
WHOLE = 10_000  # tokens, more than there are
TWO_LAYERS = replace(SHAPE, num_layers=2)


def covering(loss: str, mode: str) -> list[tuple[str, int]]:
    """Three splits of each cell, so that each loss and each mode meets every split."""
    first = 3 * (LOSSES.index(loss) + MODES.index(mode))
    return [SPLITS[number % len(SPLITS)] for number in range(first, first + 3)]


def objective_of(loss: str, mode: str) -> ActorObjective:
    actor = {
        "clip_ratio_low": 0.15,
        "clip_ratio_high": 0.25,
        "clip_ratio_c": 1.8,
        "loss_agg_mode": mode,
        "entropy_coeff": 0.3,
        "use_kl_loss": True,
        "kl_loss_coef": 0.4,
    }
    correction: dict[str, Any] = {}
    if loss == "bypass_mode":
        rejection = {"rollout_rs": "token_k1", "rollout_rs_threshold": "0.6_1.6"}
        correction = {"bypass_mode": True, "loss_type": "reinforce", "rollout_is": "sequence", **rejection}
    else:
        actor["policy_loss"] = {"loss_mode": loss, "dro_beta": 0.3}
    config = Config.model_validate(
        {
            "data": {"train_files": ["none"], "max_response_length": 30},
            "actor": actor,
            "algorithm": {"adv_estimator": "grpo", "rollout_correction": correction},
            "rollout": {"n": 2},
        }
    )
    return ActorObjective(config, check(config, 1))


def columns(worker: ModelWorker) -> DataProto:
    """Uneven samples: the first has no response, of the second no token counts, tool tokens are in the others."""
    generator = torch.Generator().manual_seed(0)
    responses = torch.randint(1, 28, (17,), generator=generator)
    responses[0] = 0
    lengths = responses + torch.randint(1, 6, (17,), generator=generator)
    ids = torch.randint(0, SHAPE.vocab_size, (int(lengths.sum()),), generator=generator, dtype=torch.int32)
    total = int(responses.sum())
    mask = (torch.rand(total, generator=generator) < 0.85).float()
    mask[: responses[1]] = 0

    def column(values: torch.Tensor) -> Ragged:
        return Ragged.from_lengths(values, responses)

    def noise() -> torch.Tensor:
        return torch.randn(total, generator=generator)

    batch = DataProto(
        {"input_ids": Ragged.from_lengths(ids, lengths), "response_mask": column(mask)},
        {"prompt": np.arange(17) // 2, "sample_index": np.arange(17) % 2},
    )
    now = torch.from_numpy(worker.engine.log_probs(batch, max_tokens=WHOLE, temperature=0.7)["log_probs"].values)
    batch.tokens |= {
        "old_log_probs": column(now - 0.3 * noise()),
        "ref_log_prob": column(now - 0.3 * noise()),
        "advantages": column(noise()),
        "rollout_is_weights": column(2 * torch.rand(total, generator=generator)),
    }
    return batch


class Splits:
    """Workers of all layouts with the same weights, which no step changes (lr 0), and one mini-batch."""

    def __init__(self, world: World) -> None:
        self.world = world
        still = SGD.model_copy(update={"lr": 0.0})
        self.workers = {
            name: Policy(groups, TWO_LAYERS, seeded(3), optim=still)
            for name, groups in role_groups(world.rank, world.size).items()
            if name in SHARES and (name != "alone" or world.rank == 0)
        }
        self.batch: DataProto = world.broadcast_object(columns(self.workers["alone"]) if world.rank == 0 else None)
        self.objectives = {cell: objective_of(*cell) for cell in CELLS}
        self.parts = {
            name: [self.batch[sum(sizes[:i]) : sum(sizes[: i + 1])] for i in range(len(sizes))]
            for name, sizes in SHARES.items()
        }
        advantages = self.batch.fetch("advantages")
        one_sign = self.batch.tokens | {"advantages": Ragged(np.abs(advantages.values), advantages.offsets)}
        self.parts["one sign"] = [DataProto(one_sign, self.batch.samples)]
        self.budgets = {split: self.budget(*split) for split in SPLITS}

    def budget(self, layout: str, count: int) -> int:
        """Tokens of a micro-batch with which the replica with the most samples has `count` micro-batches."""
        lengths, parts = self.batch.fetch("input_ids").lengths, self.parts[layout]
        tokens = range(int(lengths.sum()), int(lengths.max()) - 1, -1)
        return next(number for number in tokens if max(needed_count(part, number) for part in parts) == count)

    def train(
        self, layout: str, loss: str, mode: str, max_tokens: int, parts: str | None = None
    ) -> tuple[dict[str, Metric], dict[str, torch.Tensor], int]:
        """This replica's metrics, this rank's gradients, and how many micro-batches with response tokens it had.

        Without those of `rollout_corr/`: some count sequences, and one without a response may be alone in a
        micro-batch, which then has no loss and no metrics.
        """
        worker = self.workers[layout]
        calls = 0

        def counted(norm: Any) -> Callable:
            share = self.objectives[loss, mode].normalised(norm, key=(1, 0))

            def of_micro_batch(outputs: Any, micro: TensorBatch) -> Any:
                nonlocal calls
                calls += 1
                return share(outputs, micro)

            return of_micro_batch

        part = self.parts[parts or layout][worker.groups.coord.dp]
        options = {"max_tokens": max_tokens, "temperature": 0.7, "entropy": True}
        metrics = worker.train(part, counted, loss_scale_factor=30.0, **options)
        kept = {
            key.removeprefix(f"{worker.groups.role}/"): metric
            for key, metric in metrics.items()
            if not key.startswith("rollout_corr/")
        }
        return kept, gradients(worker.engine), calls

    def reference(self, loss: str, mode: str) -> tuple[dict[str, Any], dict[str, torch.Tensor], float]:
        """Of one rank: metrics, gradients, and the sum of |terms| of pg_loss, which cancel unless all have one sign."""
        metrics, whole, _ = self.train("alone", loss, mode, WHOLE)
        one_sign, _, _ = self.train("alone", loss, mode, WHOLE, parts="one sign")
        return finish(metrics), whole, abs(finish(one_sign)["actor/pg_loss"])

    def compare(self, loss: str, mode: str, splits: list[tuple[str, int]]) -> None:
        expected, whole, terms = self.world.broadcast_object(
            self.reference(loss, mode) if self.world.rank == 0 else None
        )
        pg_loss = expected.pop("actor/pg_loss")
        for layout, count in splits:
            metrics: dict[str, Metric] = {}
            error, calls = 0.0, 0
            if layout in self.workers:
                worker = self.workers[layout]
                own, mine, calls = self.train(layout, loss, mode, self.budgets[layout, count])
                metrics = own if worker.is_leader else {}
                error = max(slice_errors(worker.engine, mine, whole).values())
            metrics_of, errors, calls_of = zip(*self.world.all_gather_object((metrics, error, calls)), strict=True)
            assert max(calls_of) == count, (layout, count)
            assert max(errors) <= 1e-5, (layout, count)
            found = finish(merge(metrics_of))
            assert abs(found.pop("actor/pg_loss") - pg_loss) <= 1e-5 * terms, (layout, count)
            assert found == pytest.approx(expected, rel=1e-5, abs=1e-6), (layout, count)


@pytest.fixture(scope="module")
def splits(world: World) -> Splits:
    return Splits(world)


def test_each_loss_and_each_mode_meets_every_split():
    cells = [(loss, mode, split) for loss, mode in CELLS for split in covering(loss, mode)]
    assert {(loss, split) for loss, _, split in cells} == {(loss, split) for loss in LOSSES for split in SPLITS}
    assert {(mode, split) for _, mode, split in cells} == {(mode, split) for mode in MODES for split in SPLITS}


def quick(loss: str, mode: str) -> list[pytest.MarkDecorator]:
    """Each loss once, and each mode; the others are slow."""
    return [] if (LOSSES.index(loss) - MODES.index(mode)) % len(MODES) == 0 else [pytest.mark.slow]


@pytest.mark.parametrize(("loss", "mode"), [pytest.param(*cell, marks=quick(*cell)) for cell in CELLS])
def test_any_split_is_the_whole(splits, loss, mode):
    splits.compare(loss, mode, covering(loss, mode))


@pytest.mark.exhaustive
@pytest.mark.parametrize(("loss", "mode"), CELLS)
def test_every_split_is_the_whole(splits, loss, mode):
    splits.compare(loss, mode, SPLITS)
