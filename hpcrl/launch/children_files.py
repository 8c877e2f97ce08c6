"""What children's server imports first, so that a rank that was killed leaves no files: those that it reaches its
server by go when the server does, which is when the rank and all of its children are gone."""

from __future__ import annotations

import atexit
import os
import shutil

FOLDER = "HPCRL_CHILDREN_FOLDER"  # variable of the server's environment, and of nobody else's


def remove(folder: str, server: int) -> None:
    if os.getpid() == server:
        shutil.rmtree(folder, ignore_errors=True)


if FOLDER in os.environ:
    os.setpgid(0, 0)  # MPICH's launcher ends an aborted job by killing the ranks' process groups
    atexit.register(remove, os.environ.pop(FOLDER), os.getpid())
