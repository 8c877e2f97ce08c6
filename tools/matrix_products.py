"""The bare matrix products of a model: the floor beside which its times are shown."""

from __future__ import annotations

import time
from collections.abc import Sequence
from statistics import median

import torch
from torch import Tensor
from torch.nn.functional import linear

REPETITIONS = 10


@torch.no_grad()
def product_seconds(weights: Sequence[Tensor], rows: int) -> float:
    """Median seconds of a product of `rows` rows with each of the weights (out, in), in their order."""
    inputs = {weight.size(1): torch.randn(rows, weight.size(1), dtype=weight.dtype) for weight in weights}
    times = []
    for _ in range(REPETITIONS):
        start = time.perf_counter()
        for weight in weights:
            linear(inputs[weight.size(1)], weight)
        times.append(time.perf_counter() - start)
    return median(times)
