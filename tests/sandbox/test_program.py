"""Programs under test: what they get, what stops them, and that nothing of them is left."""

from __future__ import annotations

import ast
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from hpcrl.sandbox.isolation import probe_isolation
from hpcrl.sandbox.program import Limits, Ran, run_python
from hpcrl.sandbox.watched_child import MAX_THREADS
from tests.processes import with_argument

REPOSITORY = Path(__file__).parents[2]
# A namespace in which no others can be made is a kernel that does not allow them.
WITHOUT = ("unshare", "-Ur", "sh", "-c", 'echo 0 > /proc/sys/user/max_$0_namespaces; exec "$@"')

NAP = f"1000.{os.getpid()}"  # seconds; tells this test's processes from those of others

Run = Callable[..., Ran]


def run_elsewhere(source: str, stdin: str = "", limits: Limits | None = None, without: str = "user") -> Ran:
    """As `run_python`, from a process that may make no user (or mount) namespaces and, as above scoring processes,
    adopts orphans."""
    seconds, *others = limits or Limits()
    program = (
        "import sys; from hpcrl.sandbox import process_tree; from hpcrl.sandbox.program import Limits, run_python\n"
        "process_tree.adopt_orphans()\n"
        f"print(tuple(run_python(*sys.argv[1:], Limits({seconds}, *{others}), best_effort=True)))\n"
        "process_tree.kill_descendants()"
    )
    command = [sys.executable, "-c", program, source, stdin]
    if probe_isolation().network:
        command = [*WITHOUT, without, *command]
    done = subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY)
    assert done.returncode == 0, done.stderr
    return Ran(*ast.literal_eval(done.stdout))


