"""The sandbox for a user without privileges, when the tests run as root.

`docs/testing.md` says how to run all tests of this folder as such a user.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
NOBODY = 65534
ATTACKS = (
    "keys, from a thread",
    "sockets of other families",
    "memory of no process",
    "pieces of shared mappings",
    "connections that are not accepted",
)
ATTACK = """
import os, sys
from hpcrl.sandbox.isolation import probe_isolation
from hpcrl.sandbox.program import Limits, run_python
from tools import sandbox_attacks
assert os.getuid() == os.geteuid() != 0 and not os.getgroups()
assert probe_isolation().complete, probe_isolation().why_not
limits = Limits(memory_mb=sandbox_attacks.LIMIT_MB)
for name in sys.argv[1:]:
    print(name, run_python(sandbox_attacks.program(name), limits=limits).stdout)
print(run_python("import os; print(os.getuid(), os.listdir(), sorted(os.listdir('/tmp')))").stdout)
"""


@pytest.fixture
def readable() -> Iterator[Path]:
    """A copy of the sandbox that other users can read, in a folder whose parents they can enter."""
    if os.getuid() != 0:
        pytest.skip("only root can run programs as another user")
    folder = Path(tempfile.mkdtemp(dir="/tmp"))
    folder.chmod(0o755)
    (folder / "hpcrl").mkdir()
    shutil.copytree(REPOSITORY / "hpcrl" / "sandbox", folder / "hpcrl" / "sandbox")
    (folder / "tools").mkdir()
    shutil.copy(REPOSITORY / "tools" / "sandbox_attacks.py", folder / "tools")
    (folder / "own").mkdir()
    os.chown(folder / "own", NOBODY, NOBODY)
    yield folder
    shutil.rmtree(folder)


def test_attacks_reach_nothing_for_another_user(readable: Path) -> None:
    own = str(readable / "own")
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(readable), "HOME": own, "TMPDIR": own}

    def run(python: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [python, "-B", "-c", *arguments],
            capture_output=True,
            text=True,
            cwd=own,
            env=environment,
            user=NOBODY,
            group=NOBODY,
            extra_groups=[],
        )

    for python in (sys.executable, "/usr/bin/python3"):  # the first may be in root's home
        try:
            if run(python, "import sys; sys.exit(sys.version_info < (3, 10))").returncode == 0:
                break
        except OSError:
            continue
    else:
        pytest.skip("no Python that another user can run")
    if run(python, "import os; os.execvp('unshare', ['unshare', '-Urm', 'true'])").returncode != 0:
        pytest.skip("this kernel gives no namespaces to users without privileges")
    done = run(python, ATTACK, *ATTACKS)
    assert done.stdout == "".join(f"{name} \n" for name in ATTACKS) + "1000 [] []\n\n", done.stderr
    assert not list((readable / "own").iterdir())
