"""Which of the things that keep code under test apart this machine has: asked of a process that tries them."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from typing import NamedTuple

if __name__ == "__main__":
    sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))

from hpcrl.launch import isolation, small_root

NO_NETWORK, NO_FILES = "network", "files"  # what the probe says of a part that holds


class Isolation(NamedTuple):
    """Whether code under test runs without network and in a process namespace; and then, the only files that are shown
    to it: none where it sees all of the user's."""

    network: bool
    shown: list[str]
    why_not: str = ""


@functools.cache
def isolation_here(*packages: str) -> Isolation:
    """With the folders `packages` among the files. Starts processes, so it is for before MPI."""
    shown: list[str] = []
    why_not = ""
    try:
        shown = small_root.places(packages)
    except OSError as error:
        why_not = error.strerror or str(error)
    command = [sys.executable, "-I", "-S", __file__, *shown]
    probe = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    said = probe.stdout.split("\n")
    if NO_FILES in said:
        return Isolation(True, shown)
    return Isolation(NO_NETWORK in said, [], said[-1] or why_not or f"the probe ended with {probe.returncode}")


def main(shown: list[str]) -> None:
    """One line for each part that holds; then, on a line of its own, why the next one does not."""
    try:
        isolation.leave()
        print(NO_NETWORK, flush=True)
        child = os.fork()
        if child:
            os.waitpid(child, 0)
        elif shown:
            small_root.enter(shown, megabytes=1)
            isolation.give_up_privileges()
            print(NO_FILES)
    except (OSError, AttributeError) as error:  # a C library that is not Linux's has no such function
        print(getattr(error, "strerror", None) or error, end="")


if __name__ == "__main__":
    main(sys.argv[1:])
