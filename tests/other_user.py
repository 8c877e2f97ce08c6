"""A second user of this host: code that runs as that user, and a folder where both can write."""

from __future__ import annotations

import encodings.idna  # noqa: F401  # sockets import it, and the second user may not be able to read it
import os
import pwd
import shutil
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

OTHER = pwd.getpwnam("nobody")
needs_other_user = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as a second user")
# Of `second_user`: only root can become another one.
NAME = OTHER.pw_name if os.geteuid() == 0 else pwd.getpwuid(os.getuid()).pw_name


@contextmanager
def second_user(run: Callable[..., object], *arguments: Any) -> Iterator[Callable[[], None]]:
    """Run `run(*arguments)` in a fork of this process, as the second user if this is root. Gives a function that waits
    for its end and checks that `run` has returned."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            if os.geteuid() == 0:
                os.setgroups([])
                os.setgid(OTHER.pw_gid)
                os.setuid(OTHER.pw_uid)
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


def as_other_user(act: Callable[[], object]) -> None:
    """Run `act` as the second user, without a umask, and wait for its end."""

    def act_openly() -> None:
        os.umask(0)
        act()

    with second_user(act_openly) as wait:
        wait()


@pytest.fixture
def shared() -> Iterator[Path]:
    """A folder where all users can make files, as /tmp; those of pytest are for its user only."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o1777)
    yield folder
    shutil.rmtree(folder)
