"""Any layout computes what one rank alone computes: log-probs, values, gradients, weights."""

from __future__ import annotations

import pytest
import torch

from hpcrl.batch.data_proto import DataProto
from hpcrl.config.schema import OptimConfig
from hpcrl.engine.engine import TrainEngine
from hpcrl.engine.logprob import vocab_parallel_log_probs
from hpcrl.grid.groups import RoleGroups
from hpcrl.launch.world import World
from tests.mpi.layouts import (
    LAYOUTS,
    SGD,
    SHAPE,
    TIED,
    assert_slices,
    gradients,
    make_batch,
    part_of,
    policy_loss,
    role_groups,
    value_engine,
    value_loss,
)


@pytest.fixture(scope="session")
def groups(world: World) -> dict[str, RoleGroups]:
    return role_groups(world.rank, world.size)


def assert_same_training(engine: TrainEngine, mine: DataProto, alone: TrainEngine, all_: DataProto, loss) -> None:
    """Two SGD steps on `mine` in this layout, and on `all_` alone: same norms, gradients and weights."""
    entropy = engine.head == "lm"
    for _ in range(2):
        found = engine.train(mine, max_tokens=64, loss=loss, temperature=0.7, entropy=entropy)
        expected = alone.train(all_, max_tokens=64, loss=loss, temperature=0.7, entropy=entropy)
        assert expected["grad_norm"] > 1e-3
        assert found["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-4)
        assert_slices(engine, gradients(engine), gradients(alone))
    assert_slices(engine, engine.named_shards(), alone.named_shards())


@pytest.mark.parametrize("shape", [SHAPE, TIED], ids=["untied", "tied"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_policy_is_that_of_one_rank(groups, layout, shape):
    batch = make_batch()
    mine = part_of(batch, groups[layout])
    engine = TrainEngine(shape, groups[layout], optim=SGD, seed=3)
    alone = TrainEngine(shape, groups["alone"], optim=SGD, seed=3)
    assert_slices(engine, engine.named_shards(), alone.named_shards())

    found = engine.log_probs(mine, max_tokens=64, temperature=0.7, entropy=True)
    expected = alone.log_probs(mine, max_tokens=10_000, temperature=0.7, entropy=True)
    assert set(found) == ({"log_probs", "entropy"} if groups[layout].is_last_stage else set())
    for name, column in found.items():
        torch.testing.assert_close(column.values, expected[name].values, rtol=0, atol=1e-4)
        assert torch.equal(column.lengths, mine.tokens["response_mask"].lengths)

    assert_same_training(engine, mine, alone, batch, policy_loss)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_values_are_those_of_one_rank(groups, layout):
    batch = make_batch()
    mine = part_of(batch, groups[layout])
    engine, alone = value_engine(groups[layout]), value_engine(groups["alone"])
    found = engine.values(mine, max_tokens=64)
    if found:
        expected = alone.values(mine, max_tokens=10_000)["values"].values
        assert expected.std() > 0.1
        torch.testing.assert_close(found["values"].values, expected, rtol=0, atol=1e-4)
    assert_same_training(engine, mine, alone, batch, value_loss)


@pytest.mark.parametrize(
    "layout", [pytest.param("dp2", marks=pytest.mark.world(2)), pytest.param("pp2dp2", marks=pytest.mark.world(4))]
)
def test_replica_without_samples(groups, layout):
    """All samples on one replica: the other runs the common number of dummy micro-batches and changes nothing."""
    batch = make_batch()
    mine = batch if groups[layout].coord.dp == 1 else batch[:0]
    engine = TrainEngine(SHAPE, groups[layout], optim=SGD, seed=3)
    found = engine.log_probs(mine, max_tokens=64, temperature=1.0)
    if groups[layout].is_last_stage:
        assert len(found["log_probs"]) == len(mine)
    alone = TrainEngine(SHAPE, groups["alone"], optim=SGD, seed=3)
    assert_same_training(engine, mine, alone, batch, policy_loss)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_bitwise_repeatable(groups, layout):
    mine = part_of(make_batch(), groups[layout])

    def run() -> list[torch.Tensor]:
        engine = TrainEngine(SHAPE, groups[layout], optim=OptimConfig(lr=1e-2), total_steps=2, seed=3)
        for _ in range(2):
            engine.train(mine, max_tokens=64, loss=policy_loss, entropy=True)
        column = engine.log_probs(mine, max_tokens=64, temperature=1.0).get("log_probs")
        return [*engine.named_shards().values(), *([column.values] if column else [])]

    assert all(torch.equal(a, b) for a, b in zip(run(), run(), strict=True))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_bfloat16_log_probs(groups, layout):
    """Measured: bf16 layouts differ from one rank by at most 0.02 here, and all of them from fp32 by 0.04."""
    mine = part_of(make_batch(), groups[layout])
    engine = TrainEngine(SHAPE, groups[layout], optim=OptimConfig(lr=1e-3), dtype=torch.bfloat16, seed=3)
    alone = TrainEngine(SHAPE, groups["alone"], dtype=torch.bfloat16, seed=3)
    found = engine.log_probs(mine, max_tokens=64, temperature=1.0)
    if found:
        expected = alone.log_probs(mine, max_tokens=64, temperature=1.0)
        difference = (found["log_probs"].values - expected["log_probs"].values).abs()
        assert difference.max() < 0.1
    assert 0 < engine.train(mine, max_tokens=64, loss=policy_loss, entropy=True)["grad_norm"] < 100


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
def test_micro_batching_changes_nothing(groups):
    batch = make_batch()
    of_one = TrainEngine(SHAPE, groups["alone"], optim=SGD, seed=3)
    norm = of_one.train(batch, max_tokens=10_000, loss=policy_loss, entropy=True)["grad_norm"]
    for max_tokens in (28, 57, 130):
        engine = TrainEngine(SHAPE, groups["alone"], optim=SGD, seed=3)
        found = engine.train(batch, max_tokens=max_tokens, loss=policy_loss, entropy=True)
        assert found["grad_norm"] == pytest.approx(norm, rel=1e-5)
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


@pytest.mark.parametrize("entropy", [False, True])
def test_log_probs_of_a_split_vocabulary(world, groups, entropy):
    """Against torch's log_softmax over the whole vocabulary, values and gradients."""
    generator = torch.Generator().manual_seed(0)
    rows, width, vocab = 17, 16, 16 * world.size - 5
    logits = 4 * torch.randn(rows, width * world.size, generator=generator)
    targets = torch.randint(0, vocab, (rows,), generator=generator)
    weight = torch.randn(2, rows, generator=generator)
    whole = logits.clone().requires_grad_()
    log_p = torch.log_softmax(whole[:, :vocab] / 0.7, dim=1)
    expected = log_p.gather(1, targets.unsqueeze(1)).squeeze(1)
    expected_entropy = -(log_p.exp() * log_p).sum(1)

    local = logits[:, world.rank * width : (world.rank + 1) * width].clone().requires_grad_()
    found, found_entropy = vocab_parallel_log_probs(
        local,
        targets,
        group=torch.distributed.group.WORLD,
        vocab_size=vocab,
        temperature=0.7,
        entropy=entropy,
    )
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    if entropy:
        torch.testing.assert_close(found_entropy, expected_entropy, rtol=0, atol=1e-5)
        (found * weight[0] + found_entropy * weight[1]).sum().backward()
        (expected * weight[0] + expected_entropy * weight[1]).sum().backward()
    else:
        assert found_entropy is None
        (found * weight[0]).sum().backward()
        (expected * weight[0]).sum().backward()
    torch.testing.assert_close(
        local.grad, whole.grad[:, world.rank * width : (world.rank + 1) * width], rtol=0, atol=1e-5
    )