@pytest.fixture(params=["namespaces", "none"])
def run(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    """Both ways of running a program, where the kernel allows both; afterwards no process and no folder is left."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    before = set(psutil.Process().children())
    yield run_python if request.param == "namespaces" else run_elsewhere
    give_up = time.monotonic() + 5
    while left := with_argument(NAP):
        assert time.monotonic() < give_up, left
        time.sleep(0.02)
    assert set(psutil.Process().children()) <= before
    assert not list(tmp_path.iterdir())


def test_a_program_gets_its_input_and_an_environment_of_its_own(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "1")
    ran = run(
        "import os, sys\n"
        "print(sum(map(int, sys.stdin.read().split())), __name__, os.listdir(), os.environ.get('SECRET'))\n"
        "open('file', 'w').write('x'); print(len(open('file').read()), file=sys.stderr); exit(3)",
        "1\n2 3\n",
    )
    assert ran == Ran("error", 3, "6 __main__ [] None\n", "1\n")


THREADS = """
import _thread, time
_thread.stack_size(1 << 15)
number = 1
try:
    while True:
        _thread.start_new_thread(time.sleep, (60,))
        number += 1
except RuntimeError:
    print(number)
"""


def test_the_kernel_limits_threads() -> None:
    version = tuple(map(int, re.findall(r"\d+", os.uname().release)[:2]))
    if not probe_isolation().network or version < ((6, 14) if os.geteuid() == 0 else (5, 14)):
        pytest.skip("the kernel has no such limit for this user")
    ran = run_python(THREADS, limits=Limits(memory_mb=1 << 16))
    assert ran.fate == "ok" and MAX_THREADS - 16 < int(ran.stdout) <= MAX_THREADS


def test_input_and_output_of_any_size_and_kind(run: Run) -> None:
    text = "äö\U0001f600\udcff" * 20_000 if run is run_python else "äö"
    ran = run("import sys; sys.stdout.buffer.write(sys.stdin.buffer.read())", text)
    assert ran.fate == "ok" and ran.stdout == text.encode("utf-8", "surrogatepass").decode("utf-8", "replace")


@pytest.mark.parametrize(
    ("source", "fate"),
    [
        ("while True: pass", "timeout"),
        ("import time; time.sleep(1000)", "timeout"),
        (
            "import signal, time\nfor s in (15, 14, 2, 24): signal.signal(s, signal.SIG_IGN)\nwhile True: pass",
            "timeout",
        ),
        ("x = bytearray(10 << 30)", "memory"),
        ("x = []\nwhile True: x.append(bytes(1 << 20))", "memory"),
        ("import os\nwhile True: os.fork()", "killed"),
        ("while True: print('x' * 1000)", "killed"),
        ("import ctypes; ctypes.string_at(0)", "killed"),
        ("open('big', 'wb').write(bytes(64 << 20))", "error"),
        ("raise SystemExit('wrong')", "error"),
        ("raise KeyboardInterrupt", "error"),
        ("def f(: pass", "error"),
        ("1 / 0", "error"),
        ("import threading; threading.Thread(target=print, args=['late']).start()", "ok"),
    ],
)
def test_fates(run: Run, source: str, fate: str) -> None:
    start = time.monotonic()
    ran = run(source, limits=Limits(seconds=0.4 if fate == "timeout" else 6.0, memory_mb=512))
    assert ran.fate == fate, ran
    assert (ran.fate == "ok") == (ran.returncode == 0)
    assert time.monotonic() - start < 8
    assert len(ran.stdout) <= 1 << 20


@pytest.mark.parametrize(
    "ending",
    ["", "os.wait()", "while True: pass", "os._exit(5)", "os.kill(os.getppid(), 9)", "os.kill(0, 9)"],
)
def test_descendants_that_left_the_session_go_as_well(run: Run, ending: str) -> None:
    run(
        "import os\n"
        "if os.fork() == 0:\n"
        "    os.setsid()\n"
        "    if os.fork() == 0:\n"
        f"        os.execvp('sleep', ['sleep', '{NAP}'])\n"
        "    os._exit(0)\n" + ending,
        limits=Limits(seconds=0.5),
    )  # the fixture looks for what is left


REACH = """
import os, socket
def attempt(name, do):
    try:
        do()
        print(name)
    except OSError:
        pass
attempt("internet", lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM).connect(("127.0.0.1", 9)))
attempt("socket", lambda: socket.socket(socket.AF_UNIX).connect(FOLDER + "/socket"))
attempt("kill", lambda: os.kill(PID, 0))
attempt("look", lambda: open(f"/proc/{PID}/cmdline").close())
attempt("read", lambda: open(FOLDER + "/truth").close())
attempt("append", lambda: open(FOLDER + "/truth", "a").close())
attempt("create", lambda: open("mine", "w").close())
"""


@pytest.mark.parametrize("without", [None, "mnt", "user"])
def test_the_network_processes_files_and_sockets_are_out_of_reach(tmp_path: Path, without: str | None) -> None:
    """As far as the kernel allows; `hpcrl check` says how far (tests/machine/test_check.py)."""
    here = probe_isolation()
    assert here.shown or (here.why_not and subprocess.run(["unshare", "-Urmpfn", "true"]).returncode != 0)
    (tmp_path / "truth").touch()
    victim = subprocess.Popen(["sleep", "30"])
    try:
        # as multiprocessing's fork server has one, which would start any process for who connects
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(str(tmp_path / "socket"))
            server.listen()
            source = f"FOLDER, PID = {str(tmp_path)!r}, {victim.pid}{REACH}"
            ran = run_python(source) if without is None else run_elsewhere(source, without=without)
    finally:
        victim.kill()
        victim.wait()
    reached = set(ran.stdout.split())
    assert not (here.filtered and "internet" in reached)
    if here.shown and without is None:
        assert reached == {"create"}
    elif here.network and without != "user":
        assert reached == {"socket", "look", "read", "append", "create"}
    else:
        assert reached >= {"socket", "kill", "read", "create"}


SHOWN = """
import os, sys
from hpcrl.sandbox import isolation, mounts, process_tree
pivot, package = sys.argv[1:]
places = isolation.visible_paths([package])
isolation.unshare_namespaces()
if os.fork():
    os.wait()
    sys.exit()
