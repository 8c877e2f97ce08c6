"""Code that runs as another user of the node."""

from __future__ import annotations

import encodings.idna  # noqa: F401  # sockets import it, and the second user may not be able to read it
import os
import pwd
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

IS_ROOT = os.geteuid() == 0
USER = 65534 if IS_ROOT else os.getuid()  # only root can become another one
NAME = pwd.getpwuid(USER).pw_name


def leave_root(user: int = USER) -> None:
    """Become that user, for good. Does nothing unless this is root."""
    if os.geteuid() == 0:
        os.setgroups([])
        os.setgid(user)
        os.setuid(user)


@contextmanager
def second_user(run: Callable[..., None], *arguments: Any) -> Iterator[Callable[[], None]]:
    """Run `run(*arguments)` in a fork of this process, as the second user. Gives a function that waits for its end and
    checks that `run` has returned."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            leave_root()
            run(*arguments)
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    ended: list[int] = []

    def wait() -> None:
        ended.append(os.waitpid(child, 0)[1])
        assert ended == [0], f"{run.__name__} failed, status {ended}"

    try:
        yield wait
    finally:
        if not ended:
            os.kill(child, 9)
            os.waitpid(child, 0)
