"""Ranks that take themselves for those of several nodes; they wait to be looked at. Started by test_exposure.py."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from hpcrl.runtime import launcher, world
from hpcrl.sandbox import fork_server


def main() -> None:
    exchange = world.all_gather_object
    launcher.on_one_node = lambda environ: False
    # Every rank but this one is elsewhere; what else the ranks tell each other stays.
    world.all_gather_object = lambda comm, value: [
        0 if isinstance(said, int) else said for said in exchange(comm, value)
    ]
    fork_server.start()
    comm: Any = world.start_mpi()
    world.start_torch(comm)
    Path(f"waiting.{os.getpid()}").touch()
    time.sleep(600)


if __name__ == "__main__":
    main()
