"""Logits that keep what a product's accumulator has."""

from __future__ import annotations

import pytest
import torch

from hpcrl.kernels.fp32_product import product
from hpcrl.kernels.linear_log_prob import logits_of
from tests.kernels.close import assert_near

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_product_is_not_rounded_to_the_dtype_of_its_operands(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    hidden = torch.randn(5, 256, device=DEVICE).to(dtype)
    weight = torch.randn(300, 256, device=DEVICE).to(dtype)
    found, expected = product(hidden, weight.T), hidden.double() @ weight.double().T
    assert found.dtype == torch.promote_types(dtype, torch.float32)
    assert_near(found, expected, torch.float32)
    logits = logits_of(hidden, weight)
    if dtype is not torch.bfloat16 or DEVICE.type == "cuda":
        assert torch.equal(logits, found)
    else:
        assert logits.dtype == dtype
        assert_near(logits, expected, dtype)
