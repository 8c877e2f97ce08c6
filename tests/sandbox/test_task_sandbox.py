"""Sandboxes of tasks: what commands can do, what stops them, snapshots, and that nothing of them is left."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from hpcrl.sandbox import task_sandbox
from hpcrl.sandbox.program import SandboxUnavailable
from hpcrl.sandbox.task_command import MOST_DROPPED
from hpcrl.sandbox.task_files import MAX_LAYERS
from hpcrl.sandbox.task_sandbox import HOME, Limits, SandboxLost, TaskSandbox
from tests.processes import alive, with_argument
from tests.sandbox.test_program import REPOSITORY, WITHOUT
from tools import sandbox_attacks

NAP = f"1001.{os.getpid()}"  # seconds; tells this test's processes from those of others
SMALL = Limits(memory_mb=sandbox_attacks.LIMIT_MB, disk_mb=64, files=4096, processes=24, output_kb=4)

pytestmark = pytest.mark.usefixtures("sandboxes")


@pytest.fixture
def sandboxes() -> Iterator[None]:
    """Afterwards no process is left, nor a namespace with mounts."""
    if why := task_sandbox.probe_sandbox().why_not:
        pytest.skip(f"this machine cannot have sandboxes of tasks: {why}")
    before = mount_namespaces()
    yield
    give_up = time.monotonic() + 5
    while with_argument(NAP) or mount_namespaces() - before:
        assert time.monotonic() < give_up, (with_argument(NAP), mount_namespaces() - before)
        time.sleep(0.02)


def mount_namespaces() -> set[str]:
    """Those of this process and its descendants."""
    found = set()
    for process in (psutil.Process(), *psutil.Process().children(recursive=True)):
        try:
            found.add(os.readlink(f"/proc/{process.pid}/ns/mnt"))
        except OSError:
            pass
    return found


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A task's folder, which must not change."""
    (tmp_path / "task" / "src").mkdir(parents=True)
    (tmp_path / "task" / "src" / "code.py").write_text("print(1)\n")
    (tmp_path / "task" / "keep").write_text("kept\n")
    return tmp_path / "task"


