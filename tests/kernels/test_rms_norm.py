from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from hpcrl.kernels.layers import MAX_WIDTH, add_rms_norm, rms_norm
from tests.kernels.close import DTYPES, assert_near

EPS = 1e-5
# no rows, one, more than a program has; widths that are no power of 2
SHAPES = ((0, 8), (1, 3), (5, 7), (130, 32), (3, 2, 300), (2, 4097))


@pytest.mark.parametrize(
    ("dtype", "weight_dtype"), [*((dtype, None) for dtype in DTYPES), (torch.bfloat16, torch.float32)]
)
@pytest.mark.parametrize("shape", SHAPES)
def test_forward_and_backward(
    device: torch.device, dtype: torch.dtype, weight_dtype: torch.dtype | None, shape: tuple[int, ...]
) -> None:
    scales = torch.tensor([1e-3, 1.0, 1e3], dtype=torch.float64, device=device)[torch.randint(3, (*shape[:-1], 1))]
    x = (torch.randn(shape, dtype=torch.float64, device=device) * scales).to(dtype).requires_grad_()
    weight = torch.randn(shape[-1], device=device).to(weight_dtype or dtype).requires_grad_()
    grad = torch.randn(shape, device=device).to(dtype)
    y = rms_norm(x, weight, EPS)
    assert y.dtype == dtype
    exact = [part.detach().double().requires_grad_() for part in (x, weight)]
    expected = functional.rms_norm(exact[0], shape[-1:], exact[1], EPS)
    assert_near(y, expected, dtype)
    for found, wanted in zip(
        torch.autograd.grad(y, (x, weight), grad), torch.autograd.grad(expected, exact, grad.double()), strict=True
    ):
        assert_near(found, wanted, dtype, factor=2)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_norm_of_a_sum_is_that_of_what_is_kept(device: torch.device, dtype: torch.dtype) -> None:
    x, residual = (torch.randn(9, 40, device=device).to(dtype) for _ in range(2))
    weight = torch.randn(40, device=device).to(dtype)
    total, expected = residual.clone(), x + residual
    normed = add_rms_norm(x, total, weight, EPS)
    assert torch.equal(total, expected)
    assert_near(normed, functional.rms_norm(total.double(), (40,), weight.double(), EPS), dtype)


def test_rows_that_lie_apart(device: torch.device) -> None:
    """Such as the queries in a matrix of queries, keys and values."""
    mixed, weight = torch.randn(6, 48, device=device), torch.randn(32, device=device)
    assert_near(rms_norm(mixed[:, :32], weight, EPS), rms_norm(mixed[:, :32].contiguous(), weight, EPS), mixed.dtype)


def test_zeros_and_the_largest_numbers(device: torch.device) -> None:
    x = torch.stack([torch.zeros(16), torch.full((16,), 1e18), torch.full((16,), 1e-18)]).to(device)
    found = rms_norm(x, torch.ones(16, device=device), EPS)
    assert_near(found, functional.rms_norm(x.double(), (16,), eps=EPS), x.dtype)


def test_rows_that_are_too_wide_go_to_torch(device: torch.device, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "hpcrl.kernels.dispatch")
    x = torch.randn(2, MAX_WIDTH + 1, device=device)
    assert_near(rms_norm(x, x[0], EPS), functional.rms_norm(x.double(), x.shape[1:], x[0].double(), EPS), x.dtype)
    assert "torch, rows of 8193 are wider than 8192" in caplog.text
