"""The output layer in parts: the numbers of the plain path, in a fraction of its memory."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from hpcrl.engine.outputs import vocab_parallel_log_probs
from hpcrl.kernels import linear_log_prob_triton
from hpcrl.kernels.linear_log_prob import linear_log_probs
from hpcrl.kernels.vocabulary import vocab_parallel_topk_ids
from tests.kernels.close import assert_near as assert_close_to
from tests.live_bytes import LiveBytes, all_tensors

ALONE: Any = SimpleNamespace(rank=lambda: 0, size=lambda: 1)  # a group of one rank
WANTED = {"group": ALONE, "temperature": 0.7, "entropy": True}


def inputs(rows: int, hidden: int, width: int, vocab_size: int, num_targets: int = 1, dtype=torch.float32) -> list[Any]:
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(rows, hidden, generator=generator).to(dtype).requires_grad_()
    weight = (0.3 * torch.randn(width, hidden, generator=generator)).to(dtype).requires_grad_()
    return [states, weight, torch.randint(0, vocab_size, (rows, num_targets), generator=generator)]


def loss_of(log_probs: Tensor, entropies: Tensor) -> Tensor:
    """With another weight for each number, as advantages are."""
    weights = torch.linspace(-1.0, 2.0, log_probs.numel(), device=log_probs.device).view(log_probs.shape)
    return (log_probs * weights).sum() + 0.1 * (entropies * weights[:, 0]).sum()


def plain(states: Tensor, weight: Tensor, targets: Tensor, **options: Any):
    return vocab_parallel_log_probs(states @ weight.T, targets, **WANTED, **options)


def assert_near(found: Tensor, expected: Tensor, tolerance: float = 1e-6) -> None:
    assert found.dtype == expected.dtype
    assert (found - expected).norm() <= tolerance * expected.norm()


@pytest.mark.parametrize("rows, chunk_rows", [(1, 1), (1, 8), (37, 1), (37, 5), (37, 8), (40, 8), (37, 37), (37, 1000)])
def test_chunks_change_nothing(rows, chunk_rows):
    """Two targets a row, the second sometimes the first; 64 columns of which the last 7 are padding."""
    of_plain, of_chunks = (inputs(rows, 24, 64, 57, num_targets=2) for _ in range(2))
    of_plain[2][::3, 1] = of_chunks[2][::3, 1] = of_plain[2][::3, 0]
    expected = plain(*of_plain, vocab_size=57, sum_pi_squared=True)
    ids = vocab_parallel_topk_ids(of_plain[0] @ of_plain[1].T, 6, group=ALONE, vocab_size=57)
    at_ids, *_ = plain(of_plain[0], of_plain[1], ids, vocab_size=57)
    found = linear_log_probs(*of_chunks, chunk_rows=chunk_rows, vocab_size=57, sum_pi_squared=True, k=6, **WANTED)
    assert torch.equal(found.topk_ids, ids)
    for ours, theirs in zip((*found[:3], found.topk_log_probs), (*expected, at_ids), strict=True):
        assert_near(ours, theirs)
    assert [output.requires_grad for output in found] == [True, True, False, False, False]
    loss_of(*expected[:2]).backward()
    loss_of(*found[:2]).backward()
    for ours, theirs in zip(of_chunks[:2], of_plain[:2], strict=True):
        assert_near(ours.grad, theirs.grad)


@pytest.mark.parametrize("of", ["log_probs", "entropies"])
def test_a_loss_on_one_output_alone(of):
    of_plain, of_chunks = (inputs(21, 16, 32, 32) for _ in range(2))
    expected = dict(zip(("log_probs", "entropies"), plain(*of_plain, vocab_size=32), strict=False))[of]
    found = getattr(linear_log_probs(*of_chunks, chunk_rows=4, vocab_size=32, **WANTED), of)
    expected.square().sum().backward()
    found.square().sum().backward()
    for ours, theirs in zip(of_chunks[:2], of_plain[:2], strict=True):
        assert_near(ours.grad, theirs.grad)


def test_bfloat16_gradients_are_summed_in_fp32():
    """In many chunks they are about as near those of fp32 as in one: 0.0028 of the norm and 0.0024 measured, and 0.012
    where the chunks' gradients are added in bf16."""
    rows = 2048
    *_, targets = inputs(rows, 16, 64, 64)
    in_fp32 = [
        tensor.detach().float().requires_grad_() for tensor in inputs(rows, 16, 64, 64, dtype=torch.bfloat16)[:2]
    ]
    loss_of(*plain(*in_fp32, targets, vocab_size=64)[:2]).backward()
    errors = {}
    for chunk_rows in (8, rows):
        given = inputs(rows, 16, 64, 64, dtype=torch.bfloat16)
        loss_of(*linear_log_probs(*given, chunk_rows=chunk_rows, vocab_size=64, **WANTED)[:2]).backward()
        assert given[1].grad.dtype == torch.bfloat16
        errors[chunk_rows] = float((given[1].grad.float() - in_fp32[1].grad).norm() / in_fp32[1].grad.norm())
    assert errors[8] < 1.5 * errors[rows] < 0.01


def test_without_gradients_nothing_is_kept():
    with torch.no_grad():
        given = inputs(64, 16, 4096, 4096)
        with LiveBytes(apart=all_tensors()) as counted:
            found = linear_log_probs(*given, chunk_rows=8, vocab_size=4096, k=3, **WANTED)
        assert counted.live() == sum(output.nbytes for output in found if output is not None)
        assert counted.largest == 8 * 4096 * 4