@pytest.fixture
def outside() -> Iterator[Path]:
    """An empty folder, which must stay so. Not in /tmp, which a supervisor does not see."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as name:
        yield Path(name)
        assert not os.listdir(name)


@pytest.fixture(params=[True, False], ids=["layers", "copies"])
def sandbox(request: pytest.FixtureRequest, folder: Path) -> Iterator[TaskSandbox]:
    """Both ways of keeping files, where the kernel has both."""
    with TaskSandbox(folder, limits=SMALL, layers=request.param) as box:
        if request.param and box.copied:
            pytest.skip("this kernel has no overlayfs for users over a tmpfs")
        yield box
    assert sorted(path.name for path in folder.rglob("*")) == ["code.py", "keep", "src"]
    assert (folder / "keep").read_text() == "kept\n"


def test_a_command_changes_files_for_the_next_ones(sandbox: TaskSandbox) -> None:
    ran = sandbox.run("python src/code.py; rm -r src; mkdir src; echo x >> keep; cat keep; ls -A src; exit 3")
    assert (ran.fate, ran.returncode, ran.output) == ("error", 3, "1\nkept\nx\n")
    ran = sandbox.run(
        "cat keep; ls -A src; pwd; echo $HOME $SECRET; cat; kill -9 $$", environment={"SECRET": "s"}, stdin=b"in"
    )
    assert (ran.returncode, ran.output) == (137, "kept\nx\n/workspace\n/home/agent s\nin")
    for odd, output in (("no such program", "No such file"), ("a\0b", "embedded null"), ("\ud83d", "surrogates")):
        ran = sandbox.run([odd])
        assert ran.returncode == 127 and output in ran.output
    assert sandbox.run(["pwd"], folder="/tmp").output == "/tmp\n"


def test_files_are_read_and_written_as_they_are_inside(sandbox: TaskSandbox) -> None:
    data = os.urandom(3 << 20)
    sandbox.write("new/folder/program", data, mode=0o755)
    assert sandbox.read("/workspace/new/folder/program") == data
    assert sandbox.run("stat -c %a,%U new/folder/program").output == "755,agent\n"
    for path, error in (("no", FileNotFoundError), ("src", IsADirectoryError), ("/proc/1/environ", PermissionError)):
        with pytest.raises(error):
            sandbox.read(path)
    with pytest.raises(OSError, match="too large"):
        sandbox.read("new/folder/program", most=len(data) - 1)
    with pytest.raises(OSError, match="Read-only"):
        sandbox.write("/usr/bin/true", b"")
    with pytest.raises(OSError, match="No space"):
        sandbox.write("big", bytes(65 << 20))


def test_links_and_pipes_of_the_model_lead_nowhere_else(sandbox: TaskSandbox, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    sandbox.run(
        f"ln -s {tmp_path}/secret a; ln -s / root; ln -s keep b; ln keep c; ln -s {tmp_path} d; mkfifo pipe; mkdir e;"
        "ln -s /proc/self/fd/0 f"
    )
    for path in ("a", "pipe", "d/secret", f"root{tmp_path}/secret", "/dev/null"):
        with pytest.raises(OSError):
            sandbox.read(path)
    for path in ("a", "b", "c", "pipe", "f", "root/tmp/new"):
        sandbox.write(path, b"tests")
        assert sandbox.read(path) == b"tests"
    with pytest.raises(OSError):
        sandbox.write("e", b"")
    assert sandbox.read("keep") == b"kept\n"
    assert (tmp_path / "secret").read_text() == "secret" and not Path("/tmp/new").exists()


def test_snapshots_branch(sandbox: TaskSandbox) -> None:
    state = "find . /tmp/x /etc/passwd -printf '%P %s %m %l\\n' | sort; cat keep src/* /tmp/x"
    marks = [sandbox.snapshot()]
    states = [sandbox.run(state).output]
    changes = (
        "rm -r src; mkdir src; echo new > src/code.py; echo 1 > /tmp/x",
        "echo 2 >> keep; chmod 700 keep; rm -r src; echo 22 > /tmp/x; ln -s keep link",
        "mkdir -p a/b/c; mv keep a/b/c; echo u >> /etc/passwd",
    )
    for change in changes:
        sandbox.run(change)
        marks.append(sandbox.snapshot())
        states.append(sandbox.run(state).output)
    assert len(set(states)) == 4
    for which in (1, 3, 0, 2, 2):
        sandbox.restore(marks[which])
        assert sandbox.run(state + "; ls /dev/shm").output == states[which]  # of processes that have ended
        sandbox.run(f"sleep {NAP} & rm -rf * /tmp/x; mkdir src; echo > keep; touch /dev/shm/left")
        assert sandbox.run("ls /dev/shm").output == "left\n"
    sandbox.restore(marks[0])
    sandbox.run(changes[1])
    branch = sandbox.snapshot()
    sandbox.restore(marks[3])
    sandbox.restore(branch)
    assert "kept\n2\n" in sandbox.run(state).output
    sandbox.drop(marks[3])
    for unknown in (-1, 5, marks[3]):
        with pytest.raises(ValueError, match=r"expected one of \[0, 1, 2, 4\]"):
            sandbox.restore(unknown)
    for which in (2, 0):
        sandbox.restore(marks[which])
        assert sandbox.run(state).output == states[which]


def test_many_snapshots_and_a_full_disk(folder: Path) -> None:
    with TaskSandbox(folder, limits=SMALL) as box:
        if box.copied:
            pytest.skip("this kernel has no overlayfs for users over a tmpfs")
        for _ in range(MAX_LAYERS):
            box.snapshot()
        with pytest.raises(OSError, match="restore an earlier one"):
            box.snapshot()
        assert box.run(["cat", "keep"]).output == "kept\n"
        box.restore(0)
        box.run(["python", "-c", "for n in range(9999): open(f'f{n}', 'x')"])
        box.run("head -c 99M /dev/urandom > f1")
        full = box.snapshot()
        for mark in (full, 0):
            box.restore(mark)
            assert box.run(["cat", "keep"]).output == "kept\n"
        assert "No space" in box.run("echo 1 > new").output
        box.drop(full)
        assert box.run("echo 1 > new; cat new; ls").output == "1\nkeep\nnew\nsrc\n"


@pytest.mark.parametrize(
    ("command", "fate", "output"),
    [
        (":(){ :|:& };:; sleep 9", "processes", ""),
        ("python -c 'import os\nwhile True: os.fork()'", "processes", ""),
        ("sleep 1000", "timeout", ""),
        ("trap '' TERM INT HUP; while :; do :; done", "timeout", ""),
        ("kill -STOP $$", "timeout", ""),
        ("python -c 'bytearray(10 << 30)'", "error", "MemoryError"),
        (
            "for i in 1 2 3 4; do python -c 'import time; x = b\"x\" * (100 << 20); time.sleep(9)' & done; wait",
            "memory",
            "",
        ),
        (
            "head -c 50M /dev/urandom > /dev/shm/x; python -c 'x = b\"x\" * (210 << 20); import time; time.sleep(9)'",
            "memory",
            "",
        ),
        ("head -c 99M /dev/urandom > /tmp/x; rm /tmp/x; echo freed", "ok", "No space left on device\nfreed"),
        ("setsid sleep NAP > /dev/null & setsid sleep NAP & echo started", "ok", "started"),
        ("(setsid sh -c 'sleep NAP & exec sleep NAP' &) ; kill -9 -1", "ok", ""),
        ("kill -9 1; kill -INT 1; echo $PPID", "ok", "0"),
        ("head -c 99999 /dev/urandom | od; echo end", "ok", "end"),
        ("rm -rf /workspace /etc /home /dev /proc /tmp 2> /dev/null; echo done", "ok", "done"),
        (
            'cd /dev/shm; python -c \'import os\nfor _ in range(3000): os.mkdir("a"); os.chdir("a")\'; echo deep',
            "ok",
            "deep",
        ),
    ],
)
def test_hostile_commands(folder: Path, command: str | list[str], fate: str, output: str) -> None:
    if isinstance(command, str):
        command = command.replace("NAP", NAP)  # not in the test's name, which the processes of pytest-xdist compare
    with TaskSandbox(folder, limits=SMALL) as box:
        start = time.monotonic()
        ran = box.run(command, timeout=0.5 if fate == "timeout" else 10)
        assert time.monotonic() - start < 9
        assert ran.fate == fate and output in ran.output, ran
        assert len(ran.output) < 5000
        assert box.run(["true"]).fate == "ok"
        box.write("tests", b"x")
        assert box.read("tests") == b"x"


SERVER = """
import os, socket, sys
with socket.socket(socket.AF_UNIX) as server:
    server.bind("/tmp/server")
    server.listen()
    open("/tmp/ready", "x").close()
    while True:
        connection, _ = server.accept()
        print("asked " * 20_000)  # more than a pipe holds
        connection.sendall(b"answer")
        connection.close()
