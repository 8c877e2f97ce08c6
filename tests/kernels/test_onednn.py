"""Products of oneDNN in place of MKL's: the same numbers, whatever the number of rows."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hpcrl.kernels.onednn import MIN_ELEMENTS, has_slow_mkl, product

CPUINFO = Path("/proc/cpuinfo").read_text()
AMD = "processor\t: 0\nvendor_id\t: AuthenticAMD\nflags\t\t: fpu sse avx2 avx512f\n"


@pytest.mark.parametrize(
    ("cpuinfo", "expected"),
    [
        (AMD, True),
        (AMD.replace("AuthenticAMD", "GenuineIntel"), False),
        (AMD.replace(" avx512f", ""), False),
        ("processor\t: 0\nFeatures\t: asimd\n", False),  # an ARM CPU names no vendor
    ],
)
def test_which_cpus_have_a_slow_mkl(cpuinfo: str, expected: bool) -> None:
    assert has_slow_mkl(cpuinfo) == expected


@pytest.mark.parametrize("rows", [1, 3, 7, 40, 300])
def test_products_and_both_gradients_are_those_of_mkl(rows: int) -> None:
    x, weight = torch.randn(rows, 96), torch.randn(200, 96)
    assert weight.numel() >= MIN_ELEMENTS
    grad = torch.randn(rows, 200)
    for a, b in ((x, weight.T), (grad, weight), (grad.T, x), (x.T, grad), (weight, x.T)):
        torch.testing.assert_close(product(a, b), a @ b, rtol=1e-4, atol=1e-4)
        assert product(a, b).is_contiguous()


@pytest.mark.skipif(not has_slow_mkl(CPUINFO), reason="products of this CPU are MKL's")
def test_a_row_does_not_depend_on_the_number_of_rows() -> None:
    x, weight = torch.randn(300, 96), torch.randn(200, 96)
    whole = product(x, weight.T)
    for rows in (2, 3, 4, 8, 13, 64, 255, 256):
        assert torch.equal(product(x[:rows], weight.T), whole[:rows]), rows
