"""How near a kernel has to come to fp64."""

from __future__ import annotations

import torch
from torch import Tensor

# Of ||found - expected|| / ||expected||: roundings of the inputs and of what is stored, not of what is computed.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
DTYPES = tuple(TOLERANCE)


def assert_near(found: Tensor, expected: Tensor, dtype: torch.dtype, factor: float = 1.0) -> None:
    """`expected` is computed in fp64 from the inputs as they are in `dtype`. Infinities have to be the same."""
    assert found.shape == expected.shape
    found, expected = found.double(), expected.double()
    assert not found.isnan().any(), f"{int(found.isnan().sum())} of {found.numel()} numbers are NaN"
    finite = expected.isfinite()
    assert torch.equal(found[~finite], expected[~finite])
    error, size = (found - expected)[finite].norm(), expected[finite].norm()
    assert error <= factor * TOLERANCE[dtype] * size + 1e-30, f"{error / size:.2e} away"


def poisoned(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Memory that tells what nobody wrote."""
    return torch.full(shape, float("nan"), dtype=dtype, device=device)
