"""The Triton kernels where ranks work together, and a whole training step with and without them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from hpcrl.engine.engine import TrainEngine
from hpcrl.kernels.linear_log_prob import linear_log_probs
from tests.mpi.layouts import SGD, SHAPE, TIED, gradients, make_batch, part_of, policy_loss, value_engine, value_loss


@contextmanager
def triton() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HPCRL_KERNELS", "triton")
        yield


@pytest.mark.parametrize(
    "layout", [pytest.param("tp2", marks=pytest.mark.world(2)), pytest.param("tp4", marks=pytest.mark.world(4))]
)
def test_a_vocabulary_over_ranks(groups, layout):
    """45 ids, padded to 64: a rank of four has none. Large logits are on any rank."""
    group, rows = groups[layout].tp, 7
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, 8, generator=generator, dtype=torch.float64) for n in (rows, 64))
    hidden[::2] *= 5
    targets = torch.randint(0, 45, (rows, 2), generator=generator)
    options = {"vocab_size": 45, "temperature": 0.7, "entropy": True, "sum_pi_squared": True}
    width = 64 // group.size()
    mine = slice(group.rank() * width, (group.rank() + 1) * width)
    found, leaves = [], []
    for dtype in (torch.float32, torch.float64):  # of which Triton takes the first
        leaves.append([hidden.to(dtype).requires_grad_(), weight[mine].to(dtype).requires_grad_()])
        with triton():
            outputs = linear_log_probs(*leaves[-1], targets, chunk_rows=3, group=group, **options)
        (outputs.log_probs.sum() + outputs.entropies.square().sum()).backward()
        found.append(outputs)
    assert type(found[0].log_probs.grad_fn).__name__ == "LinearLogProbsBackward"
    for ours, exact in zip(found[0][:3], found[1][:3], strict=True):
        torch.testing.assert_close(ours.double(), exact, rtol=1e-5, atol=1e-5)
    for ours, exact in zip(*leaves, strict=True):
        torch.testing.assert_close(ours.grad.double(), exact.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "head",
    ["lm", pytest.param("value", marks=pytest.mark.slow), pytest.param("tied", marks=pytest.mark.exhaustive)],
)
@pytest.mark.parametrize(
    "layout", [pytest.param("single", marks=pytest.mark.world(1)), pytest.param("tp2", marks=pytest.mark.world(2))]
)
def test_training_is_the_same_with_kernels_and_without(groups, layout, head):
    batch = part_of(make_batch(4), groups[layout])

    def steps() -> tuple[list[dict[str, float]], dict[str, torch.Tensor]]:
        if head == "value":
            engine, loss = value_engine(groups[layout]), value_loss
        else:
            shape = TIED if head == "tied" else SHAPE
            engine, loss = TrainEngine(shape, groups[layout], optim=SGD, seed=3), policy_loss
        told = [
            engine.train(batch, max_tokens=64, loss=loss, temperature=0.7, entropy=head != "value") for _ in range(2)
        ]
        return told, gradients(engine) | engine.named_shards()

    expected, without = steps()
    with triton():
        found, used = steps()
    for ours, theirs in zip(found, expected, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5, abs=1e-5)
    for name, tensor in used.items():
        torch.testing.assert_close(tensor, without[name], rtol=1e-5, atol=1e-5)