"""
ASK = "import socket; s = socket.socket(socket.AF_UNIX); s.connect('/tmp/server'); print(s.recv(9).decode())"


def test_what_a_command_leaves_running_stays_within_the_limits(folder: Path) -> None:
    with TaskSandbox(folder, limits=SMALL) as box:
        box.write("server.py", SERVER.encode())
        began = time.monotonic()
        ran = box.run("python server.py & while [ ! -e /tmp/ready ]; do sleep 0.05; done; echo started")
        assert ran.output == "started\n" and time.monotonic() - began < 9
        for _ in range(3):
            assert box.run(["python", "-c", ASK]).output == "answer\n"
        assert box.run(f"sleep {NAP} | cat", timeout=0.5).fate == "timeout"
        assert box.run(["python", "-c", ASK]).output == "answer\n" and not with_argument(NAP)
        box.write("keep", b"by the harness")
        many = f"for i in $(seq {SMALL.processes - 2}); do sleep {NAP} & done; sleep 1"
        assert box.run(many).fate == "ok"
        assert box.run("for i in 1 2 3 4; do sleep 9 & done; wait").fate == "processes"
        assert box.run("cat keep; pgrep sleep").output == "by the harness"
        box.run(f"sleep {NAP} & (sleep 0.3; for i in $(seq 40); do sleep {NAP} & done) > /dev/null & echo")
        await_no(NAP)  # while no command runs
        assert box.run(f"setsid sleep {NAP} & echo next").output == "next\n"
        box.end_processes()
        assert not with_argument(NAP) and box.run("echo again").output == "again\n"
        box.run(f"sleep {NAP} &")
        (watcher,) = psutil.Process(box._supervisor.pid).children()
        watcher.kill()
        await_no(NAP)
        assert box.run("cat keep").output == "by the harness"
        box.run(f"sleep {NAP} &")


def test_a_timeout_kills_orphans_of_the_command_and_leaves_others_running(folder: Path) -> None:
    with TaskSandbox(folder, limits=SMALL) as box:
        box.run(["sh", "-c", f"sleep {NAP} &"])
        ran = box.run(["sh", "-c", f"(sleep {NAP} &); (setsid sleep {NAP} &); sleep {NAP}"], timeout=1)
        assert ran.fate == "timeout"
        give_up = time.monotonic() + 5
        while len(left := with_argument(NAP)) > 2:
            assert time.monotonic() < give_up, left
            time.sleep(0.02)
        assert [process.status() for process in left] == ["sleeping"] * 2


def test_endless_output_between_commands_takes_no_time(folder: Path) -> None:
    with TaskSandbox(folder, limits=SMALL) as box:
        box.run(["sh", "-c", "yes &"])
        (watcher,) = psutil.Process(box._supervisor.pid).children()
        before = watcher.cpu_times()
        time.sleep(1)
        after = watcher.cpu_times()
        assert after.user + after.system - before.user - before.system < 0.15


def test_the_newest_outputs_stay_open(folder: Path) -> None:
    with TaskSandbox(folder, limits=Limits(memory_mb=SMALL.memory_mb, disk_mb=64, processes=80)) as box:
        for _ in range(MOST_DROPPED):
            box.run(["sh", "-c", f"sleep {NAP} &"])
        box.run(["sh", "-c", "(sleep 0.3; echo; echo > alive) &"])
        give_up = time.monotonic() + 5
        while box.run(["cat", "alive"]).fate != "ok":
            assert time.monotonic() < give_up
            time.sleep(0.1)


def await_no(argument: str) -> None:
    give_up = time.monotonic() + 5
    while with_argument(argument):
        assert time.monotonic() < give_up
        time.sleep(0.02)


def test_both_ends_of_endless_output_are_kept(folder: Path) -> None:
    with TaskSandbox(folder, limits=SMALL) as box:
        ran = box.run("echo first; timeout 0.2 yes; echo error >&2; echo last")
        assert ran.output.startswith("first\ny\n") and ran.output.endswith("y\nerror\nlast\n")
        (left_out,) = map(int, re.findall(r"\n\[\.\.\. (\d+) bytes left out \.\.\.\]\n", ran.output))
        assert left_out == ran.left_out > 0
        assert box.run("yes", timeout=0.2).fate == "timeout"


OUTSIDE = """
import os, socket
def attempt(name, do):
    try:
        print(name, do())
    except OSError:
        pass
