"""An NCCL collective that does not end within `run.nccl_timeout` ends the process."""

from __future__ import annotations

import re
import subprocess
import sys
import time

import torch
import torch.distributed as dist

from hpcrl.runtime.world import World, start_mpi, start_torch
from tools.gpu.outcome import Skip, require

TIMEOUT, HELD = 5.0, 15.0  # seconds: of the collective, and how long its stream is busy with something else
GRACE = 60.0  # of the process's start and end
CYCLES_PER_SECOND = 2.0e9  # at most, of an H100's clock
TIMED_OUT = re.compile(r"collective operation timeout.* ran for (\d+) milliseconds")


def timeout(world: World) -> str:
    """In a process of its own, as NCCL's watchdog ends it: once the kernel that is in the way has ended, because the
    watchdog waits for the stream when it aborts the communicator. A collective that hangs by itself ends at once."""
    if world.device.type != "cuda":
        raise Skip("there is no NCCL without a GPU")
    try:
        ended = subprocess.run(
            [sys.executable, "-m", "tools.gpu.nccl"], capture_output=True, text=True, timeout=HELD + GRACE
        )
    except subprocess.TimeoutExpired as error:
        require(False, f"the process was still there after {error.timeout:.0f} s; expected an end after {HELD:.0f} s")
    said = ended.stdout + ended.stderr
    print(said, flush=True)
    found = TIMED_OUT.search(said)
    require(ended.returncode != 0, f"a collective that waited for {HELD:.0f} s passed; nccl_timeout is {TIMEOUT:.0f} s")
    require(found is not None, f"ended with code {ended.returncode}, but not by a timeout")
    assert found is not None
    seconds = int(found[1]) / 1e3
    require(seconds < 2 * TIMEOUT, f"the timeout came after {seconds:.1f} s; expected {TIMEOUT:.0f}")
    return f"a collective timed out after {seconds:.1f} s of {TIMEOUT:.0f}, and the process ended by {ended.returncode}"


def hang() -> None:
    """A collective of one rank behind a kernel that takes longer than the timeout."""
    start_torch(start_mpi(), nccl_timeout=TIMEOUT)
    x = torch.ones(1024, device="cuda")
    dist.all_reduce(x)  # makes the communicator
    torch.cuda.synchronize()
    started = time.monotonic()
    torch.cuda._sleep(int(HELD * CYCLES_PER_SECOND))
    dist.all_reduce(x)
    print(f"launched after {time.monotonic() - started:.1f} s", flush=True)
    torch.cuda.synchronize()
    print(f"survived for {time.monotonic() - started:.1f} s", flush=True)


if __name__ == "__main__":
    hang()
