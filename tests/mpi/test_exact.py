"""Exact mode: after a real optimizer step and a refit, rollout and training log-probs have the same bits."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch import Tensor

from hpcrl.batch.data_proto import DataProto, TensorBatch
from hpcrl.model.build import named_parameters
from hpcrl.model.exact import KEYS
from hpcrl.model.shape import ModelShape
from hpcrl.rollout.protocol import Request, SamplingParams
from hpcrl.runtime.groups import GroupCache
from hpcrl.runtime.layout import Layout
from tests.mpi.lab import metrics, on
from tests.mpi.layouts import make_batch, part_of
from tests.mpi.pairs import Pair, train, training_engine
from tests.strict_device.load import in_place_of_cuda, load_on_all_ranks

pytestmark = pytest.mark.ci_world(2)

if TYPE_CHECKING:
    from hpcrl.runtime.world import World
    from tests.mpi.lab import Lab

# Widths that no vector register divides; 100 columns and 300 go through different kernels.
SHAPE = ModelShape(
    num_layers=3,
    hidden_size=100,
    ffn_hidden_size=300,
    num_attention_heads=12,
    num_query_groups=4,
    head_dim=10,
    vocab_size=45,
    init_std=0.15,
)
SAMPLING = SamplingParams(24, temperature=0.8, ignore_eos=True)

# world size -> (training, rollout), with as much tensor parallelism
LAYOUTS = {
    1: [(Layout((0,)), Layout((0,)))],
    2: [
        (Layout((0, 1), tp=2), Layout((0, 1), tp=2)),
        (Layout((0, 1), pp=2), Layout((0, 1))),
        (Layout((0, 1)), Layout((0, 1))),
        (Layout((0,)), Layout((1,))),
    ],
    4: [
        (Layout((0, 1, 2, 3), tp=2), Layout((0, 1, 2, 3), tp=2)),
        (Layout((0, 1, 2, 3), tp=2, pp=2), Layout((0, 1, 2, 3), tp=2)),
        (Layout((0, 1, 2, 3), pp=2), Layout((0, 1, 2, 3))),
        (Layout((0, 1, 2, 3), tp=4), Layout((0, 1, 2, 3), tp=4)),
        (Layout((0, 1), tp=2), Layout((2, 3), tp=2)),
    ],
}


@pytest.fixture(scope="module")
def cache(world: World) -> GroupCache:
    return GroupCache(world.rank)


EXPERTS = dataclasses.replace(
    SHAPE, num_experts=8, moe_topk=3, moe_ffn_hidden_size=52, dense_layers=(1,), moe_shared_ffn_hidden_size=44
)
EXPERT_LAYOUTS = {  # and which ranks have different experts
    1: (Layout((0,)), Layout((0,))),
    2: (Layout((0, 1), ep=2), Layout((0, 1))),
    4: (Layout((0, 1, 2, 3), pp=2, ep=2), Layout((0, 1, 2, 3))),
}


def make_requests() -> list[Request]:
    """Groups that share prompts of many lengths, more than there are slots; responses of different lengths, too."""
    generator = np.random.default_rng(0)
    return [
        Request(prompt, f"file:{number}:0", sample, max_new_tokens=int(generator.integers(1, SAMPLING.max_new_tokens)))
        for number, length in enumerate((1, KEYS - 9, 17, KEYS, 5, KEYS + 1))
        for prompt in [generator.integers(2, SHAPE.vocab_size, length)]
        for sample in range(2)
    ]


def make_pair(
    world: World,
    cache: GroupCache,
    training: Layout,
    rollout: Layout,
    *,
    exact: bool = True,
    dtype: torch.dtype = torch.float32,
    shape: ModelShape = SHAPE,
) -> Pair:
    actor = training_engine(world, cache, shape, training, exact=exact, dtype=dtype)
    train(actor)
    # Slots are refilled, and wait for memory; prompts of more than 60 tokens are prefilled in parts.
    limits = {"max_num_seqs": 7, "max_num_batched_tokens": 60, "max_model_len": 2 * KEYS, "kv_sequences": 3}
    pair = Pair(world, cache, shape, actor, training, rollout, exact=exact, dtype=dtype, **limits)
    pair.refit()
    return pair


def differences(pair: Pair, batch: DataProto, max_tokens: int) -> np.ndarray | None:
    mine = pair.with_old_log_probs(batch, SAMPLING, max_tokens)
    return mine and np.abs(mine.fetch("old_log_probs").values - mine.fetch("rollout_log_probs").values)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rollout_and_training_log_probs_are_equal(world: World, cache: GroupCache, dtype: torch.dtype) -> None:
    for training, rollout in LAYOUTS[world.size]:
        pair = make_pair(world, cache, training, rollout, dtype=dtype)
        batch = pair.generate(make_requests(), SAMPLING)
        assert len(np.unique(batch.fetch("response_mask").lengths)) > 6
        for max_tokens in (200, 1000):
            found = differences(pair, batch, max_tokens)
            assert found is None or (found == 0).all()
        pair.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_so_are_they_with_experts(world: World, cache: GroupCache, dtype: torch.dtype) -> None:
    pair = make_pair(world, cache, *EXPERT_LAYOUTS[world.size], dtype=dtype, shape=EXPERTS)
    batch = pair.generate(make_requests(), SAMPLING)
    for max_tokens in (200, 1000):
        found = differences(pair, batch, max_tokens)
        assert found is None or (found == 0).all()
    pair.close()


@pytest.mark.parametrize(
    ("dtype", "shape"),
    [
        (torch.float32, SHAPE),
        pytest.param(torch.bfloat16, SHAPE, marks=pytest.mark.exhaustive),
        (torch.bfloat16, EXPERTS),
    ],
)
def test_so_are_they_on_a_device(world: World, cache: GroupCache, dtype: torch.dtype, shape: ModelShape) -> None:
    """There the engine's cache has blocks; before and after a further step and refit."""
    device = load_on_all_ranks(world)
    layouts = LAYOUTS[world.size][0] if shape is SHAPE else EXPERT_LAYOUTS[world.size]
    with in_place_of_cuda(device):
        pair = make_pair(dataclasses.replace(world, device=device), cache, *layouts, dtype=dtype, shape=shape)
        assert pair.engine is None or next(iter(pair.engine.weights().values())).device == device
        for is_last in (False, True):
            found = differences(pair, pair.generate(make_requests(), SAMPLING), 200)
            assert found is None or (found == 0).all()
            if not is_last:
                train(pair.actor)
                pair.refit()
        pair.close()


