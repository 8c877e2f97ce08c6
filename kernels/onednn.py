"""fp32 matrix products on CPUs by oneDNN in place of MKL, torch's choice, which uses half of the vector width of CPUs
that are not Intel's.

Measured on an AMD EPYC with AVX-512, one thread: 180 to 240 GFLOP/s instead of 90 to 110; with one row 1.2 to 1.7 times
the speed.
"""

from __future__ import annotations

import functools
import logging
import os
import warnings
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import pad

from hpcrl.kernels.dispatch import VARIABLE

# Below, MKL starts faster than oneDNN computes. The size of the second factor decides, which in a linear layer is the
# weight, so that a row's result hardly depends on the number of rows; one or two rows only read the weight.
MIN_ELEMENTS, MIN_ROWS, MIN_ELEMENTS_OF_FEW_ROWS = 2**14, 3, 2**20
# oneDNN compiles a kernel for each number of rows, in about 0.5 ms. Products of few rows are padded, to need fewer.
ROW_MULTIPLE, MAX_PADDED_ROWS = 8, 256

log = logging.getLogger(__name__)


_overrides = torch.library.Library("aten", "IMPL")


@functools.cache
def use_onednn() -> None:
    """If MKL is slow on this CPU, replace torch's `mm`, `addmm` and `addmm_` there in this process.

    HPCRL_KERNELS=torch keeps torch's own.
    """
    cpuinfo = Path("/proc/cpuinfo")
    if os.environ.get(VARIABLE) == "torch" or not cpuinfo.exists() or not has_slow_mkl(cpuinfo.read_text()):
        return
    if not (torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()):
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that an operator is replaced
        _overrides.impl("mm", _mm, "CPU", allow_override=True)
        _overrides.impl("addmm", _addmm, "CPU", allow_override=True)
        _overrides.impl("addmm_", _add_product, "CPU", allow_override=True)
    log.debug("fp32 matrix products by oneDNN: this CPU has AVX-512 and is not Intel's")


def has_slow_mkl(cpuinfo: str) -> bool:
    """Whether MKL leaves half of this CPU's vector width unused, given the text of /proc/cpuinfo."""
    fields = dict(line.split(":", 1) for line in cpuinfo.splitlines() if ":" in line)
    values = {name.strip(): value.strip() for name, value in fields.items()}
    return values.get("vendor_id", "GenuineIntel") != "GenuineIntel" and "avx512f" in values.get("flags", "").split()


def _mm(a: Tensor, b: Tensor) -> Tensor:
    if not _fits(a, b):
        return torch.mm(a, b, out=torch.empty((a.shape[0], b.shape[1]), dtype=a.dtype))
    return product(a, b)


def _addmm(bias: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    if not _fits(a, b, bias) or beta != 1 or alpha != 1:
        empty = torch.empty((a.shape[0], b.shape[1]), dtype=a.dtype)
        return torch.addmm(bias, a, b, beta=beta, alpha=alpha, out=empty)
    return product(a, b).add_(bias)


def _add_product(total: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    if not _fits(a, b, total) or beta != 1 or alpha != 1:
        return torch.addmm(total, a, b, beta=beta, alpha=alpha, out=total)
    return total.add_(_product(a, b))


def _fits(a: Tensor, b: Tensor, added: Tensor | None = None) -> bool:
    rows, elements = a.shape[0], b.numel()
    if elements < MIN_ELEMENTS or not rows or (rows < MIN_ROWS and elements < MIN_ELEMENTS_OF_FEW_ROWS):
        return False
    return all(x is None or x.dtype == torch.float32 for x in (a, b, added))


def multiply_into(target: Tensor, a: Tensor, b: Tensor) -> None:
    """Write `a` @ `b` into `target`, with the product that the process uses."""
    if use_onednn.cache_info().currsize:  # the operator with a target is not replaced
        target.copy_(a @ b)
    else:
        torch.mm(a, b, out=target)


def product(a: Tensor, b: Tensor) -> Tensor:
    """Return `a` (m, k) times `b` (k, n), fp32: contiguous (m, n).

    If `a` is contiguous, a row depends on the same row of `a` and not on their number, if that is 2 or more, bitwise.
    """
    return _product(a, b).contiguous()


def _product(a: Tensor, b: Tensor) -> Tensor:
    # oneDNN copies a first factor that is not contiguous, so the smaller one becomes the first.
    if not a.is_contiguous() and b.numel() < a.numel():
        return _by_rows(b.t(), a).t()
    return _by_rows(a, b.t())


def _by_rows(x: Tensor, weight: Tensor) -> Tensor:
    """Return `x` (m, k) times `weight` (n, k) transposed."""
    rows = len(x)
    if MIN_ROWS < rows < MAX_PADDED_ROWS and rows % ROW_MULTIPLE:
        x = pad(x, (0, 0, 0, -rows % ROW_MULTIPLE))
    return torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")[:rows]
