"""Any layout computes what one rank alone computes: log-probs, values, gradients, weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from torch.utils._python_dispatch import TorchDispatchMode

from hpcrl.batch.data_proto import DataProto, TensorBatch
from hpcrl.config.schema import OptimConfig
from hpcrl.engine.engine import TrainEngine
from hpcrl.engine.optim import clip_gradients, gradient_norm, optimizer_parts
from hpcrl.engine.outputs import vocab_parallel_log_probs
from hpcrl.kernels.vocabulary import vocab_parallel_topk_ids
from hpcrl.model.blocks.norms import Norms
from hpcrl.model.shape import ModelShape
from hpcrl.runtime import platform
from hpcrl.runtime.groups import RoleGroups
from hpcrl.runtime.world import World
from tests.mpi.layouts import (
    DEEPSEEK,
    DELTA,
    EXPERT_LAYOUTS,
    GPT_OSS,
    HYBRID,
    LAYOUTS,
    MIXTURE,
    ROUTER_LOSSES,
    SGD,
    SHAPE,
    SIZES,
    SOME,
    SOME_LAYOUTS,
    TIED,
    TOKENS,
    assert_slices,
    gradients,
    has_layout,
    make_batch,
    part_of,
    policy_loss,
    value_engine,
    value_loss,
)


class OneRank:
    """What one rank makes of a batch in two SGD steps; computed once, as every layout is compared with it."""

    def __init__(self, engine: TrainEngine, batch: DataProto, loss, **options) -> None:
        entropy = engine.head == "lm"
        self.steps: list[tuple[dict[str, float], dict[str, torch.Tensor]]] = []
        for _ in range(2):
            metrics = engine.train(batch, max_tokens=64, loss=loss, temperature=0.7, entropy=entropy, **options)
            assert metrics["grad_norm"] > 1e-3
            self.steps.append((metrics, gradients(engine)))
        self.weights = {name: weight.clone() for name, weight in engine.named_shards().items()}


def assert_trains_as_one_rank(engine: TrainEngine, mine: DataProto, alone: OneRank, loss, **options) -> None:
    """The two steps on `mine` in this layout: same norms, gradients and weights."""
    entropy = engine.head == "lm"
    for expected, its_gradients in alone.steps:
        found = engine.train(mine, max_tokens=64, loss=loss, temperature=0.7, entropy=entropy, **options)
        for name in found.keys() - {"lr", "skipped_updates"}:  # of a mixture, its routers' metrics too
            assert found[name] == pytest.approx(expected[name], rel=1e-4), name
        assert_slices(engine, gradients(engine), its_gradients)
    assert_slices(engine, engine.named_shards(), alone.weights)


class Policy:
    """Of one rank: its start weights, log-probs and entropies of the whole batch, and its training."""

    def __init__(self, alone: RoleGroups, shape: ModelShape) -> None:
        engine, batch = TrainEngine(shape, alone, optim=SGD, seed=3, **ROUTER_LOSSES), make_batch()
        self.start = {name: weight.clone() for name, weight in engine.named_shards().items()}
        self.columns = engine.log_probs(batch, max_tokens=10_000, temperature=0.7, entropy=True)
        self.trained = OneRank(engine, batch, policy_loss)


@pytest.fixture(scope="module")
def policy(world: World, groups: dict[str, RoleGroups]) -> Callable[[ModelShape], Policy]:
    """Rank 0 computes it for all."""
    return cache(lambda shape: world.broadcast_object(Policy(groups["alone"], shape) if world.rank == 0 else None))


# Data parallelism knows no layers and a stage no kinds of them: where two models have said it, others meet what slices
# them. On 4 ranks a mixture, which has a dense layer too, says what dense models would, and 2 ranks have said what
# latent attention and one kind of parallelism do to each size; these have what they have not. One rank alone is
# compared with itself in micro-batches.
CHOSEN: dict[int, dict[str, tuple[str, ...]]] = {
    1: dict.fromkeys(("tied", "mixture", "deepseek", "gpt-oss"), ()),
    2: {
        "tied": ("tp2", "pp2", "pp2vpp2"),
        "deepseek": ("tp2", "cp2", "pp2vpp2", "ep2", "etp2", "tp2ep2"),
        "delta": ("tp2", "pp2vpp2"),
        "gpt-oss": ("tp2", "cp2", "pp2vpp2", "etp2", "tp2ep2"),
        "hybrid": ("tp2", "pp2vpp2", "etp2", "tp2ep2"),
    },
}
CHOSEN[4] = {
    "mixture": (
        *("tp2dp2", "tp2pp2", "tp2cp2", "pp2cp2vpp2", "tp2pp2vpp2"),
        *("ep2", "tp2ep4", "tp2ep2etp2", "pp2ep2", "cp2ep2", "pp2vpp2ep2"),
    ),
    "untied": ("tp4", "pp2cp2vpp2"),
    "tied": ("tp2pp2", "tp2pp2vpp2"),
    "deepseek": ("tp2pp2", "tp2cp2", "tp2ep2etp2", "pp2vpp2ep2"),
    "delta": ("tp4",),
    "gpt-oss": ("tp2cp2", "tp2ep2etp2"),
    "hybrid": ("tp4", "tp2pp2vpp2", "tp2ep2etp2", "pp2vpp2ep2"),
}
QUICK = {  # the others are slow; on 2 ranks so are a mixture's and latent attention's others
    2: {
        "mixture": ("tp2", "pp2", "cp2", "tp2ep2"),
        "deepseek": ("tp2", "cp2", "tp2ep2"),
        "delta": ("tp2",),
        "gpt-oss": ("cp2", "etp2"),
    },
    4: {"untied": ("tp4",), "tied": ("tp2pp2",), "mixture": ("tp2pp2", "pp2cp2vpp2", "tp2ep2etp2", "pp2vpp2ep2")},
}


def case(name: str, layout: str, size: int) -> list[pytest.MarkDecorator]:
    if layout not in CHOSEN[size].get(name, (layout,)):
        return [pytest.mark.exhaustive]
    quick = QUICK.get(size, {}).get(name, () if size == 4 else (layout,))
    return [] if layout in quick else [pytest.mark.slow]


CASES = {
    f"{name}-{layout.values[0]}-{size}": pytest.param(
        *layout.values, shape, marks=[*layout.marks, *case(name, layout.values[0], size)]
    )
    for name, shape, layouts in (
        ("untied", SHAPE, LAYOUTS),
        ("tied", TIED, LAYOUTS),
        ("mixture", MIXTURE, [*LAYOUTS, *EXPERT_LAYOUTS]),
        ("deepseek", DEEPSEEK, [*LAYOUTS, *EXPERT_LAYOUTS]),
        ("delta", DELTA, LAYOUTS),
        ("gpt-oss", GPT_OSS, [*LAYOUTS, *EXPERT_LAYOUTS]),
        ("hybrid", HYBRID, [*LAYOUTS, *EXPERT_LAYOUTS]),
    )
    for layout in layouts
    if has_layout(shape, layout.values[0])
    for size in layout.marks[0].args
}


@pytest.mark.parametrize(("layout", "shape"), CASES.values(), ids=CASES)
def test_policy_is_that_of_one_rank(groups, policy, layout, shape):
    mine, alone = part_of(make_batch(), groups[layout]), policy(shape)
    engine = TrainEngine(shape, groups[layout], optim=SGD, seed=3, **ROUTER_LOSSES)
    assert_slices(engine, engine.named_shards(), alone.start)

    found = engine.log_probs(mine, max_tokens=64, temperature=0.7, entropy=True)
    expected = part_of(DataProto(alone.columns), groups[layout]).tokens
    assert set(found) == ({"log_probs", "entropy"} if groups[layout].is_last_stage else set())
    for name, column in found.items():
        torch.testing.assert_close(column.values, expected[name].values, rtol=0, atol=1e-4)
        assert np.array_equal(column.lengths, mine.tokens["response_mask"].lengths)

    assert_trains_as_one_rank(engine, mine, alone.trained, policy_loss)


@pytest.fixture(scope="module")
def critic(world: World, groups: dict[str, RoleGroups]) -> tuple[torch.Tensor, OneRank]:
    """Of rank 0 by itself: values of the whole batch, and its training."""
    results = None
    if world.rank == 0:
        engine, batch = value_engine(groups["alone"]), make_batch()
        results = engine.values(batch, max_tokens=10_000)["values"], OneRank(engine, batch, value_loss)
    return world.broadcast_object(results)


@pytest.mark.parametrize("layout", [layout for layout in LAYOUTS if layout.values[0] in (*SIZES[2], *SOME)])
def test_values_are_those_of_one_rank(groups, critic, layout):
    mine, engine = part_of(make_batch(), groups[layout]), value_engine(groups[layout])
    found = engine.values(mine, max_tokens=64)
    if found:
        expected = part_of(DataProto({"values": critic[0]}), groups[layout]).tokens["values"].values
        assert expected.std() > 0.1
        torch.testing.assert_close(found["values"].values, expected, rtol=0, atol=1e-4)
    assert_trains_as_one_rank(engine, mine, critic[1], value_loss)


@pytest.mark.parametrize(
    ("layout", "shape"),
    [
        pytest.param("dp2", SHAPE, marks=pytest.mark.world(2)),
        pytest.param("ep2", MIXTURE, marks=pytest.mark.world(2)),
        pytest.param("pp2dp2", SHAPE, marks=pytest.mark.world(4)),
    ],
    ids=["dp2", "ep2", "pp2dp2"],
)
def test_replica_without_samples(groups, policy, layout, shape):
    """All samples on one replica: the other runs the common number of dummy micro-batches and changes nothing."""
    batch = make_batch()
    mine = batch if groups[layout].coord.dp == 1 else batch[:0]
    engine = TrainEngine(shape, groups[layout], optim=SGD, seed=3, **ROUTER_LOSSES)
    found = engine.log_probs(mine, max_tokens=64, temperature=1.0)
    if groups[layout].is_last_stage:
        assert len(found["log_probs"]) == len(mine)
    assert_trains_as_one_rank(engine, mine, policy(shape).trained, policy_loss)


@pytest.mark.ci_world(2)
@pytest.mark.parametrize("layout", SOME_LAYOUTS)
def test_bitwise_repeatable(groups, layout):
    mine = part_of(make_batch(), groups[layout])

    def run() -> list[torch.Tensor]:
        engine = TrainEngine(SHAPE, groups[layout], optim=OptimConfig(lr=1e-2), total_steps=2, seed=3)
        for _ in range(2):
            engine.train(mine, max_tokens=64, loss=policy_loss, entropy=True)
        column = engine.log_probs(mine, max_tokens=64, temperature=1.0).get("log_probs")
        return [*engine.named_shards().values(), *([torch.from_numpy(column.values)] if column else [])]

    assert all(torch.equal(a, b) for a, b in zip(run(), run(), strict=True))


@pytest.mark.ci_world(2)
@pytest.mark.parametrize("layout", SOME_LAYOUTS)
def test_zero_centered_norms_are_trained_as_norms_with_the_weights_1_plus_w(groups, layout):
    mine, weights = part_of(make_batch(), groups[layout]), []
    for norms in (Norms(), Norms(zero_centered=True)):
        engine = TrainEngine(replace(SHAPE, qk_norm=True, norms=norms), groups[layout], optim=SGD, seed=3)
        for _ in range(2):
            engine.train(mine, max_tokens=64, loss=policy_loss, entropy=True)
        offset = float(norms.zero_centered)
        weights.append({name: it + offset if "norm" in name else it for name, it in engine.named_shards().items()})
    for name, weight in weights[0].items():
        torch.testing.assert_close(weights[1][name], weight, rtol=0, atol=1e-6)


@pytest.mark.ci_world(2)
@pytest.mark.parametrize("layout", SOME_LAYOUTS)
def test_bfloat16_log_probs(groups, layout):
    """Measured: bf16 layouts differ from one rank by at most 0.02 here, and all of them from fp32 by 0.04."""
    mine = part_of(make_batch(), groups[layout])
    engine = TrainEngine(SHAPE, groups[layout], optim=OptimConfig(lr=1e-3), dtype=torch.bfloat16, seed=3)
    alone = TrainEngine(SHAPE, groups["alone"], dtype=torch.bfloat16, seed=3)
    found = engine.log_probs(mine, max_tokens=64, temperature=1.0)
    if found:
        expected = alone.log_probs(mine, max_tokens=64, temperature=1.0)
        difference = np.abs(found["log_probs"].values - expected["log_probs"].values)
        assert difference.max() < 0.1
    assert 0 < engine.train(mine, max_tokens=64, loss=policy_loss, entropy=True)["grad_norm"] < 100


@pytest.mark.ci_world(2)
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_part_of_the_world(groups, world, optimizer):
    """A role on some of the ranks never waits for the others."""
    if "first_half" not in groups:
        return
    batch = make_batch(5)
    engine = TrainEngine(SHAPE, groups["first_half"], optim=OptimConfig(optimizer=optimizer, lr=1e-3), seed=3)
    alone = TrainEngine(SHAPE, groups["alone"], optim=OptimConfig(optimizer=optimizer, lr=1e-3), seed=3)
    found = engine.train(batch, max_tokens=64, loss=policy_loss, entropy=True)
    expected = alone.train(batch, max_tokens=64, loss=policy_loss, entropy=True)
    assert found["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-4)


@pytest.mark.world(1)
@pytest.mark.parametrize("shape", [SHAPE, MIXTURE], ids=["dense", "mixture"])
def test_micro_batching_changes_nothing(groups, shape):
    batch = make_batch()
    of_one = TrainEngine(shape, groups["alone"], optim=SGD, seed=3, **ROUTER_LOSSES)
    expected = of_one.train(batch, max_tokens=10_000, loss=policy_loss, entropy=True)
    for max_tokens in (28, 57, 130):
        engine = TrainEngine(shape, groups["alone"], optim=SGD, seed=3, **ROUTER_LOSSES)
        found = engine.train(batch, max_tokens=max_tokens, loss=policy_loss, entropy=True)
        assert found == pytest.approx(expected, rel=1e-5)
        assert_slices(engine, gradients(engine), gradients(of_one))


@pytest.mark.world(1)
def test_gradient_is_clipped_to_the_norm(groups):
    optim = SGD.model_copy(update={"clip_grad": 1e-3, "lr": 1.0})
    engine = TrainEngine(SHAPE, groups["alone"], optim=optim, seed=3)
    before = {name: weight.clone() for name, weight in engine.named_shards().items()}
    norm = engine.train(make_batch(), max_tokens=64, loss=policy_loss, entropy=True)["grad_norm"]
    assert norm > 0.01
    moved = torch.stack([(weight - before[name]).norm() for name, weight in engine.named_shards().items()]).norm()
    assert float(moved) == pytest.approx(1e-3, rel=1e-3)


# Adam's state is divided over the data-parallel ranks; with SGD experts and all else have groups of their own.
NORMS = {
    2: [("tp2", "sgd"), ("dp2", "adam"), ("pp2", "adam"), ("ep2", "sgd"), ("etp2", "adam")],
    4: [("tp2pp2", "adam"), ("tp2dp2", "sgd"), ("pp2ep2", "adam"), ("tp2ep2etp2", "sgd")],
}


@pytest.mark.ci_world(2)
@pytest.mark.parametrize(
    "layout, optimizer",
    [pytest.param(*case, marks=pytest.mark.world(size)) for size, cases in NORMS.items() for case in cases],
)
def test_norm_and_clipping_are_those_of_megatron(groups, layout, optimizer):
    """To the bit of fp32. The norm is read from the device once, whatever the number of tensors."""
    shape = MIXTURE if groups[layout].layout.ep > 1 or groups[layout].layout.etp > 1 else SHAPE
    optim = OptimConfig(optimizer=optimizer, lr=0.0, clip_grad=0.0, weight_decay=0.0)
    engine = TrainEngine(shape, groups[layout], optim=optim, seed=3)
    mine = part_of(make_batch(), groups[layout])
    reported = engine.train(mine, max_tokens=64, loss=policy_loss, entropy=True)["grad_norm"]
    optimizers = optimizer_parts(engine.optimizer)
    grads = [parameter.grad for each in optimizers for parameter in each.get_parameters()]
    before = [grad.clone() for grad in grads]
    with Reads() as reads:
        norm = gradient_norm(engine.optimizer)
    assert reads.count <= 1
    with platform.cpu_bridge():
        # Of experts that other ranks share, megatron takes the root before it squares and adds.
        assert reported == norm == pytest.approx(engine.optimizer.get_grad_norm(), rel=1e-15) and norm > 0
        for each in optimizers:
            clip_grad_by_total_norm_fp32(each.get_parameters(), norm / 3, norm)
    expected = [grad.clone() for grad in grads]
    for grad, old in zip(grads, before, strict=True):
        grad.copy_(old)
    clip_gradients(engine.optimizer, norm / 3, norm)
    assert all(map(torch.equal, grads, expected)) and not all(map(torch.equal, grads, before))


class Reads(TorchDispatchMode):
    """Counts numbers that Python reads from tensors."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@pytest.mark.ci_world(2)
