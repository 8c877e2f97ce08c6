"""The sandbox for a user without privileges, when the tests run as root.

`docs/testing.md` says how to run all tests of this folder as such a user.
"""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
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
TASK = """
import os, sys
from hpcrl.sandbox.task_sandbox import TaskSandbox
from tools import sandbox_attacks
assert os.getuid() == os.geteuid() != 0 and not os.getgroups()
os.mkdir("task")
open("task/mine", "w").write("1")
for folder, layers in (("task", True), ("task", False), (sys.argv[1], True)):  # the last one is another user's
    with TaskSandbox(folder, layers=layers) as box:
        mark = box.snapshot()
        ran = box.run("id -un; echo 2 >> mine; cat mine; rm mine; mkdir mine; cat /etc/shadow " + os.getcwd())
        print(ran.output.count("No such file"), *ran.output.split()[:2])
        box.restore(mark)
        print(box.read("mine"), box.copied)
        for name in ("keys, from a thread", "namespaces and mounts"):
            print(box.run([sys.executable, "-c", sandbox_attacks.program(name)]).output)
assert open("task/mine").read() == "1"
os.unlink("task/mine"), os.rmdir("task")
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


Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def run(readable: Path) -> Run:
    """Runs a program as another user."""
    own = str(readable / "own")
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(readable), "HOME": own, "TMPDIR": own}

    def run_with(python: str, *arguments: str) -> subprocess.CompletedProcess[str]:
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
            if run_with(python, "import sys; sys.exit(sys.version_info < (3, 10))").returncode == 0:
                break
        except OSError:
            continue
    else:
        pytest.skip("no Python that another user can run")
    if run_with(python, "import os; os.execvp('unshare', ['unshare', '-Urm', 'true'])").returncode != 0:
        pytest.skip("this kernel gives no namespaces to users without privileges")
    return functools.partial(run_with, python)


def test_attacks_reach_nothing_for_another_user(run: Run, readable: Path) -> None:
    done = run(ATTACK, *ATTACKS)
    assert done.stdout == "".join(f"{name} \n" for name in ATTACKS) + "1000 [] []\n\n", done.stderr
    assert not list((readable / "own").iterdir())


def test_tasks_of_another_user(run: Run, readable: Path) -> None:
    (readable / "task").mkdir()
    (readable / "task" / "mine").write_text("1")
    done = run(TASK, str(readable / "task"))
    assert re.fullmatch(r"(2 agent 12\nb'1' (True|False)\n\n\n){3}", done.stdout), (done.stdout, done.stderr)
    assert not list((readable / "own").iterdir()) and (readable / "task" / "mine").read_text() == "1"
