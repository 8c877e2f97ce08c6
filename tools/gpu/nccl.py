"""An NCCL collective that does not end within `run.nccl_timeout` ends the process."""

from __future__ import annotations

import subprocess
import sys
import time

import torch
import torch.distributed as dist

from hpcrl.runtime.world import World, start_mpi, start_torch
from tools.gpu.outcome import Skip, require

TIMEOUT, HELD = 5.0, 60.0  # seconds: of the collective, and how long its stream is busy with something else
GRACE = 45.0
CYCLES_PER_SECOND = 2.0e9  # at most, of an H100's clock


def timeout(world: World) -> str:
    """In a process of its own, as NCCL's watchdog ends it."""
    if world.device.type != "cuda":
        raise Skip("there is no NCCL without a GPU")
    started = time.monotonic()
    try:
        ended = subprocess.run(
            [sys.executable, "-m", "tools.gpu.nccl"], capture_output=True, text=True, timeout=HELD + GRACE
        )
    except subprocess.TimeoutExpired as error:
        require(
            False, f"the process was still there after {error.timeout:.0f} s; expected an end after {TIMEOUT:.0f} s"
        )
    seconds = time.monotonic() - started
    said = ended.stdout + ended.stderr
    print(said[-4000:], flush=True)
    require(
        "survived" not in said, f"a collective that waited for {HELD:.0f} s passed; nccl_timeout is {TIMEOUT:.0f} s"
    )
    require(ended.returncode != 0 and "imeout" in said, f"ended with code {ended.returncode}, but not by a timeout")
    return (
        f"a timeout of {TIMEOUT:.0f} s ended the process with code {ended.returncode}, {seconds:.0f} s after its start"
    )


def hang() -> None:
    """A collective of one rank behind a kernel that takes longer than the timeout."""
    start_torch(start_mpi(), nccl_timeout=TIMEOUT)
    x = torch.ones(1024, device="cuda")
    dist.all_reduce(x)  # makes the communicator
    torch.cuda.synchronize()
    torch.cuda._sleep(int(HELD * CYCLES_PER_SECOND))
    dist.all_reduce(x)
    torch.cuda.synchronize()
    print("survived", flush=True)


if __name__ == "__main__":
    hang()