def test_so_are_they_by_the_kernels(world: World, cache: GroupCache, monkeypatch: pytest.MonkeyPatch) -> None:
    """In Triton's interpreter, with the engine's decode steps of a device."""
    monkeypatch.setenv("HPCRL_KERNELS", "triton")
    small = dataclasses.replace(SHAPE, num_layers=1, hidden_size=72, ffn_hidden_size=68, qkv_bias=True)
    pair = make_pair(world, cache, *LAYOUTS[world.size][0], dtype=torch.bfloat16, shape=small)
    requests = [dataclasses.replace(one, max_new_tokens=2) for one in make_requests()[1:3]]
    found = differences(pair, pair.generate(requests, SAMPLING), 100)
    assert found is None or (found == 0).all()
    pair.close()


def test_without_exact_mode_they_are_not(world: World, cache: GroupCache) -> None:
    """The test above would say little if they were equal anyway."""
    pair = make_pair(world, cache, *LAYOUTS[world.size][0], exact=False)
    found = differences(pair, pair.generate(make_requests(), SAMPLING), 1000)
    assert found is not None and 0 < found.max() < 1e-4
    pair.close()


def test_log_probs_in_training_are_those_before_it(world: World, cache: GroupCache) -> None:
    """So the first mini-batch's ratio is 1 and its KL is 0, however it is cut into micro-batches."""
    engine = training_engine(world, cache, SHAPE, LAYOUTS[world.size][0][0], exact=True)
    assert engine is not None
    batch = part_of(make_batch(), engine.groups)
    batch.tokens["old_log_probs"] = engine.log_probs(batch, max_tokens=1000, temperature=1.0)["log_probs"]
    found = []

    def loss(outputs: dict[str, Tensor], batch: TensorBatch) -> tuple[Tensor, dict[str, Any]]:
        log_probs, old = outputs["log_probs"], batch.padded("old_log_probs")
        found.append(((log_probs.detach() - old) * (old != 0)).abs().max())
        return log_probs.sum(), {}

    engine.train(batch, loss=loss, max_tokens=40)
    assert len(found) > 1 and max(found) == 0


@pytest.mark.parametrize(
    ("dtype", "is_fused", "most"),
    [(torch.float32, None, 1e-5), (torch.bfloat16, False, 0.03), (torch.bfloat16, True, 0.03)],
)
def test_gradients_are_those_of_the_plain_model(
    world: World, cache: GroupCache, dtype: torch.dtype, is_fused: bool | None, most: float
) -> None:
    """In bf16, whose roundings differ, also when weight gradients are added to an fp32 sum."""
    for training, _ in LAYOUTS[world.size]:
        options = {"dtype": dtype, "gradient_accumulation_fusion": is_fused}
        engines = [training_engine(world, cache, SHAPE, training, exact=exact, **options) for exact in (True, False)]
        for engine in engines:
            train(engine)
        exact, plain = (named_parameters(engine.chunks) if engine else {} for engine in engines)
        norm = sum(weight.main_grad.square().sum() for weight in plain.values()) ** 0.5
        for name, weight in plain.items():
            assert (exact[name].main_grad - weight.main_grad).norm() <= most * norm, name


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.exhaustive)])
def test_a_whole_job(world: World, lab: Lab, dtype: str) -> None:
    """Rollout, old and reference log-probs are one; after a step the reference alone stays behind."""
    sizes = {1: {}, 2: {"tp": 2}, 4: {"tp": 2, "pp": 2}}[world.size]
    one_update = {"ppo_mini_batch_size": 12, "ppo_max_token_len_per_gpu": 128}
    found = metrics(
        lab.run(f"exact_{dtype}", on(world, **sizes), rollout={"exact": True}, actor=one_update, model={"dtype": dtype})
    )
    for step in found.values():
        assert step["training/rollout_probs_diff_max"] == 0
        assert step["actor/ppo_kl"] == 0
    assert found[1]["actor/kl_loss"] == 0 < found[2]["actor/kl_loss"]