if not pivot:
    def call(function, *arguments):
        if function == "pivot_root":
            raise OSError(22, function)
        process_tree.libc_call(function, *arguments)
    mounts.libc_call = call
process_tree.libc_call("unshare", mounts.CLONE_NEWNS)
process_tree.libc_call("mount", b"tmpfs", os.fsencode(package + "/mounted"), b"tmpfs", 0, None)
open(package + "/mounted/file", "w").close()
isolation.enter(places, 1)
isolation.give_up_privileges()
print(os.listdir(package), os.listdir(package + "/mounted"), os.listdir(os.path.dirname(package)), os.getcwd())
for name in (package, package + "/mounted", "/box"):
    print(os.access(name, os.W_OK))
unshare = lambda: process_tree.libc_call("unshare", 1 << 28)
for escape in (lambda: os.chroot("."), unshare, lambda: os.listdir("/proc/1/root/home")):
    try:
        escape()
        print("out")
    except OSError:
        pass
"""


@pytest.mark.parametrize("pivot", ["pivot", ""])
def test_packages_anywhere_are_shown_and_nothing_of_them_can_be_written(tmp_path: Path, pivot: str) -> None:
    """By a name with a space and a link in it, and with what is mounted there; also where pivot_root is refused."""
    if not probe_isolation().shown:
        assert probe_isolation().why_not
        return
    (tmp_path / "real" / "my packages" / "mounted").mkdir(parents=True)
    (tmp_path / "secret").touch()
    (tmp_path / "link").symlink_to("real")
    package = tmp_path / "link" / "my packages"
    command = [sys.executable, "-c", SHOWN, pivot, str(package)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY)
    expected = "['mounted'] ['file'] ['my packages'] /box\nFalse\nFalse\nTrue\n"
    assert (done.stdout, done.stderr) == (expected, "")
    assert not (package / "mounted" / "file").exists()


def test_all_processes_together_may_take_what_one_may(run: Run) -> None:
    source = (
        "import os, time\n"
        "early = b'x' * (120 << 20 if SHARED else 0)\n"
        "[os.fork() for _ in range(2)]\n"
        "late = b'x' * (0 if SHARED else 120 << 20)\n"
        "time.sleep(0.3 if SHARED else 5)\n"
    )
    limits = Limits(memory_mb=256)
    assert run(f"SHARED = False\n{source}", limits=limits).fate == "memory"
    assert run(f"SHARED = True\n{source}", limits=limits).fate == "ok"


@pytest.mark.usefixtures("isolated")
def test_all_files_together_have_a_size() -> None:
    """In each folder that can be written, unlinked ones too."""
    source = (
        "import os\n"
        "kept, size = [], 0\n"
        "for folder in ('/box', '/tmp', '/dev/shm'):\n"
        "    kept.append(open(f'{folder}/file', 'wb', buffering=0))\n"
        "    os.unlink(f'{folder}/file')\n"
        "    try:\n"
        "        while size < 20 << 20: size += kept[-1].write(bytes(1 << 18))\n"
        "    except OSError: pass\n"
        "print(size >> 20)"
    )
    assert run_python(source, limits=Limits(file_mb=7)).stdout == "7\n"


def test_a_program_can_terminate_what_it_has_forked(run: Run) -> None:
    """As multiprocessing's pools do when they end."""
    ran = run(
        "import os, time\n"
        "ready, writer = os.pipe()\n"
        "child = os.fork()\n"
        "if child == 0: os.write(writer, b'x'); time.sleep(60)\n"
        "os.read(ready, 1); os.kill(child, 15); print(os.wait()[1])"
    )
    assert ran.stdout == "15\n"


def test_a_program_has_few_files_open(run: Run) -> None:
    ran = run("import os\ntry:\n    while True: os.dup(0)\nexcept OSError: print('full')")
    assert ran.stdout == "full\n"