attempt("internet", lambda: socket.create_connection(("127.0.0.1", PORT), timeout=1))
attempt("socket", lambda: socket.socket(socket.AF_UNIX).connect(FOLDER + "/socket"))
attempt("kill", lambda: os.kill(PID, 0))
attempt("look", lambda: open(f"/proc/{PID}/environ").read())
attempt("init", lambda: open("/proc/1/environ").read())
attempt("memory of init", lambda: open("/proc/1/mem"))
attempt("root of init", lambda: os.listdir("/proc/1/root"))
attempt("output of init", lambda: open("/proc/1/fd/1", "w"))
attempt("kernel", lambda: open("/proc/sys/kernel/core_pattern", "w"))
attempt("read", lambda: os.listdir(FOLDER))
attempt("home", lambda: os.listdir(REAL_HOME + "/.ssh"))
attempt("append", lambda: open(FOLDER + "/truth", "a"))
attempt("programs", lambda: open("/usr/bin/left", "w"))
attempt("devices", lambda: open("/dev/left", "w"))
attempt("device", lambda: os.mknod("/tmp/sda", 0o60660, os.makedev(8, 0)))
attempt("root", lambda: os.setuid(0))
attempt("out", lambda: os.chroot("/tmp"))
for number in range(3, 64):
    attempt(f"file {number}", lambda: os.fstat(number))
