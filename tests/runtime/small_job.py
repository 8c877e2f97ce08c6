"""A job that ends in the way that its argument names; started by the tests of this folder under mpiexec."""

from __future__ import annotations

import gc
import logging
import os
import sys
import time
import warnings
from pathlib import Path
from types import SimpleNamespace

from hpcrl.runtime import gpus
from hpcrl.runtime.exits import InputError
from hpcrl.runtime.job import run_spmd
from hpcrl.runtime.mpi import wait_until
from hpcrl.runtime.world import World
from hpcrl.sandbox import fork_server, worker

MODE = sys.argv[1] if len(sys.argv) > 1 else ""


def load() -> SimpleNamespace:
    if MODE == "load_refuses":
        raise InputError("x.yaml: no such file")
    if MODE == "load_breaks":
        raise ValueError("the loader is broken")
    folder = "small_job.file" if MODE == "no_run_directory" else "runs"
    watchdog = SimpleNamespace(enable=False)
    return SimpleNamespace(
        run=SimpleNamespace(
            dir=folder,
            name="small",
            c10d_backend="gloo",
            nccl_timeout=60,
            memory_snapshot=False,
            cpu_bind=True,
            full_determinism=False,
            owner_heartbeat_seconds=10.0,
            group_readable=False,
            watchdog=watchdog,
        )
    )


def main(world: World, config: SimpleNamespace) -> int:
    assert gc.isenabled()  # it is not while a rank imports
    if MODE == "requeue":
        return 85
    if MODE == "log":
        logging.getLogger("hpcrl.test").info("said by rank %d", world.rank)
        logging.getLogger("megatron.test").warning("muttered by rank %d", world.rank)
        warnings.warn("warned", stacklevel=1)
    if MODE == "refuse_together":
        world.run_collectively(refuse if world.rank == 1 else int)
    if MODE == "refuse_on_rank_0":
        if world.rank == 0:
            refuse()
        world.barrier()
    if MODE == "raise":
        world.status.role, world.status.phase = "actor", "update_actor"
        if world.rank == 1:
            break_down()
        world.barrier()
    if MODE == "raise_everywhere":
        break_down()
    if MODE == "exit":
        if world.rank == 1:
            os._exit(0)
        world.barrier()
    if MODE == "children":
        for _ in range(2):
            fork_server.context().Process(target=loop_supervised, daemon=True).start()
        while len(list(Path().glob("looping.*"))) < 2 * world.size:
            time.sleep(0.05)
        world.barrier()
        Path(f"ready.{world.rank}").write_text(str(os.getpid()))
        wait_until(lambda: False)
    if MODE == "environment":
        with fork_server.context().Pool(1) as pool:
            names = pool.apply(names_in_child)
        Path(f"environment.{world.rank}").write_text("\n".join(names))
    return 0


def refuse() -> None:
    raise InputError("train.parquet has no rows")


def break_down() -> None:
    raise ValueError("boom")


def loop_supervised() -> None:
    worker.supervise(loop)


def loop() -> None:
    Path(f"looping.{os.getpid()}").touch()
    while True:
        time.sleep(0.01)


def names_in_child() -> list[str]:
    return sorted(os.environ)


def unusable_on_rank_1() -> gpus.FoundGpus:
    return gpus.FoundGpus(int(os.environ["PMI_RANK"] == "1"), 0, "13.0")


if __name__ == "__main__":
    if MODE == "unusable_gpu":
        gpus.find_gpus = unusable_on_rank_1
    run_spmd(load, main)
