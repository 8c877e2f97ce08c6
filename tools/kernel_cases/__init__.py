"""What `tools/bench kernels` measures: for each kernel a function of its cases, with sizes as arguments."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any, NamedTuple

MODULES = {  # name of a kernel -> module with the function of this name
    **dict.fromkeys(("decode_attention", "exact_attention", "store_heads"), "attention"),
    **dict.fromkeys(("rms_norm", "rope", "swiglu"), "layers"),
    **dict.fromkeys(("exact_product", "expert_gradients", "fp8_matrix"), "matrices"),
    **dict.fromkeys(("checksum", "pack"), "weights"),
    **dict.fromkeys(("linear_log_prob", "sampling"), "vocabulary"),
}


class Case(NamedTuple):
    """Implementations of one thing on one set of inputs, which lies on the GPU and is several times its L2 cache.

    `runs` has "hpcrl" and those of the peers that are installed. Each moves at least `nbytes` (inputs read once,
    results written once) and does at least `flops`; the larger time at the measured ceilings is the floor. If it
    `only_reads`, its results are small beside its inputs.
    """

    name: str
    runs: dict[str, Callable[[], object]]
    nbytes: int
    flops: int = 0
    only_reads: bool = False


def cases_of(kernel: str, **sizes: Any) -> Iterator[Case]:
    """The cases of a kernel, of which `sizes` replace the usual ones."""
    yield from getattr(import_module(f"kernel_cases.{MODULES[kernel]}"), kernel)(**sizes)