print(sorted(os.listdir("/tmp")), socket.gethostname(), open("/proc/self/cgroup").read().count("hpcrl"))
"""


def test_nothing_outside_is_in_reach(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "1")
    (tmp_path / "truth").touch()
    with socket.socket(socket.AF_UNIX) as local, socket.create_server(("127.0.0.1", 0)) as server:
        local.bind(str(tmp_path / "socket"))
        local.listen()
        names = {
            "FOLDER": str(tmp_path),
            "REAL_HOME": str(Path.home()),
            "PID": os.getpid(),
            "PORT": server.getsockname()[1],
        }
        with TaskSandbox(folder, limits=SMALL) as box:
            shown = [] if not str(sys.prefix).startswith("/tmp/") else [sys.prefix.split("/")[2]]
            given = "".join(f"{name} = {value!r}\n" for name, value in names.items())
            ran = box.run(["python", "-c", given + OUTSIDE])
            assert ran.output == f"{shown} sandbox 0\n"
            ran = box.run("env; cat /proc/*/environ /proc/*/cmdline /proc/self/mountinfo; python -m keyring")
            assert "SECRET" not in ran.output and str(tmp_path) not in ran.output


@pytest.mark.parametrize(
    "name", ["keys, from a thread", "sockets of other families", "namespaces and mounts", "threads"]
)
def test_attacks_on_the_sandbox_of_programs_reach_nothing(folder: Path, name: str) -> None:
    with TaskSandbox(folder, limits=SMALL) as box:
        assert "reached" not in box.run(["python", "-c", sandbox_attacks.program(name)]).output


def image_of(folder: Path) -> Path:
    """A root with bash, coreutils' `ls` and `cat`, and their libraries."""
    for name in ("bash", "ls", "cat", "rm"):
        program = shutil.which(name)
        assert program
        libraries = re.findall(r"(/\S+) \(0x", subprocess.run(["ldd", program], capture_output=True, text=True).stdout)
        for file in (*libraries, program):
            target = folder / (f"bin/{name}" if file == program else file.lstrip("/"))
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(file, target)
    return folder


def test_an_image_is_a_root_that_can_be_changed(folder: Path, tmp_path: Path) -> None:
    image = image_of(tmp_path / "image")
    (image / "inside").mkdir()
    (image / "home").symlink_to("/inside")
    before = sorted(image.rglob("*"))
    with TaskSandbox(folder) as box:
        if box.copied:
            pytest.skip("this kernel has no overlayfs for users over a tmpfs")
    with TaskSandbox(folder, image) as box:
        ran = box.run("cat keep; rm /bin/ls; echo > /bin/new; echo /* $HOME")
        folders = {f"/{path.name}" for path in before if path.parent == image}
        assert ran.output.split() == ["kept", *sorted(folders | {"/dev", "/etc", "/proc", "/tmp", "/workspace"}), HOME]
        mark = box.snapshot()
        box.run("rm -r /bin/*")
        assert box.run("true").fate != "ok"
        box.restore(mark)
        assert box.run("echo /bin/*").output == "/bin/bash /bin/cat /bin/new /bin/rm\n"
    assert sorted(image.rglob("*")) == before


