"""Products of matrices: in exact mode, in 8 bits, and of experts' gradients."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.nn.functional import grouped_mm, linear

from hpcrl.kernels.fp8_matrix import Fp8Matrix, fp8_linear, quantize_rows
from hpcrl.kernels.grouped_experts_triton import add_expert_gradients
from hpcrl.model.exact import exact_linear
from kernel_cases import Case


def exact_product(
    rows: tuple[int, ...] = (1, 256, 16384), weights: tuple[tuple[int, int], ...] = ((17920, 1536), (1536, 8960))
) -> Iterator[Case]:
    """Products of exact mode, beside the library's, whose rows depend on their number."""
    for columns, terms in weights:
        weight = torch.randn(columns, terms, device="cuda", dtype=torch.bfloat16)
        for height in rows:
            x = torch.randn(height, terms, device="cuda", dtype=torch.bfloat16)
            runs = {
                "hpcrl": lambda x=x, weight=weight: exact_linear(x, weight),
                "torch eager": lambda x=x, weight=weight: x @ weight.T,
            }
            nbytes = x.nbytes + weight.nbytes + height * columns * 2
            yield Case(f"exact product {height} x {terms} x {columns}", runs, nbytes, 2 * height * columns * terms)


def expert_gradients(
    experts: int = 32, rows: int = 65536, sizes: tuple[tuple[int, int], ...] = ((1536, 1024), (1024, 768))
) -> Iterator[Case]:
    """Of 16,384 tokens with 4 experts each."""
    counts = torch.multinomial(torch.ones(experts), rows, replacement=True).bincount(minlength=experts)
    ends = counts.cumsum(0).to("cuda", torch.int32)
    for m, k in sizes:
        grad, a = (torch.randn(rows, width, device="cuda", dtype=torch.bfloat16) for width in (m, k))
        sums = torch.zeros(experts, m, k, device="cuda")
        runs = {
            "hpcrl": lambda sums=sums, grad=grad, a=a: add_expert_gradients(sums, grad, a, ends),
            "torch, then a sum": lambda sums=sums, grad=grad, a=a: sums.add_(grouped_mm(grad.t(), a, offs=ends)),
        }
        nbytes = grad.nbytes + a.nbytes + 2 * sums.nbytes
        yield Case(f"expert_gradients {m} x {k}", runs, nbytes, 2 * rows * m * k)


def fp8_matrix(cols: int = 8960, outputs: int = 17920, rows: tuple[int, ...] = (16, 256, 4096)) -> Iterator[Case]:
    """Rows in 8 bits, and products with a matrix in 8 bits beside those in bf16, quantised rows included."""
    weight = torch.randn(outputs, cols, device="cuda", dtype=torch.bfloat16)
    matrix = Fp8Matrix(*quantize_rows(weight), weight.dtype)
    for height in rows:
        x = torch.randn(height, cols, device="cuda", dtype=torch.bfloat16)
        nbytes = x.nbytes + x.numel() + 4 * height
        yield Case(f"{height} rows of {cols}", {"hpcrl": lambda x=x: quantize_rows(x)}, nbytes)
        runs = {"hpcrl": lambda x=x: fp8_linear(x, matrix), "bf16": lambda x=x: linear(x, weight)}
        nbytes = x.nbytes + matrix.nbytes + 2 * height * outputs
        yield Case(f"product of {height} rows", runs, nbytes, height * cols * outputs)  # at twice the rate of bf16