TIMEOUTS = """
import os, sys
from hpcrl.sandbox import fork_server
from hpcrl.sandbox.process_pool import ProcessPool
from hpcrl.rewards.score_worker import Source
fork_server.start()
before = set(os.listdir(sys.argv[1]))
pool = ProcessPool(Source(kwargs={"sandbox": "best_effort"}), 1, 0.5)
program = "```python\\nopen('left', 'w').close()\\nwhile True: pass\\n```"
tests = '{"inputs": ["1"], "outputs": ["1"]}'
request = dict(data_source="apps", solution_str=program, ground_truth=tests, extra_info={})
print([pool.take(pool.submit(dict(request))).fate for _ in range(4)])
pool.close()
print(set(os.listdir(sys.argv[1])) - before)
"""


@pytest.mark.parametrize("namespaces", [True, False])
def test_scores_that_time_out_leave_no_folder(tmp_path: Path, namespaces: bool) -> None:
    """Where a rank's pool kills all at once, the sandbox's supervisor too."""
    command = [sys.executable, "-c", TIMEOUTS, str(tmp_path)]
    if not namespaces and probe_isolation().network:
        command = [*WITHOUT, "user", *command]
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY, env=environment)
    assert done.stdout == f"{['timeouts'] * 4}\nset()\n", done.stderr


def test_a_program_ends_with_the_process_that_runs_it() -> None:
    source = f"import os; os.execvp('sleep', ['sleep', '{NAP}'])"
    call = f"run_python({source!r}, '', Limits(seconds=600), best_effort=True)"
    program = f"from hpcrl.sandbox.program import Limits, run_python\n{call}"
    runner = subprocess.Popen([sys.executable, "-c", program], cwd=REPOSITORY)
    give_up = time.monotonic() + 20
    while not with_argument(NAP):
        assert runner.poll() is None and time.monotonic() < give_up
        time.sleep(0.02)
    processes = psutil.Process(runner.pid).children(recursive=True)
    runner.kill()
    runner.wait()
    _, left = psutil.wait_procs(processes, timeout=10)
    assert not left and not with_argument(NAP)


def test_a_rank_may_not_run_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", sys)
    with pytest.raises(RuntimeError, match="from a worker process"):
        run_python("pass")


REFUSED = """
import sys
from hpcrl.config.schema import RewardConfig
from hpcrl.rewards.manager import check_rewards
from hpcrl.rewards.score_worker import Source
from hpcrl.runtime.exits import InputError
from hpcrl.sandbox import fork_server
from hpcrl.sandbox.process_pool import ProcessPool
fork_server.start()
check_rewards(RewardConfig(), {"countdown"})
check_rewards(RewardConfig(sandbox="best_effort"), {"countdown", "apps"})
try:
    check_rewards(RewardConfig(), {"countdown", "apps"})
except InputError as error:
    print(error)
pool = ProcessPool(Source(), 1, 5)
tests = '{"inputs": ["1"], "outputs": ["1"]}'
outcome = pool.take(pool.submit(dict(data_source="apps", solution_str="print(1)", ground_truth=tests, extra_info={})))
print(outcome.fate, outcome.why, sep="; ")
pool.close()
"""


@pytest.mark.parametrize("isolated", [True, False])
def test_programs_are_refused_where_the_kernel_does_not_isolate_them(isolated: bool) -> None:
    """At the start of a job, and in the scorer; elsewhere they are not."""
    if isolated and not probe_isolation().complete:
        pytest.skip(f"this kernel does not isolate programs: {probe_isolation().why_not}")
    command = [sys.executable, "-c", REFUSED]
    if not isolated and probe_isolation().network:
        command = [*WITHOUT, "user", *command]
    done = subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY)
    assert done.returncode == 0, done.stderr
    *refused, scored = done.stdout.splitlines()
    if isolated:
        assert not refused and scored == "ok; "
    else:
        assert len(refused) == 1 and "'apps' runs what the model wrote" in refused[0]
        assert "reward.sandbox=best_effort" in refused[0]
        assert scored.startswith("errors; SandboxUnavailable: this kernel does not isolate programs")