def test_an_image_in_a_squashfs_file(folder: Path, tmp_path: Path) -> None:
    if not (shutil.which("squashfuse") and shutil.which("mksquashfs") and os.access("/dev/fuse", os.R_OK | os.W_OK)):
        pytest.skip("needs squashfuse, mksquashfs and /dev/fuse")
    image_of(tmp_path / "image")
    for name, owner in (("others", []), ("owned", ["-force-uid", "1000", "-force-gid", "1000"])):
        made = ["mksquashfs", str(tmp_path / "image"), str(tmp_path / name), "-quiet", "-no-progress", *owner]
        subprocess.run(made, check=True)
    with TaskSandbox(folder, tmp_path / "owned") as box:
        start = box.snapshot()
        assert box.run("rm /bin/ls; cat keep; echo /bin/*").output == "kept\n/bin/bash /bin/cat /bin/rm\n"
        box.restore(start)
        assert box.run("echo /bin/*").output == "/bin/bash /bin/cat /bin/ls /bin/rm\n"
        processes = family(box._supervisor.pid, 2)
        box._supervisor.kill()
    await_end(processes)
    for wrong, why in (("others", "-force-uid 1000"), ("task/keep", "not a squashfs file")):
        with pytest.raises(SandboxUnavailable, match=why):
            TaskSandbox(folder, tmp_path / wrong)


@pytest.mark.parametrize("name", ["dev", "workspace", "home"])
def test_links_of_an_image_in_the_place_of_mounts_are_an_error(
    folder: Path, tmp_path: Path, outside: Path, name: str
) -> None:
    image = image_of(tmp_path / "image")
    (image / name).symlink_to(outside)
    with pytest.raises(SandboxUnavailable, match=f"{name}: Not a directory|/home.*: No such file|overlayfs"):
        TaskSandbox(folder, image)


def test_links_of_a_command_in_the_place_of_mounts_end_the_sandbox(folder: Path, tmp_path: Path, outside: Path) -> None:
    """A folder above a mount can be moved; the next mount must not follow what is put in its place."""
    packages = tmp_path / "packages"
    (packages / "inner").mkdir(parents=True)
    with TaskSandbox(folder, packages=[str(packages / "inner")]) as box:
        assert box.run(f"mv {packages} {packages}.moved; ln -s {outside} {packages}").fate == "ok"
        with pytest.raises(SandboxLost):
            box.snapshot()
        with pytest.raises(SandboxLost):
            box.run(["true"])


def family(pid: int, count: int) -> list[psutil.Process]:
    """A supervisor and its descendants, nearest first, once there are so many."""
    give_up = time.monotonic() + 10
    while True:
        found = [psutil.Process(pid)]
        with suppress(psutil.NoSuchProcess):  # one that ends
            for process in found:
                found += process.children()
        if len(found) == count:
            return found
        assert time.monotonic() < give_up, found
        time.sleep(0.01)


def await_end(processes: list[psutil.Process]) -> None:
    give_up = time.monotonic() + 5
    while left := alive(processes):
        assert time.monotonic() < give_up, left
        time.sleep(0.01)


@pytest.mark.parametrize("which", ["supervisor", "watcher", "init", "command", "all"])
def test_nothing_is_left_after_the_kill_of_a_process(folder: Path, which: str) -> None:
    box = TaskSandbox(folder, limits=SMALL)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(box.run, ["sleep", NAP])
        processes = family(box._supervisor.pid, 4)
        number = ["supervisor", "watcher", "init", "command"].index(which) if which != "all" else None
        for process in processes if number is None else [processes[number]]:
            process.kill()
        if which in ("supervisor", "all"):
            with pytest.raises(SandboxLost):
                running.result(timeout=10)
        else:
            assert running.result(timeout=10).fate == ("error" if which == "command" else "killed")
            assert box.run("cat keep").output == "kept\n"
            box.close()
    await_end(processes)
    box.close()