@pytest.mark.parametrize("layout", SOME_LAYOUTS)
def test_a_gradient_that_is_not_finite_moves_nothing(groups, layout):
    """One bad sample on one replica: every rank skips the step, and the next one is as if it had not been."""
    mine = part_of(make_batch(), groups[layout])
    engine, other = (TrainEngine(SHAPE, groups[layout], optim=OptimConfig(lr=1e-2), seed=3) for _ in range(2))

    def poisoned(outputs: dict[str, torch.Tensor], batch: TensorBatch):
        loss, metrics = policy_loss(outputs, batch)
        return loss * (torch.nan if groups[layout].coord.dp == 0 else 1.0), metrics

    skipped = engine.train(mine, max_tokens=64, loss=poisoned, entropy=True)
    assert (skipped["skipped_updates"], skipped["grad_norm"]) == (1.0, pytest.approx(torch.nan, nan_ok=True))
    found = engine.train(mine, max_tokens=64, loss=policy_loss, entropy=True)
    expected = other.train(mine, max_tokens=64, loss=policy_loss, entropy=True)
    assert (found["skipped_updates"], found["lr"]) == (0.0, expected["lr"])
    for name, shard in engine.named_shards().items():
        assert torch.equal(shard, other.named_shards()[name]), name


def shard(world: World, whole: torch.Tensor) -> torch.Tensor:
    """This rank's columns of (R, V)."""
    return whole.chunk(world.size, dim=1)[world.rank]