def test_memory_at_a_large_vocabulary():
    """32k tokens x 2k rows in fp32: never more than a few tensors of chunk x vocabulary, beside the gradients."""
    rows, hidden, vocab, chunk_rows = 2048, 16, 32768, 128
    given = inputs(rows, hidden, vocab, vocab)
    gradients = sum(tensor.nbytes for tensor in given[:2])

    def measure(*path) -> LiveBytes:
        for tensor in given[:2]:
            tensor.grad = None
        with LiveBytes(apart=all_tensors()) as counted:
            loss_of(*path[0](*given, vocab_size=vocab, **path[1])[:2]).backward()
        return counted

    in_chunks = measure(linear_log_probs, {"chunk_rows": chunk_rows, **WANTED})
    at_once = measure(plain, {})
    print(f"peak {in_chunks.peak / 2**20:.0f} MiB in chunks of {chunk_rows}, {at_once.peak / 2**20:.0f} MiB at once")
    chunk = chunk_rows * vocab * 4
    assert in_chunks.largest == chunk
    assert in_chunks.peak < 3.1 * chunk + gradients
    assert in_chunks.peak < at_once.peak / 8
    assert at_once.peak > 3 * rows * vocab * 4


DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def exactly(given: list[Any], *, vocab_size: int, temperature: float) -> tuple[list[Tensor], tuple[Tensor, ...]]:
    """Leaves in fp64, and log-probs, entropies, sums of squares."""
    leaves = [tensor.detach().double().requires_grad_() for tensor in given[:2]]
    log_p = ((leaves[0] @ leaves[1].T)[:, :vocab_size] / temperature).log_softmax(1)
    return leaves, (log_p.gather(1, given[2]), -(log_p.exp() * log_p).sum(1), log_p.detach().exp().square().sum(1))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows, hidden, width, vocab_size, num_targets", [(5, 16, 300, 300, 1), (3, 24, 1000, 777, 3)])
def test_triton_is_near_fp64(
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
    dtype: torch.dtype,
    rows: int,
    hidden: int,
    width: int,
    vocab_size: int,
    num_targets: int,
) -> None:
    """In chunks of 256 columns, tiles of 128; a target twice in a row, and large logits."""
    monkeypatch.setattr(linear_log_prob_triton, "HEAD_CHUNK_BYTES", 1)
    monkeypatch.setattr(linear_log_prob_triton, "BLOCK", 128)
    given = inputs(rows, hidden, width, vocab_size, num_targets, dtype)
    given = [
        given[0].detach().mul(3).to(device).requires_grad_(),
        given[1].detach().to(device).requires_grad_(),
        given[2].to(device),
    ]
    given[2][0, :] = given[2][0, 0].clone()
    found = linear_log_probs(*given, chunk_rows=1, vocab_size=vocab_size, sum_pi_squared=True, **WANTED)
    leaves, expected = exactly(given, vocab_size=vocab_size, temperature=WANTED["temperature"])
    for ours, exact in zip(found[:3], expected, strict=True):
        assert ours.dtype == torch.float32
        assert_close_to(ours, exact, torch.float32)
    loss_of(*found[:2]).backward()
    loss_of(*expected[:2]).backward()
    for ours, exact in zip(given[:2], leaves, strict=True):
        assert ours.grad.dtype == dtype
        assert_close_to(ours.grad, exact.grad, dtype)
    assert not given[1].grad[vocab_size:].any()


def test_triton_without_rows_or_with_banned_tokens(device: torch.device) -> None:
    empty = [tensor.detach().to(device) for tensor in inputs(0, 16, 64, 64)]
    assert linear_log_probs(*empty, chunk_rows=1, vocab_size=64, **WANTED).log_probs.shape == (0, 1)
    hidden, weight = torch.ones(2, 1, device=device), torch.full((300, 1), -torch.inf, device=device)
    weight[[7, 280]] = 0.0
    targets = torch.tensor([[7], [280]], device=device)
    found = linear_log_probs(hidden, weight, targets, chunk_rows=1, vocab_size=300, **WANTED)
    assert_near(found.log_probs, torch.full((2, 1), 0.5, device=device).log())
    assert_near(found.entropies, torch.full((2,), 2.0, device=device).log())


def test_what_triton_does_not_do_goes_to_torch(device: torch.device) -> None:
    given = [tensor.to(device) for tensor in inputs(3, 8, 32, 32)]
    found = linear_log_probs(*given, chunk_rows=2, vocab_size=32, k=2, **WANTED)
    assert found.topk_ids is not None and found.topk_ids.shape == (3, 2)


@pytest.mark.parametrize("kernels", ["torch", "triton"])
def test_the_gradient_of_the_weight_is_added_to_its_sum(
    kernels: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As megatron's layers do it: what was there stays, and nothing is rounded to bf16."""
    monkeypatch.setenv("HPCRL_KERNELS", kernels)
    made = [each.detach().to(device) for each in inputs(13, 16, 32, 32, dtype=torch.bfloat16)]
    states, weight, targets = made[0].requires_grad_(), made[1].requires_grad_(), made[2]
    exact = [states.detach().double().requires_grad_(), weight.detach().double().requires_grad_()]
    loss_of(*plain(*exact, targets, vocab_size=32)[:2]).backward()
    rounded = loss_of(*linear_log_probs(states, weight, targets, chunk_rows=4, vocab_size=32, **WANTED)[:2])
    (expected,) = torch.autograd.grad(rounded, weight)
    weight.sums_in_fp32, weight.main_grad = True, torch.full_like(weight, 2.0, dtype=torch.float32)
    loss_of(*linear_log_probs(states, weight, targets, chunk_rows=4, vocab_size=32, **WANTED)[:2]).backward()
    assert weight.grad_added_to_main_grad
    found, truth = weight.main_grad.double() - 2, exact[1].grad
    assert (found - truth).norm() < (expected.double() - truth).norm() < 0.01 * truth.norm()
