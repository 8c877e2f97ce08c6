"""`hpcrl check --trtllm`: could this machine's MPI, GPUs and tensorrt_llm be used, as far as signatures tell?"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from hpcrl.rollout.tensorrt_llm import signatures
from hpcrl.runtime import trtllm
from hpcrl.runtime.check import Finding, cuda, package, torch
from hpcrl.runtime.exits import InputError
from hpcrl.runtime.world import abort

if TYPE_CHECKING:
    from mpi4py import MPI


def findings(comm: MPI.Intracomm) -> list[Finding]:
    """Collective over all ranks: where MPI allows it, tensorrt_llm is imported."""
    found = [torch(), _gpu(), package("tensorrt_llm")]
    try:
        trtllm.import_on_all_ranks(comm)
    except InputError as error:
        if not error.everywhere:  # the others may spin in the import
            abort(error, rank=comm.rank, role="check", phase="import")
        return [*found, Finding("TensorRT-LLM", "cannot be used", str(error))]
    return [*found, *compared(importlib.import_module)]


def compared(load: signatures.Import) -> list[Finding]:
    """Version and signatures, a line each."""
    version = signatures.wrong_version(load)
    lines = [Finding("TensorRT-LLM", f"written for {signatures.VERSION}, never run", version)]
    for expected in signatures.TABLE:
        why = signatures.problem(expected, load)
        lines.append(Finding(f"  {expected.name}", "as expected" if why is None else why, why))
    return lines


def _gpu() -> Finding:
    seen = cuda()
    if "x" in seen.found.split() and seen.wrong is None:
        return seen
    return Finding(seen.name, seen.found, seen.wrong or "TensorRT-LLM needs CUDA and a GPU; use rollout.engine=native")
