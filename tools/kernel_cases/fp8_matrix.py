from __future__ import annotations

from collections.abc import Iterator

import torch
from kernel_cases.case import Case
from torch.nn.functional import linear

from hpcrl.kernels.fp8_matrix import Fp8Matrix, fp8_linear, quantize_rows

COLS, OUTPUTS, ROWS = 8960, 17920, (16, 256, 4096)


def cases() -> Iterator[Case]:
    """Rows in 8 bits, and products with a matrix in 8 bits beside those in bf16, quantised rows included."""
    weight = torch.randn(OUTPUTS, COLS, device="cuda", dtype=torch.bfloat16)
    matrix = Fp8Matrix(*quantize_rows(weight), weight.dtype)
    for rows in ROWS:
        x = torch.randn(rows, COLS, device="cuda", dtype=torch.bfloat16)
        yield Case(f"{rows} rows of {COLS}", {"hpcrl": lambda x=x: quantize_rows(x)}, x.nbytes + x.numel() + 4 * rows)
        runs = {"hpcrl": lambda x=x: fp8_linear(x, matrix), "bf16": lambda x=x: linear(x, weight)}
        nbytes = x.nbytes + matrix.nbytes + 2 * rows * OUTPUTS
        yield Case(f"product of {rows} rows", runs, nbytes, rows * COLS * OUTPUTS)  # at twice the rate of bf16