@pytest.mark.ci_world(4)
@pytest.mark.parametrize("dtype, atol", [(torch.float32, 1e-5), (torch.float64, 1e-12)], ids=["fp32", "fp64"])
@pytest.mark.parametrize(
    "entropy, squares, k", [(False, False, 0), (True, False, 0), (False, True, 5), (True, True, 5)]
)
def test_log_probs_of_a_split_vocabulary(world, groups, entropy, squares, k, dtype, atol):
    """Against torch's log_softmax over the whole vocabulary, values and gradients, of one target or of 1 + k."""
    generator = torch.Generator().manual_seed(0)
    rows, width, vocab = 17, 16, 16 * world.size - 5
    logits = 4 * torch.randn(rows, width * world.size, generator=generator, dtype=dtype)
    targets = torch.randint(0, vocab, (rows, 1), generator=generator)
    if k:
        others = torch.rand(rows, vocab, generator=generator).argsort(dim=1)[:, :k]
        others[0, 2] = targets[0]  # a gradient that two columns share
        targets = torch.cat([targets, others], dim=1)
    weight = torch.randn(targets.shape, generator=generator, dtype=dtype)
    of_entropy = torch.randn(rows, generator=generator, dtype=dtype)
    whole = logits.clone().requires_grad_()
    log_p = torch.log_softmax(whole[:, :vocab] / 0.7, dim=1)
    expected = log_p.gather(1, targets)
    expected_entropy = -(log_p.exp() * log_p).sum(1)

    local = shard(world, logits).clone().requires_grad_()
    found, found_entropy, found_squares = vocab_parallel_log_probs(
        local,
        targets,
        group=torch.distributed.group.WORLD,
        vocab_size=vocab,
        temperature=0.7,
        entropy=entropy,
        sum_pi_squared=squares,
    )
    torch.testing.assert_close(found, expected, rtol=0, atol=atol)
    loss, expected_loss = (found * weight).sum(), (expected * weight).sum()
    if entropy:
        torch.testing.assert_close(found_entropy, expected_entropy, rtol=0, atol=atol)
        loss = loss + (found_entropy * of_entropy).sum()
        expected_loss = expected_loss + (expected_entropy * of_entropy).sum()
    if squares:
        torch.testing.assert_close(found_squares, log_p.exp().square().sum(1), rtol=0, atol=atol)
        assert not found_squares.requires_grad
    assert (found_entropy is not None, found_squares is not None) == (entropy, squares)
    loss.backward()
    expected_loss.backward()
    torch.testing.assert_close(local.grad, shard(world, whole.grad), rtol=0, atol=atol)


