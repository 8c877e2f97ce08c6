"""A host tensor's memory as numpy and MPI see it."""

from __future__ import annotations

import numpy as np
from torch import Tensor


class _Memory:
    """Holds the tensor for as long as an array on its memory lives."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self.__array_interface__ = {
            "version": 3,
            "shape": (tensor.nbytes,),
            "typestr": "|u1",
            "data": (tensor.data_ptr(), False),
        }


def host_bytes(tensor: Tensor) -> np.ndarray:
    """uint8 (bytes,) on the memory of a contiguous tensor of any dtype.

    `Tensor.numpy` would do, if torch did not forbid for good, to a storage once seen by numpy, to change its size: and
    so its offload (`hpcrl.engine.offload`).
    """
    if tensor.device.type != "cpu":
        raise ValueError(f"expected a tensor in host memory, found one on {tensor.device}")
    if not tensor.nbytes:
        return np.empty(0, np.uint8)  # its address is 0, which numpy 2.2 refuses
    return np.asarray(_Memory(tensor))
