from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from hpcrl.kernels.dispatch import use_triton
from hpcrl.kernels.grouped_experts import (
    TOKENS,
    Biases,
    ExpertWeights,
    Operand,
    Order,
    grouped_linear,
    place_in_stack,
    stacked,
)
from hpcrl.kernels.grouped_experts_triton import add_expert_gradients
from tests.kernels.close import assert_near
from tests.strict_device.load import load

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
EXPERTS, INSIDE, OUTSIDE, NUM_TOKENS, TOPK = 8, 32, 16, 11, 3


def in_one_memory(dtype: torch.dtype, kind: str) -> list[Tensor]:
    """Matrices of experts: in a stack, from the last to the first with others between them as in megatron's buffers,
    or apart."""
    if kind == "apart":
        return [torch.randn(OUTSIDE, INSIDE, device=DEVICE).to(dtype) for _ in range(EXPERTS)]
    memory = torch.randn(EXPERTS, OUTSIDE * INSIDE + 64, device=DEVICE).to(dtype)
    found = [row[64:].view(OUTSIDE, INSIDE) for row in memory]
    return found if kind == "stack" else found[::-1]


def leaves(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [tensor.detach().requires_grad_() for tensor in tensors]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["stack", "reversed", "apart"])
@pytest.mark.parametrize("sums", [False, True])
def test_each_row_is_multiplied_by_its_expert(dtype: torch.dtype, kind: str, sums: bool) -> None:
    """Also backward: by itself, and with gradients of weights that are added to fp32 sums."""
    torch.manual_seed(0)
    each = leaves(in_one_memory(dtype, kind))
    x, shares = torch.randn(NUM_TOKENS, INSIDE, device=DEVICE).to(dtype), torch.rand(NUM_TOKENS, TOPK, device=DEVICE)
    ids = (
        torch.rand(NUM_TOKENS, EXPERTS - 2, device=DEVICE).argsort(1)[:, :TOPK] + 1
    )  # the first and the last have none
    bias = leaves(torch.randn(EXPERTS, OUTSIDE, device=DEVICE).to(dtype).unbind())
    before = torch.randn(EXPERTS, OUTSIDE, INSIDE, device=DEVICE)
    before = before.flip(0) if kind == "reversed" else before
    totals = before.clone().unbind()[:: -1 if kind == "reversed" else 1]
    before = before.flip(0) if kind == "reversed" else before
    for weight, total in zip(each, totals, strict=True) if sums else ():
        weight.sums_in_fp32, weight.main_grad = True, total  # type: ignore[attr-defined]
    weights = ExpertWeights(each)
    assert (weights.is_reversed, weights.is_current) == (kind == "reversed", True)
    order = Order(ids, EXPERTS, weights.is_reversed)
    assert (weights.stack(order) is None) == (kind == "apart")
    given = leaves([x, shares])

    def output() -> Tensor:
        rows = order.of_rows(given[1])
        product = grouped_linear(weights, order, order.gather(given[0]), rows, operand=Operand(function=scaled))
        return order.sum(Biases(bias).add(product, order, rows))

    exact = [tensor.detach().double().requires_grad_() for tensor in (x, shares, *each, *bias)]
    expected = torch.zeros(NUM_TOKENS, OUTSIDE, device=DEVICE, dtype=torch.float64)
    for slot in range(TOPK):
        matrices, of_row = torch.stack(exact[2 : 2 + EXPERTS])[ids[:, slot]], torch.stack(exact[2 + EXPERTS :])
        product = torch.einsum("ti,toi->to", torch.sin(exact[0]), matrices) + of_row[ids[:, slot]]
        expected = expected + product * exact[1][:, slot, None]
    assert_near(output(), expected, dtype, factor=3)
    with torch.no_grad():
        assert_near(output(), expected, dtype, factor=3)
    grad = torch.randn(NUM_TOKENS, OUTSIDE, device=DEVICE).to(dtype)
    found = list(torch.autograd.grad(output(), [*given, *each, *bias], grad, allow_unused=True))
    wanted = list(torch.autograd.grad(expected, exact, grad.double()))
    if sums:
        assert found[2 : 2 + EXPERTS] == [None] * EXPERTS and each[0].grad_added_to_main_grad  # type: ignore[attr-defined]
        found[2 : 2 + EXPERTS] = [*(torch.stack(totals) - before)]
    whole = [(found[:1], wanted[:1]), (found[1:2], wanted[1:2]), (found[2:10], wanted[2:10]), (found[10:], wanted[10:])]
    for some, exactly in whole:
        assert_near(torch.stack(some), torch.stack(exactly), dtype, factor=3)  # type: ignore[arg-type]


