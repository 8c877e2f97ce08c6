"""A second user of this host, for tests that run as root: what another user makes, and where both can write."""

from __future__ import annotations

import os
import pwd
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

OTHER = pwd.getpwnam("nobody")
needs_other_user = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as a second user")


def as_other_user(act: Callable[[], object]) -> None:
    """Run `act` as nobody, in a child, without a umask."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.setgroups([])
            os.setgid(OTHER.pw_gid)
            os.setuid(OTHER.pw_uid)
            os.umask(0)
            act()
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.fixture
def shared() -> Iterator[Path]:
    """A folder where all users can make files, as /tmp; those of pytest are for its user only."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o1777)
    yield folder
    shutil.rmtree(folder)