CALLER = """
import sys
from hpcrl.sandbox.task_sandbox import TaskSandbox
box = TaskSandbox(sys.argv[1])
print(box._supervisor.pid, flush=True)
box.run(["sleep", sys.argv[2]] if sys.argv[2] else ["true"], timeout=600)
print("idle", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("nap", [NAP, ""], ids=["while a command runs", "between commands"])
def test_nothing_is_left_after_the_kill_of_the_caller(folder: Path, tmp_path: Path, nap: str) -> None:
    (tmp_path / "temporary").mkdir()
    environment = os.environ | {"TMPDIR": str(tmp_path / "temporary")}
    command = [sys.executable, "-c", CALLER, str(folder), nap]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, cwd=REPOSITORY, env=environment, text=True, **pipes) as caller:
        assert caller.stdout is not None
        supervisor = int(caller.stdout.readline())
        if not nap:
            assert caller.stdout.readline() == "idle\n"
        processes = family(supervisor, 4 if nap else 1)
        caller.send_signal(signal.SIGKILL)
    await_end(processes)
    assert not list((tmp_path / "temporary").iterdir())


def test_what_cannot_be_used_is_an_error_of_one_line(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for make in (lambda: TaskSandbox(folder / "keep"), lambda: TaskSandbox(folder, folder / "no")):
        with pytest.raises(SandboxUnavailable, match="not a directory; unpack archives"):
            make()
    with pytest.raises(ValueError, match="must be less than memory_mb=64"):
        TaskSandbox(folder, limits=Limits(memory_mb=64, disk_mb=64))
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", sys)
    with pytest.raises(RuntimeError, match="from a worker process"):
        TaskSandbox(folder)


def test_a_folder_that_does_not_fit_into_memory_is_an_error(folder: Path) -> None:
    (folder / "big").write_bytes(bytes(3 << 20))
    with pytest.raises(SandboxUnavailable, match="No space left"):
        TaskSandbox(folder, limits=Limits(memory_mb=64, disk_mb=2), layers=False)


UNAVAILABLE = """
import sys
from hpcrl.machine import check
from hpcrl.runtime import exits
from hpcrl.sandbox import fork_server, task_sandbox
fork_server.start()
print(check.task_sandbox().wrong)
with exits.one_line_for_user_errors():
    task_sandbox.require()
"""


@pytest.mark.parametrize("without", ["user", "mnt", None])
def test_a_machine_without_namespaces_is_told_in_one_line(without: str | None) -> None:
    command = [*([*WITHOUT, without] if without else []), sys.executable, "-c", UNAVAILABLE]
    done = subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY)
    if without is None:
        assert (done.returncode, done.stdout, done.stderr) == (0, "None\n", "")
        return
    assert done.returncode == 2
    assert "where environments run commands, allow user namespaces" in done.stdout
    (line,) = done.stderr.splitlines()
    assert "cannot run tasks in sandboxes (unshare: No space left on device)" in line and "hpcrl check" in line


@pytest.mark.slow
def test_32_at_once_under_attack(folder: Path) -> None:
    attacks: list[tuple[str, str]] = [
        (":(){ :|:& };:; sleep 9", "processes"),
        ("yes", "timeout"),
        ("python -c 'x = []\nwhile True: x.append(bytes(1 << 20))'", "error"),
        ("head -c 99M /dev/urandom > x", "error"),
        (f"setsid sleep {NAP} & sleep {NAP}", "timeout"),
        ("for i in $(seq 8); do (while :; do :; done) & done; wait", "timeout"),
        ("echo 1 > x; cat x", "ok"),
        ("rm -rf /workspace /etc /home /dev /proc /tmp 2> /dev/null; exec true", "ok"),
    ]

    def trajectory(number: int) -> bool:
        with TaskSandbox(folder, limits=SMALL) as box:
            start = box.snapshot()
            for turn in range(3):
                command, fate = attacks[(number + turn) % len(attacks)]
                ran = box.run(command, timeout=3 if fate == "timeout" else 60)
                assert ran.fate == fate, (command, ran)
                box.restore(start)
                assert box.run("cat keep").output == "kept\n"
        return True

    with ThreadPoolExecutor(32) as pool:
        assert all(pool.map(trajectory, range(32)))