def scaled(x: Tensor, shares: Tensor) -> Tensor:
    return (torch.sin(x) * shares.unsqueeze(1)).to(x.dtype)


@pytest.mark.parametrize("device_type", ["cpu", "strict"])
def test_rows_may_be_gathered_again(device_type: str) -> None:
    device = load() if device_type == "strict" else torch.device("cpu")
    x, stack = torch.randn(NUM_TOKENS, INSIDE), torch.randn(EXPERTS, OUTSIDE, INSIDE)
    ids = torch.rand(NUM_TOKENS, EXPERTS).argsort(1)[:, :TOPK]
    given = leaves([x.to(device), *stack.to(device)])
    order = Order(ids.to(device), EXPERTS)
    weights = ExpertWeights(given[1:])
    assert weights.needs_host == (device_type == "cpu")
    found = order.sum(grouped_linear(weights, order, given[0], operand=TOKENS))
    again = order.sum(grouped_linear(weights, order, order.gather(given[0])))
    assert_near(found.cpu(), torch.einsum("ti,tkoi->to", x.double(), stack[ids].double()), x.dtype)
    grad = torch.randn(NUM_TOKENS, OUTSIDE).to(device)
    with torch.autograd.set_multithreading_enabled(False):  # which the strict device does not have
        gradients = [torch.autograd.grad(each, given, grad) for each in (found, again)]
    for one, other in zip(*gradients, strict=True):
        assert torch.equal(one.cpu(), other.cpu())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("m", "k"), [(1, 3), (130, 20)])
def test_gradients_are_added_to_fp32_sums(device: torch.device, dtype: torch.dtype, m: int, k: int) -> None:
    torch.manual_seed(0)
    counts = [0, 70, 1, 0, 3]
    ends = torch.tensor(counts, device=device).cumsum(0).to(torch.int32)
    grad, a = (torch.randn(sum(counts), width, device=device).to(dtype) for width in (m, k))
    memory = torch.randn(len(counts), m * k + 5, device=device)
    before, sums = memory.clone(), memory[:, 2:-3].unflatten(1, (m, k))
    expected = sums.double()
    for total, part, rows in zip(expected, grad.split(counts), a.split(counts), strict=True):
        total += part.double().t() @ rows.double()
    assert use_triton("expert_gradients", a)
    add_expert_gradients(sums, grad, a, ends)
    assert_near(sums, expected, torch.float32)
    sums.zero_()
    before[:, 2:-3] = 0
    assert torch.equal(memory, before)


def test_rows_of_frozen_weights_are_not_kept() -> None:
    order = Order(torch.zeros(4, 1, dtype=torch.int64), 1)
    x = torch.randn(4, 16, requires_grad=True)
    for is_trained in (False, True):
        weights = ExpertWeights([torch.randn(16, 16, requires_grad=is_trained)])
        product = grouped_linear(weights, order, x * 1.0)
        assert len(product.grad_fn.saved_tensors) == is_trained  # type: ignore[union-attr]
        (grad,) = torch.autograd.grad(product, x, torch.ones_like(product))
        assert_near(grad, torch.ones(4, 16).double() @ weights.each[0].double(), x.dtype)


def test_memory_that_a_grouped_product_cannot_read() -> None:
    """Its widths have to be multiples of 16 bytes, also that of the gradient's rows."""
    for rows, columns in ((4, 16), (16, 4)):
        memory = torch.randn(3, rows, columns, dtype=torch.bfloat16)
        assert stacked(memory.unbind()) is None
    assert stacked(torch.randn(3, 8, 16, dtype=torch.bfloat16).unbind()) is not None
    unloaded = [torch.randn(16, 16) for _ in range(3)]
    for weight in unloaded:
        weight.untyped_storage().resize_(0)
    assert stacked(unloaded) is None


def test_weights_that_move_are_found_again() -> None:
    parameters = [torch.nn.Parameter(torch.randn(16, 16)) for _ in range(3)]
    values = [parameter.detach().clone() for parameter in parameters]
    assert ExpertWeights(parameters).is_current
    place_in_stack(parameters)
    weights = ExpertWeights(parameters)
    assert weights.is_reversed and all(torch.equal(*each) for each in zip(parameters, values, strict=True))
    parameters[-1].data = parameters[-1].data.clone()
    assert not weights.is_current and not ExpertWeights(parameters).is_reversed
