"""Run one check on all ranks: `python -m tools.gpu.check MODULE FUNCTION [--deterministic]`, alone or under a launcher.

FUNCTION takes the `World` and returns a line, or raises `Skip` or `Failed`. The last line `pass: ...`, `fail: ...` or
`skip: ...` is the outcome; the exit code is 0, another or 77. Rank 0 prints it when all have returned; a rank that
fails inside a check prints it itself and ends the job, as others may wait for it. `--deterministic` is
`run.full_determinism` of a job. A check needs a GPU, or HPCRL_GPU_REHEARSAL=1: then its device has the CPU's memory,
but an operator that finds a tensor of the CPU among its own raises, as CUDA's do (tests/strict_device).
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import NoReturn

from hpcrl.config.engines import EngineSpec
from hpcrl.rollout.engines.tensorrt_llm.declaration import TensorRTLLM
from hpcrl.runtime.exits import is_user_error
from hpcrl.runtime.world import (
    World,
    abort,
    finish,
    set_deterministic_libraries,
    set_torch_precision,
    start_mpi,
    start_torch,
)
from hpcrl.sandbox import fork_server
from tools.gpu.outcome import Failed, Skip

CODES = {"pass": 0, "skip": 77, "fail": 1}  # from the best to the worst
REHEARSAL = os.environ.get("HPCRL_GPU_REHEARSAL") == "1"


def main(module: str, function: str, *, deterministic: bool = False) -> NoReturn:
    fork_server.start()
    comm = start_mpi()
    try:
        set_deterministic_libraries(deterministic)
        engine = TensorRTLLM() if "trtllm" in module else EngineSpec()
        world = start_torch(comm, first=engine.start, expandable_segments=engine.expandable_segments)
        set_torch_precision(deterministic)
        from hpcrl.runtime import platform  # imports torch

        platform.import_megatron()
        outcome, line = agreed(world, usable)
        if outcome == "pass":
            check = getattr(importlib.import_module(module), function)
            strict = REHEARSAL and module != "tools.gpu.engines"  # vLLM has no such device
            with rehearsed(world) if strict else on_the_gpu(world) as there:
                outcome, line = agreed(there, check)
    except Exception as error:
        if not getattr(error, "everywhere", False):
            if isinstance(error, Failed) or is_user_error(error):
                say("fail", str(error))
            abort(error, rank=comm.rank, role="check", phase=function)
        outcome, line = "fail", str(error)
    if comm.rank == 0:
        say(outcome, line)
    finish(CODES[outcome])


def usable(world: World) -> str:
    if world.device.type != "cuda" and not REHEARSAL:
        raise Skip("torch finds no GPU")
    return ""


def agreed(world: World, check: Callable[[World], str]) -> tuple[str, str]:
    """The worst rank's outcome and line, on all ranks. Whatever is raised but Skip is raised on this rank only."""
    try:
        found = "pass", check(world)
    except Skip as error:
        found = "skip", str(error)
    return max(world.all_gather_object(found), key=lambda each: list(CODES).index(each[0]))


@contextmanager
def on_the_gpu(world: World) -> Iterator[World]:
    yield world


@contextmanager
def rehearsed(world: World) -> Iterator[World]:
    """The world with a device that is not the CPU."""
    from tests.strict_device.load import in_place_of_cuda, load_on_all_ranks

    device = load_on_all_ranks(world)
    with in_place_of_cuda(device):
        yield replace(world, device=device)


def say(outcome: str, line: str) -> None:
    print(f"{outcome}: {' '.join(line.split())}\n", end="", flush=True)  # one write: ranks share the output


if __name__ == "__main__":
    names = [argument for argument in sys.argv[1:] if argument != "--deterministic"]
    if len(names) != 2:
        sys.exit("usage: python -m tools.gpu.check MODULE FUNCTION [--deterministic], under mpiexec, srun or alone")
    main(*names, deterministic="--deterministic" in sys.argv)
