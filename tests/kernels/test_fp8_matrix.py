from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hpcrl.kernels.dispatch import FP8
from hpcrl.kernels.fp8_matrix import Fp8Matrix, fp8_linear, fp8_product, quantize_rows, row_scales
from hpcrl.kernels.pack import RepeatedCopies


def drawn(rows: int, cols: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Numbers of all sizes; a row of zeros."""
    generator = torch.Generator().manual_seed(rows)
    found = torch.randn(rows, cols, generator=generator) * torch.logspace(-6, 3, rows)[:, None]
    found[rows // 2] = 0.0
    return found.to(device, dtype)


def scales_of(values: Tensor, dtype: torch.dtype) -> Tensor:
    return row_scales(values.to(dtype).float().abs().amax(1, keepdim=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("of", [torch.float32, torch.bfloat16])
def test_the_kernel_of_a_refit_quantizes_as_torch_does(
    device: torch.device, of: torch.dtype, dtype: torch.dtype
) -> None:
    """Bit for bit, by rectangles with wide and narrow accesses; each number is within half a step of its own."""
    values, aside = drawn(37, 64, of, device), torch.zeros(5, 8, device=device)
    expected, found = (
        Fp8Matrix(torch.zeros(37, 64, dtype=FP8, device=device), scales_of(values, dtype), dtype) for _ in range(2)
    )
    expected.copy_(values)

    def pairs() -> list[tuple[Tensor, Tensor | Fp8Matrix]]:
        rectangles = (0, 20, 0, 64), (20, 17, 0, 7), (20, 17, 7, 57)
        parts = [(values[r : r + n, c : c + m], found.part(r, n, c, m)) for r, n, c, m in rectangles]
        return [*parts, (values[:5, :8], aside)]

    RepeatedCopies().run([values, found, aside], pairs)
    assert torch.equal(found.numbers.view(torch.int8), expected.numbers.view(torch.int8))
    assert torch.equal(aside, values[:5, :8].float())
    rounded = values.to(dtype).float()
    error = (found.dequantized(torch.float32) - rounded).abs()
    assert bool((error <= torch.maximum(rounded.abs() / 16, 0.5 * 2**-9 * found.scales) * 1.001).all())


@pytest.mark.parametrize(("rows", "cols"), [(37, 64), (5, 4099)])
def test_rows_that_are_quantized(device: torch.device, rows: int, cols: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel's bits are torch's, also where rows lie apart and have several blocks."""
    values = drawn(rows, cols + 16, torch.bfloat16, device)[:, :cols]
    found = quantize_rows(values)
    monkeypatch.setenv("HPCRL_KERNELS", "torch")
    for ours, its in zip(found, quantize_rows(values), strict=True):
        assert torch.equal(ours.view(torch.uint8), its.view(torch.uint8))
    assert torch.equal(found[1], scales_of(values, torch.bfloat16))


def test_products(device: torch.device) -> None:
    """Without 8-bit products: those of the dequantised matrix, bit for bit. With them: within the rounding of both."""
    values, x = drawn(48, 32, torch.bfloat16, device), drawn(20, 32, torch.bfloat16, device)
    weight = Fp8Matrix.of(values, scales_of(values, torch.bfloat16), torch.bfloat16)
    plain = torch.nn.functional.linear(x, weight.dequantized())
    if device.type == "cpu":
        assert torch.equal(fp8_linear(x, weight), plain)
    size = x.float().norm(dim=1, keepdim=True) * weight.dequantized(torch.float32).norm(dim=1)
    assert bool(((fp8_product(x, weight).float() - plain.float()).abs() <= 0.04 * size).all())