@pytest.mark.ci_world(4)
@pytest.mark.parametrize("k", [1, 5, 13])
def test_likeliest_tokens_of_a_split_vocabulary(world, k):
    """Against a stable sort of the whole; many logits are equal, 0 and -0 among them; the padding is the largest."""
    vocab = 16 * world.size - 5
    logits = torch.randn(33, 16 * world.size, generator=torch.Generator().manual_seed(1)).round()
    assert ((logits == 0) & logits.signbit()).any() and ((logits == 0) & ~logits.signbit()).any()
    logits[:, vocab:] = 99.0
    k = min(k, vocab)  # above 11, the last rank has fewer columns
    found = vocab_parallel_topk_ids(shard(world, logits), k, group=torch.distributed.group.WORLD, vocab_size=vocab)
    assert torch.equal(found, logits[:, :vocab].sort(dim=1, descending=True, stable=True).indices[:, :k])


@pytest.mark.world(1)
def test_more_of_the_likeliest_tokens_than_there_are(groups):
    with pytest.raises(ValueError, match="k=6 is larger than vocab_size=5; use 5 or fewer"):
        vocab_parallel_topk_ids(torch.zeros(2, 8), 6, group=groups["alone"].tp, vocab_size=5)


@pytest.mark.ci_world(2)
@pytest.mark.parametrize("layout", SOME_LAYOUTS)
def test_teacher_outputs_are_those_of_one_rank(groups, layout):
    batch = make_batch()
    mine = part_of(batch, groups[layout])
    engine, alone = TrainEngine(SHAPE, groups[layout], seed=3), TrainEngine(SHAPE, groups["alone"], seed=3)
    found = engine.topk_log_probs(mine, max_tokens=64, temperature=0.7, k=7)
    plain = engine.log_probs(mine, max_tokens=64, temperature=0.7, sum_pi_squared=True)
    if not found:
        return
    k = SHAPE.vocab_size
    whole = alone.topk_log_probs(mine, max_tokens=10_000, temperature=0.7, k=k)
    log_p, ids = (whole[name].padded_vectors(k) for name in ("topk_log_probs", "topk_ids"))
    inside = mine.padded("response_mask", fill=-1) >= 0
    torch.testing.assert_close(log_p.exp().sum(2)[inside], torch.ones(int(inside.sum())), rtol=0, atol=1e-5)
    assert (ids.sort(dim=2).values[inside] == torch.arange(k)).all()

    squares = alone.log_probs(mine, max_tokens=10_000, temperature=0.7, sum_pi_squared=True)["sum_pi_squared"].padded()
    torch.testing.assert_close(squares[inside], log_p.exp().square().sum(2)[inside], rtol=0, atol=1e-5)
    torch.testing.assert_close(plain["sum_pi_squared"].padded(), squares, rtol=0, atol=1e-5)

    assert found["log_probs"].equal(plain["log_probs"])
    assert (found["topk_ids"].dtype, found["topk_log_probs"].dtype) == (np.int32, np.float32)
    found_ids, found_log_p = found["topk_ids"].padded_vectors(7), found["topk_log_probs"].padded_vectors(7)
    torch.testing.assert_close(found_log_p[inside], log_p[:, :, :7][inside], rtol=0, atol=1e-4)
    assert (found_ids == ids[:, :, :7])[inside].float().mean() > 0.99


