from __future__ import annotations

import pytest
import torch
from torch.nn.functional import silu

from hpcrl.kernels.layers import swiglu
from tests.kernels.close import DTYPES, assert_near

# no rows, one, more than a program has; halves that are no power of 2 and wider than a program
SHAPES = ((0, 8), (1, 2), (7, 10), (300, 16), (2, 3, 2 * 300), (3, 2 * 1030))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("weighted", [False, True])
def test_forward_and_backward(device: torch.device, dtype: torch.dtype, shape: tuple[int, ...], weighted: bool) -> None:
    given = [(3 * torch.randn(shape, device=device)).to(dtype).requires_grad_()]
    given += [torch.rand(shape[:-1], device=device).requires_grad_()] if weighted else []
    exact = [each.detach().double().requires_grad_() for each in given]
    gate, up = exact[0].chunk(2, -1)
    y, expected = swiglu(*given), silu(gate) * up * (exact[1].unsqueeze(-1) if weighted else 1.0)
    assert y.dtype == dtype
    assert_near(y, expected, dtype)
    grad = torch.randn(y.shape, device=device).to(dtype)
    found, wanted = torch.autograd.grad(y, given, grad), torch.autograd.grad(expected, exact, grad.double())
    for one, other in zip(found, wanted, strict=True):
        assert_near(one, other, dtype)


def test_rows_that_lie_apart(device: torch.device) -> None:
    """Nothing beside them is read into the result, and a gradient may be spread from one number."""
    mixed = torch.full((6, 48), float("nan"), device=device)
    x = mixed[:, 4:36].normal_().requires_grad_(False)
    leaf = x.detach().requires_grad_()
    whole = x.contiguous().requires_grad_()
    assert_near(swiglu(leaf), swiglu(whole), x.dtype)
    found, wanted = (torch.autograd.grad(swiglu(part).sum(), part)[0] for part in (leaf, whole))
    assert_near(found, wanted, x.dtype)
    assert_near(swiglu(x.t().contiguous().t()), swiglu(whole), x.dtype)


def test_gates_far_from_zero(device: torch.device) -> None:
    """The gate's activation is 0 on one side and the gate on the other, and so is its derivative 0 and 1."""
    gate = torch.tensor([-1e30, -200.0, -0.0, 200.0, 1e30], device=device)
    up = torch.tensor([1e10, -1e10, 3.0, 2.0, -1e10], device=device)
    x = torch.cat((gate, up)).expand(3, 10).contiguous().requires_grad_()
    y = swiglu(x)
    assert torch.equal(y.detach(), torch.tensor([0.0, 0.0, 0.0, 400.0, -torch.inf], device=device).expand(3, 5))
    (grad,) = torch.autograd.grad(y, x, torch.ones_like(y))
    wanted = [0.0, 0.0, 1.5, 2.0, -1e10, 0.0, 0.0, 0.0, 200.0, 1e30]
    assert_near(grad, torch.tensor(wanted, dtype=torch.float64, device=device).expand(3, 10), x.dtype)


def test_halves_of_one_width(device: torch.device) -> None:
    with pytest.raises(ValueError, match="rows of 7 are not two halves"):
        swiglu(torch.ones(2, 7, device=device))
