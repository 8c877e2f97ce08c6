"""Ranks of jobs under test that start in milliseconds, see server.py."""

from __future__ import annotations

import atexit
import functools
import os
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path

FOLDER = Path(__file__).parent
# in the place of sys.executable
RANK = (sys.executable, "-I", "-S", str(FOLDER / "rank.py"))


def environment(folder: Path) -> str:
    """Make `folder` a virtual environment for job scripts (HPCRL_VENV) whose python is RANK; its path."""
    python = folder / "bin" / "python3"
    python.parent.mkdir(parents=True, exist_ok=True)
    python.write_text(f'#!/bin/sh\nexec {shlex.join(RANK)} "$@"\n')
    python.chmod(0o755)
    return str(folder)


def cpu_seconds() -> float:
    """Of the ranks that this process's server has forked and that have ended; 0 without a server."""
    spent = Path(f"{server()}.cpu") if server.cache_info().currsize else None
    return float(spent.read_text()) if spent is not None and spent.exists() else 0.0


@functools.cache
def server() -> str:
    """The socket of this process's server, which is started by the first call and ends with this process;
    HPCRL_TEST_SERVER names one that others started."""
    if address := os.environ.get("HPCRL_TEST_SERVER"):
        return address
    folder = tempfile.TemporaryDirectory(prefix="hpcrl_ranks_")
    address = Path(folder.name, "socket")
    path = os.pathsep.join([str(FOLDER.parents[1]), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    process = subprocess.Popen([sys.executable, FOLDER / "server.py", address], stdin=subprocess.PIPE, env=environment)
    atexit.register(folder.cleanup)
    atexit.register(process.wait)
    atexit.register(process.stdin.close)  # type: ignore[union-attr]
    while not address.exists():
        if process.poll() is not None:
            raise RuntimeError(f"tests/preloaded/server.py ended with code {process.returncode}")
        time.sleep(0.02)
    return str(address)