def distillation_loss(outputs: dict[str, torch.Tensor], batch: TensorBatch):
    """Forward KL over the teacher's likeliest, and the policy's loss."""
    k = outputs["topk_log_probs"].shape[2]
    log_p = batch.tokens["teacher_topk_log_probs"].padded_vectors(k)
    kl = (log_p.exp() * (log_p - outputs["topk_log_probs"])).sum(2) * batch.padded("response_mask")
    loss, metrics = policy_loss(outputs, batch)
    return loss + kl.sum() / TOKENS, metrics


@pytest.mark.ci_world(2)
@pytest.mark.parametrize("layout", SOME_LAYOUTS)
def test_student_of_a_teacher_is_that_of_one_rank(groups, layout):
    """Gradients at the ids of a column, in every layout; then with all samples on one replica."""
    batch = make_batch()
    teacher = TrainEngine(SHAPE, groups["alone"], seed=8)
    found = teacher.topk_log_probs(batch, max_tokens=10_000, temperature=1.0, k=6)
    batch.tokens |= {f"teacher_{name}": found[name] for name in ("topk_ids", "topk_log_probs")}
    empty = batch if groups[layout].coord.dp == 0 else batch[:0]
    options = {"topk_ids": "teacher_topk_ids"}
    alone = OneRank(TrainEngine(SHAPE, groups["alone"], optim=SGD, seed=3), batch, distillation_loss, **options)
    for mine in (part_of(batch, groups[layout]), empty):
        engine = TrainEngine(SHAPE, groups[layout], optim=SGD, seed=3)
        assert_trains_as_one_rank(engine, mine, alone, distillation_loss, **options)


