"""Programs under test: what they get, what stops them, and that nothing of them is left."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from hpcrl.launch.isolation import network_isolation
from hpcrl.rewards.sandbox import Limits, Ran, run_python

REPOSITORY = Path(__file__).parents[2]
# A namespace in which no others can be made is a kernel that does not allow them.
NO_NAMESPACES = ("unshare", "-Ur", "sh", "-c", 'echo 0 > /proc/sys/user/max_user_namespaces; exec "$0" "$@"')

NAP = f"1000.{os.getpid()}"  # seconds; tells this test's processes from those of others

Run = Callable[..., Ran]


def run_elsewhere(source: str, stdin: str = "", limits: Limits | None = None) -> Ran:
    """As `run_python`, from a process that may make no namespaces and, as above scoring processes, adopts orphans."""
    seconds, *others = limits or Limits()
    program = (
        "import sys; from hpcrl.launch import family, isolation; from hpcrl.rewards.sandbox import Limits, run_python\n"
        "assert not isolation.network_isolation()[0]\n"
        "family.adopt_orphans()\n"
        f"print(tuple(run_python(*sys.argv[1:], Limits({seconds}, *{others}))))\n"
        "family.kill_descendants()"
    )
    command = [sys.executable, "-c", program, source, stdin]
    if network_isolation()[0]:
        command = [*NO_NAMESPACES, *command]
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
    while left := sleepers():
        assert time.monotonic() < give_up, left
        time.sleep(0.02)
    assert set(psutil.Process().children()) <= before
    assert not list(tmp_path.iterdir())


def sleepers() -> list[psutil.Process]:
    found = [process for process in psutil.process_iter(["cmdline"]) if NAP in (process.info["cmdline"] or [])]
    return [process for process in found if process.status() != psutil.STATUS_ZOMBIE]


def test_a_program_gets_its_input_and_an_environment_of_its_own(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "1")
    ran = run(
        "import os, sys\n"
        "print(sum(map(int, sys.stdin.read().split())), __name__, os.listdir(), os.environ.get('SECRET'))\n"
        "open('file', 'w').write('x'); print(len(open('file').read()), file=sys.stderr); exit(3)",
        "1\n2 3\n",
    )
    assert ran == Ran("error", 3, "6 __main__ [] None\n", "1\n")


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


def test_other_processes_files_and_the_network_are_out_of_reach(tmp_path: Path) -> None:
    """Where the kernel has no namespaces, `hpcrl check` says so (tests/launch/test_check.py)."""
    isolated, why = network_isolation()
    assert isolated or why
    victim = subprocess.Popen(["sleep", "30"])
    (tmp_path / "precious").touch()
    ran = run_python(
        "import os, socket\n"
        "def attempt(do):\n"
        "    try: do(); print('done')\n"
        "    except OSError as error: print(type(error).__name__)\n"
        "connect = socket.socket(socket.AF_INET, socket.SOCK_DGRAM).connect\n"
        "attempt(lambda: connect(('192.0.2.1', 9)))\n"
        "attempt(lambda: connect(('127.0.0.1', 9)))\n"
        f"attempt(lambda: os.kill({victim.pid}, 9))\n"
        f"attempt(lambda: os.unlink({str(tmp_path / 'precious')!r}))\n"
        "attempt(lambda: open('mine', 'w'))\n"
    )
    try:
        if isolated:
            assert ran.stdout.split() == ["OSError", "OSError", "ProcessLookupError", "OSError", "done"]
            assert victim.poll() is None and (tmp_path / "precious").exists()
        else:
            assert ran.stdout.split()[-1] == "done"
    finally:
        victim.kill()
        victim.wait()


def test_a_program_ends_with_the_process_that_runs_it() -> None:
    source = f"import os; os.execvp('sleep', ['sleep', '{NAP}'])"
    program = f"from hpcrl.rewards.sandbox import Limits, run_python\nrun_python({source!r}, '', Limits(seconds=600))"
    runner = subprocess.Popen([sys.executable, "-c", program], cwd=REPOSITORY)
    processes: list[psutil.Process] = []
    give_up = time.monotonic() + 20
    while not any(NAP in process.cmdline() for process in processes):
        assert runner.poll() is None and time.monotonic() < give_up
        processes = psutil.Process(runner.pid).children(recursive=True)
        time.sleep(0.02)
    runner.kill()
    runner.wait()
    _, left = psutil.wait_procs(processes, timeout=10)
    assert not left and not sleepers()


def test_a_rank_may_not_run_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", sys)
    with pytest.raises(RuntimeError, match="from a scoring process"):
        run_python("pass")
