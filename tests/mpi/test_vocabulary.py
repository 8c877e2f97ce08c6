"""A model with more rows in its vocabulary than the tokenizer has tokens computes what it would without these rows."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from hpcrl.engine.engine import TrainEngine
from hpcrl.model.params import EMBEDDING, OUTPUT_LAYER
from hpcrl.observe.read.archive import read_step
from hpcrl.observe.record.archive import step_path
from hpcrl.rollout.protocol import Request, SamplingParams
from hpcrl.runtime.groups import GroupCache
from hpcrl.runtime.layout import Layout
from tests.mpi.lab import Lab, metrics, on
from tests.mpi.layouts import SGD, SHAPE, assert_slices, gradients, make_batch, part_of, policy_loss, role_groups
from tests.mpi.pairs import Pair

pytestmark = pytest.mark.ci_world(2)

if TYPE_CHECKING:
    from hpcrl.batch.data_proto import DataProto
    from hpcrl.runtime.world import World

# The tokenizer's ids are those of `make_batch`, or more. The vocabulary is padded to 192: the second of two shards has
# no token, or tokens, ids without one, and padding.
SHAPES = {size: replace(SHAPE, vocab_size=150, tokenizer_size=size, init_std=0.2) for size in (SHAPE.vocab_size, 120)}
SAMPLING = {"temperature": 1.5, "ignore_eos": True}
SAMPLINGS = {
    "all": SamplingParams(12, **SAMPLING),
    "top_k": SamplingParams(12, **SAMPLING, top_k=30),
    "top_p": SamplingParams(12, **SAMPLING, top_p=0.9),
    "greedy": SamplingParams(12, ignore_eos=True, temperature=0.0),
}
GRPO: dict[str, dict[str, Any]] = {
    "algorithm": {"adv_estimator": "grpo", "use_kl_in_reward": False},
    "actor": {"use_kl_loss": False},
    "trainer": {"total_training_steps": 1},
}


def make_engine(world: World, size: int, *, alone: bool = False, **options: Any) -> TrainEngine:
    """Over all ranks, or on each; ids without a token have the largest logits."""
    layout = "alone" if alone else {1: "single", 2: "tp2"}[world.size]
    engine = TrainEngine(SHAPES[size], role_groups(world.rank, world.size)[layout], seed=3, **options)
    head = engine.named_shards()[OUTPUT_LAYER]
    head[max(size - engine.groups.coord.tp * len(head), 0) :] *= 3
    return engine


def without_extra_rows(whole: TrainEngine, **options: Any) -> TrainEngine:
    """The model on this rank, with the tokenizer's ids only."""
    shape = replace(whole.shape, vocab_size=whole.shape.softmax_size, tokenizer_size=None)
    small = TrainEngine(shape, whole.groups, **options)
    source = whole.named_shards()
    for name, weight in small.named_shards().items():
        weight.copy_(source[name][: len(weight)])
    return small


def outputs(engine: TrainEngine, batch: DataProto) -> dict[str, torch.Tensor]:
    options = {"max_tokens": 60, "temperature": 0.7}
    found = engine.log_probs(batch, **options, entropy=True, sum_pi_squared=True)
    found |= engine.topk_log_probs(batch, **options, k=engine.shape.softmax_size)
    return {name: torch.as_tensor(column.values) for name, column in found.items()}


@pytest.mark.parametrize(("size", "exact"), [*((size, False) for size in SHAPES), (120, True)])
def test_ids_without_a_token_are_never_drawn_and_training_agrees(world: World, size: int, exact: bool) -> None:
    layout, actor = Layout(tuple(range(world.size)), tp=world.size), make_engine(world, size, exact=exact)
    pair = Pair(world, GroupCache(world.rank), SHAPES[size], actor, layout, layout, exact=exact)
    pair.refit()
    requests = [Request([1, 2, number], str(number)) for number in range(20)]
    for name, sampling in SAMPLINGS.items():
        batch = pair.generate(requests, sampling)
        drawn = batch.fetch("input_ids").values
        assert len(drawn) == len(requests) * (3 + 12) and drawn.max() < size, name
        mine = pair.with_old_log_probs(batch, sampling, 400)
        assert mine is not None
        found = np.abs(mine.fetch("old_log_probs").values - mine.fetch("rollout_log_probs").values)
        assert found.max() <= (0 if exact else 1e-4), name
    pair.close()


@pytest.mark.parametrize("head_chunk_tokens", [None, 7])
@pytest.mark.parametrize("size", SHAPES)
def test_rows_without_a_token_change_nothing_and_get_no_gradient(
    world: World, size: int, head_chunk_tokens: int | None
) -> None:
    options = {"head_chunk_tokens": head_chunk_tokens, "optim": SGD, "total_steps": 1}
    engine, batch = make_engine(world, size, **options), make_batch()
    small = without_extra_rows(make_engine(world, size, alone=True), **options)
    found, expected = outputs(engine, part_of(batch, engine.groups)), outputs(small, batch)
    for name, values in expected.items():
        torch.testing.assert_close(found[name], values, rtol=0, atol=1e-4, msg=lambda text, name=name: f"{name} {text}")
    sums = found["topk_log_probs"].view(-1, size).exp().sum(1)
    torch.testing.assert_close(sums, torch.ones_like(sums), rtol=0, atol=1e-5)

    before = {name: engine.named_shards()[name].clone() for name in (EMBEDDING, OUTPUT_LAYER)}
    for each in (engine, small):
        each.train(batch, loss=policy_loss, max_tokens=60, entropy=True)
    whole, mine = gradients(small), gradients(engine)
    for name, weight in before.items():
        first = max(size - engine.groups.coord.tp * len(weight), 0)
        assert not mine[name][first:].any()
        assert name == EMBEDDING or mine[name][:first].any() == (first > 0)
        assert torch.equal(engine.named_shards()[name][first:], weight[first:])
        rows = engine.shape.padded_vocab_size - len(whole[name])
        whole[name] = torch.nn.functional.pad(whole[name], (0, 0, 0, rows))
    assert_slices(engine, mine, whole)


def test_a_job_draws_the_tokenizers_ids_or_all(world: World, lab: Lab, caplog: pytest.LogCaptureFixture) -> None:
    layout = on(world.size, tp=world.size)
    for chosen, most in (("tokenizer", 25), ("config", 60)):
        caplog.clear()
        with caplog.at_level(logging.INFO, "hpcrl"):
            run = lab.run(f"vocabulary_{chosen}", layout, model={"softmax_vocab": chosen}, **GRPO)
        line = "vocabulary: 25 tokens of the tokenizer, 60 rows in the model; the other 35 "
        assert [record.message.startswith(line) for record in caplog.records].count(True) == 1
        if world.rank == 0:
            tokens, _, _ = read_step(step_path(run / "rollouts", 1), ("input_ids",))
            assert most - 25 < tokens["input_ids"][0].max() < most
            assert all(line["training/rollout_probs_diff_max"] < 1e-4 for line in metrics(run).values())