@pytest.mark.world(1)
def test_log_probs_at_all_ids_have_the_gradient_of_the_entropy(groups):
    """-sum p log p over the log-probs at every id is the entropy, whose gradient has a formula of its own."""
    batch, k = make_batch(), SHAPE.vocab_size
    itself = TrainEngine(SHAPE, groups["alone"], seed=3)
    found = itself.topk_log_probs(batch, max_tokens=64, temperature=0.7, k=k)
    batch.tokens |= {"ids": found["topk_ids"], "before": found["topk_log_probs"]}

    def loss(outputs: dict[str, torch.Tensor], micro: TensorBatch):
        log_p = outputs["topk_log_probs"]
        torch.testing.assert_close(log_p.detach(), micro.tokens["before"].padded_vectors(k), rtol=0, atol=1e-5)
        assert torch.equal(outputs["own_topk_ids"], micro.tokens["ids"].padded_vectors(k))
        entropy = -(log_p.exp() * log_p).sum(2) if by_ids else outputs["entropy"]
        return (entropy * micro.padded("advantages")).sum() / TOKENS, {}

    results = []
    for by_ids in (True, False):  # noqa: B007
        engine = TrainEngine(SHAPE, groups["alone"], optim=SGD, seed=3)
        engine.train(batch, max_tokens=64, loss=loss, temperature=0.7, entropy=True, topk_ids="ids")
        results.append(gradients(engine))
    assert_slices(engine, *results)
