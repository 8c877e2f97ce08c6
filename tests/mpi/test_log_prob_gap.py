"""Rollout log-probs against training's for every pair of layouts, after a real optimizer step and a real refit.

The metrics are those that a job logs at every step. A wrong slice, a permuted QKV group or a stale weight moves them by
orders of magnitude (see the last tests), so a bound is a check of the whole way from optimizer to engine.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from hpcrl.algorithms.metrics import finish, merge, to_floats
from hpcrl.algorithms.off_policy import off_policy_metrics
from hpcrl.algorithms.statistics import rollout_log_prob_statistics
from hpcrl.batch.data_proto import DataProto
from hpcrl.model.shape import ModelShape
from hpcrl.rollout.protocol import Request, SamplingParams
from hpcrl.runtime.groups import GroupCache
from hpcrl.runtime.layout import Layout
from tests.mpi.pairs import Pair, train, training_engine

pytestmark = pytest.mark.ci_world(4)

if TYPE_CHECKING:
    from hpcrl.runtime.world import World

SHAPE = ModelShape(
    num_layers=4,
    hidden_size=32,
    ffn_hidden_size=48,
    num_attention_heads=8,
    num_query_groups=4,
    head_dim=8,
    vocab_size=45,
    init_std=0.3,
)
TIED = replace(SHAPE, tie_word_embeddings=True)
SAMPLING = SamplingParams(10, temperature=0.8, eos_token_ids=(1,))

# The shape and the dtypes of training and rollout. Largest values seen over all pairs are behind the bounds (two cores,
# torch 2.13). k3_kl is the sharpest where rounding is coarse: it grows with the square of the gap.
CASES = {
    "float32": (SHAPE, torch.float32, torch.float32),
    "bfloat16": (TIED, torch.bfloat16, torch.bfloat16),
    "bfloat16_from_float32": (SHAPE, torch.float32, torch.bfloat16),
}
FLOAT32 = {
    "training/rollout_probs_diff_max": 1e-4,  # 2.5e-6
    "training/rollout_probs_diff_mean": 1e-5,  # 2.4e-7
    "training/rollout_probs_diff_std": 1e-5,  # 3.4e-7
    "training/rollout_log_probs_diff_max": 1e-4,  # 1e-5
    "rollout_corr/kl": 1e-5,  # 3.8e-7
    "rollout_corr/k3_kl": 1e-6,  # 1.5e-9
    "rollout_corr/log_ppl_abs_diff": 1e-5,  # 6.2e-7
}
BFLOAT16 = {
    "training/rollout_probs_diff_max": 0.25,  # 0.098
    "training/rollout_probs_diff_mean": 0.02,  # 0.0078
    "training/rollout_probs_diff_std": 0.03,  # 0.011
    "training/rollout_log_probs_diff_max": 1.0,  # 0.38
    "rollout_corr/kl": 0.03,  # 0.0088
    "rollout_corr/k3_kl": 0.006,  # 0.0021
    "rollout_corr/log_ppl_abs_diff": 0.04,  # 0.017
}
BOUNDS = {"float32": FLOAT32, "bfloat16": BFLOAT16, "bfloat16_from_float32": BFLOAT16}


@pytest.fixture(scope="module")
def cache(world: World) -> GroupCache:
    return GroupCache(world.rank)


def gap(pair: Pair, batch: DataProto) -> dict[str, float]:
    """The metrics over all replicas, equal on every rank."""
    mine = pair.with_old_log_probs(batch, SAMPLING, max_tokens=100)
    found = {}
    if mine is not None and pair.actor is not None and pair.actor.groups.coord.tp == 0:
        rollout, old, mask = (mine.padded(name) for name in ("rollout_log_probs", "old_log_probs", "response_mask"))
        found = to_floats(rollout_log_prob_statistics(rollout, old, mask) | off_policy_metrics(old, rollout, mask))
    return finish(merge(pair.world.all_gather_object(found)))


def make_requests() -> list[Request]:
    generator = np.random.default_rng(0)
    return [
        Request(prompt, f"file:{number}:0", sample)
        for number in range(8)
        for prompt in [generator.integers(2, SHAPE.vocab_size, generator.integers(1, 16))]
        for sample in range(2)
    ]


def layouts(first: int, last: int) -> list[Layout]:
    """Every tp x pp x dp on ranks first..last-1 that the model allows."""
    size = last - first
    return [
        Layout(tuple(range(first, last)), tp=tp, pp=pp)
        for tp in (1, 2, 4)
        for pp in range(1, SHAPE.num_layers + 1)
        if size % (tp * pp) == 0
    ]


def pairs(size: int) -> dict[Layout, list[Layout]]:
    """Training layout -> rollout layouts: on the same ranks, and on the others for every way to part the ranks."""
    found = {}
    for border in range(1, size + 1):
        others = layouts(border, size) if border < size else layouts(0, size)
        found |= {training: [one for one in others if one.pp == 1] for training in layouts(0, border)}
    return found


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_every_pair_of_layouts_stays_below_the_bound(world: World, cache: GroupCache, case: str) -> None:
    shape, dtype, rollout_dtype = CASES[case]
    chosen = pairs(world.size)
    if dtype is not rollout_dtype:  # what is new is the rounding, which knows no layouts
        chosen = dict([chosen.popitem()])
    elif dtype is torch.bfloat16:
        chosen = {training: rollouts[-1:] for training, rollouts in list(chosen.items())[::-2]}
    for training, rollouts in chosen.items():
        actor = training_engine(world, cache, shape, training, dtype=dtype)
        train(actor)
        for rollout in rollouts:
            pair = Pair(world, cache, shape, actor, training, rollout, dtype=rollout_dtype)
            pair.refit()
            found = gap(pair, pair.generate(make_requests(), SAMPLING))
            above = {name: found[name] for name, bound in BOUNDS[case].items() if not abs(found[name]) <= bound}
            assert not above, f"{training} -> {rollout}"
            assert found["training/rollout_probs_diff_valid"] == 1
            pair.close()


SELDOM = {"bfloat16": pytest.mark.slow, "bfloat16_from_float32": pytest.mark.exhaustive}
WRONG = ("stale weights", "QKV rows one head off", "up and gate swapped")


@pytest.mark.parametrize("case", ["float32", *(pytest.param(name, marks=mark) for name, mark in SELDOM.items())])
def test_what_the_bounds_are_for_is_far_above_them(world: World, cache: GroupCache, case: str) -> None:
    """One weight of the first layer on one rank is enough, whatever the pair.

    In bf16 k3_kl was 47 to 250 times its bound, and the mean difference of probabilities 4 to 13 times.
    """
    shape, dtype, rollout_dtype = CASES[case]
    training, rollouts = pairs(world.size).popitem()
    rollout = rollouts[-1]
    actor = training_engine(world, cache, shape, training, dtype=dtype)
    train(actor)
    pair = Pair(world, cache, shape, actor, training, rollout, dtype=rollout_dtype, share=False)
    for wrong in WRONG:
        pair.refit()
        if wrong == "stale weights":
            train(actor)
        elif world.rank == rollout.ranks[0]:
            assert pair.engine is not None
            name, rows = {
                "QKV rows one head off": ("self_attention.linear_qkv", shape.head_dim),
                "up and gate swapped": ("mlp.linear_fc1", shape.ffn_hidden_size // rollout.tp),
            }[wrong]
            weight = pair.engine.weights()[f"decoder.layers.0.{name}.weight"]
            weight.copy_(weight.roll(rows, dims=0))
        found = gap(pair, pair.generate(make_requests(), SAMPLING))
        above = {name: found[name] / bound for name, bound in BOUNDS[case].items()}
        assert above["rollout_corr/k3_kl"] > 10, wrong
        assert above["training/rollout_probs_diff_mean"] > 2, wrong
        if case == "float32":
            assert min(map(abs, above.values())) > 100, wrong
    pair.close()


def test_without_a_learning_rate_the_gap_stays_exactly_where_it_was(world: World, cache: GroupCache) -> None:
    training, rollouts = pairs(world.size).popitem()
    actor = training_engine(world, cache, SHAPE, training, lr=0.0)
    pair = Pair(world, cache, SHAPE, actor, training, rollouts[0])
    pair.refit()
    before = gap(pair, pair.generate(make_requests(), SAMPLING))
    train(actor)
    pair.refit()
    assert gap(pair, pair.generate(make_requests(), SAMPLING)) == before
    pair.close()
