"""The filter of system calls: what it decides, what programs reach with it, and what they can still do."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from errno import ENOSYS, EPERM
from pathlib import Path

import pytest

from hpcrl.sandbox import seccomp
from hpcrl.sandbox.isolation import probe_isolation
from hpcrl.sandbox.program import Limits, run_python
from tools import sandbox_attacks

REPOSITORY = Path(__file__).parents[2]
HEADERS = {
    "x86_64": ("/usr/include/x86_64-linux-gnu/asm/unistd_64.h", r"#define __NR_(\w+) (\d+)\n"),
    "aarch64": ("/usr/include/asm-generic/unistd.h", r"#define __NR(?:3264)?_(\w+) (\d+)\n"),
}
I386, PPC64 = 0x40000003, 0x80000015


def decide(machine: str, number: int, *arguments: int, abi: int | None = None) -> int:
    """What the kernel would read from the filter: a BPF machine of the five operations that it has."""
    call = {0: number, 4: seccomp.AUDIT_ARCH[machine] if abi is None else abi}
    for index, argument in enumerate(arguments):
        call |= {16 + 8 * index: argument & 0xFFFFFFFF, 20 + 8 * index: argument >> 32}
    filtered = seccomp.filter_for(machine)
    register = place = 0
    while True:
        operation, if_true, if_false, operand = filtered[place]
        place += 1
        match operation:
            case 0x20:
                register = call.get(operand, 0)
            case 0x54:
                register &= operand
            case 0x15:
                place += if_true if register == operand else if_false
            case 0x35:
                place += if_true if register >= operand else if_false
            case 0x06:
                return operand


DENIED, ABSENT = seccomp.ERROR | EPERM, seccomp.ERROR | ENOSYS


@pytest.mark.parametrize(
    ("x86_64", "aarch64", "arguments", "verdict"),
    [
        (250, 219, (), DENIED),  # keyctl
        (319, 279, (), DENIED),  # memfd_create
        (425, 425, (), DENIED),  # io_uring_setup
        (29, 194, (), DENIED),  # shmget
        (435, 435, (), ABSENT),  # clone3
        (463, 463, (), ABSENT),
        (9999, 9999, (), ABSENT),
        (0, 63, (3,), seccomp.ALLOW),  # read
        (59, 221, (), seccomp.ALLOW),  # execve
        (462, 462, (), seccomp.ALLOW),
        (56, 220, (0x3D0F00,), seccomp.ALLOW),  # clone of a thread
        (56, 220, (0x3D0F00 & ~0x400,), DENIED),  # of a thread with files of its own
        (56, 220, (0x1200011,), seccomp.ALLOW),  # of a process
        (56, 220, (0x10000011,), DENIED),  # of a user namespace
        (56, 220, (0x0010_0F00 | 0x4000_0000,), DENIED),
        (9, 222, (0, 1 << 20, 3, 0x22), seccomp.ALLOW),  # mmap of private memory
        (9, 222, (0, 1 << 20, 1, 0x01, 3), seccomp.ALLOW),  # of a file
        (9, 222, (0, 1 << 20, 3, 0x21), DENIED),
        (9, 222, (0, 1 << 20, 3, 0x4021), DENIED),
        (9, 222, (0, 1 << 20, 3, 0x23), DENIED),  # MAP_SHARED_VALIDATE
        (9, 222, (0, 2 << 20, 3, 0x4_0022), DENIED),  # of huge pages
        (41, 198, (1, 1), seccomp.ALLOW),  # socket
        (41, 198, ((7 << 32) | 1, 1), seccomp.ALLOW),  # the kernel reads the lower half as well
        (41, 198, (40, 1), DENIED),  # vsock
        (41, 198, (16, 3), DENIED),  # netlink
        (53, 199, (2, 1), DENIED),  # socketpair
        (54, 208, (3, 1, 7), DENIED),  # setsockopt SO_SNDBUF
        (54, 208, (3, 1, 8), seccomp.ALLOW),
        (72, 25, (3, 1031, 1 << 20), DENIED),  # fcntl F_SETPIPE_SZ
        (72, 25, (3, 37, 0), DENIED),  # F_OFD_SETLK
        (72, 25, (3, 6, 0), seccomp.ALLOW),  # F_SETLK
        (157, 167, (22, 2), DENIED),  # prctl PR_SET_SECCOMP
        (157, 167, (15, 0), seccomp.ALLOW),  # PR_SET_NAME
    ],
)
def test_decisions(x86_64: int, aarch64: int, arguments: tuple[int, ...], verdict: int) -> None:
    assert decide("x86_64", x86_64, *arguments) == verdict
    assert decide("aarch64", aarch64, *arguments) == verdict


def test_numbers_of_another_abi_kill() -> None:
    assert decide("x86_64", 39) == seccomp.ALLOW
    assert decide("x86_64", 39 + (1 << 30)) == decide("x86_64", 535 + (1 << 30)) == seccomp.KILL  # x32
    for machine in seccomp.AUDIT_ARCH:
        for abi in {I386, PPC64, *seccomp.AUDIT_ARCH.values()} - {seccomp.AUDIT_ARCH[machine]}:
            assert decide(machine, 20, abi=abi) == seccomp.KILL
    with pytest.raises(OSError, match="x86_64 and aarch64, not for riscv64"):
        seccomp.filter_for("riscv64")


@pytest.mark.parametrize("machine", HEADERS)
def test_numbers_are_those_of_the_kernels_headers(machine: str) -> None:
    path, pattern = HEADERS[machine]
    if not os.path.exists(path):
        pytest.skip(f"{path} is not installed")
    numbers = {name: int(number) for name, number in re.findall(pattern, Path(path).read_text())}
    tables = ", ".join([*seccomp.DENIED.values(), seccomp.ABSENT, "seccomp 317 277"])
    calls = [*tables.split(", "), *(call for call, *_ in (*seccomp.DENIED_WITH, *seccomp.DENIED_UNLESS))]
    wrong = [call for call in calls if seccomp.number(call, machine) != numbers.get(call.split()[0], -1)]
    assert not [call for call in wrong if not call.startswith("open_by_handle_at")]  # is defined twice there


WITH_A_KEY = """
import ctypes, os, subprocess, sys
from hpcrl.sandbox.program import run_python
from tools import sandbox_attacks
libc = ctypes.CDLL(None, use_errno=True)
keyctl, add_key = (250, 248) if os.uname().machine == "x86_64" else (219, 217)
def call(number, *arguments):
    return libc.syscall(ctypes.c_long(number), *arguments)
assert call(keyctl, 1, None) > 0, "this kernel has no keys"
serial = call(add_key, b"user", b"hpcrl attack", b"secret", 6, -3)
assert serial > 0
for name in sandbox_attacks.CALLS:
    program = sandbox_attacks.program(name)
    ran = run_python(program)
    print(f"{name}: {ran.fate} {ran.stdout}{ran.stderr}")
    if "keys" in name:
        free = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
        assert "reached a key\\n" in free.stdout, free
        join = "from hpcrl.sandbox import seccomp; seccomp.leave_keyring()\\n"
        free = subprocess.run([sys.executable, "-c", join + program], capture_output=True, text=True)
        assert "reached a place for a key" in free.stdout and "reached a key\\n" not in free.stdout, free
buffer = ctypes.create_string_buffer(6)
call(keyctl, 11, serial, buffer, 6)
print(buffer.raw)
"""


@pytest.mark.usefixtures("isolated")
def test_no_key_and_no_call_of_the_filter_is_reached() -> None:
    done = subprocess.run([sys.executable, "-c", WITH_A_KEY], capture_output=True, text=True, cwd=REPOSITORY)
    if "no keys" in done.stderr:
        pytest.skip("this kernel has no keys")
    assert done.stdout == "".join(f"{name}: ok \n" for name in sandbox_attacks.CALLS) + "b'secret'\n", done.stderr


@pytest.mark.usefixtures("isolated")
def test_calls_of_x32_kill_the_program() -> None:
    if os.uname().machine != "x86_64":
        pytest.skip("x32 is an ABI of x86_64")
    ran = run_python("import ctypes; print(ctypes.CDLL(None).syscall(ctypes.c_long((1 << 30) + 39)))")
    assert (ran.fate, ran.returncode, ran.stdout) == ("killed", -31, "")  # SIGSYS


@pytest.mark.usefixtures("isolated")
@pytest.mark.parametrize("name", sandbox_attacks.MEMORY)
def test_no_memory_is_held_beyond_the_limit(name: str) -> None:
    limits = Limits(seconds=20, memory_mb=sandbox_attacks.LIMIT_MB)
    ran = run_python(sandbox_attacks.program(name), limits=limits)
    assert "reached" not in ran.stdout, ran
    denied = ("pieces of shared mappings", "pages in pipes", "sockets in messages", "access lists of files", "threads")
    assert ran.fate == "memory" or name in denied, ran


HONEST = """
import asyncio, mmap, multiprocessing, os, socket, sqlite3, subprocess, sys, tempfile, threading
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import shared_memory
import numpy

def square(number):
    return number**2

async def echo():
    process = await asyncio.create_subprocess_exec("cat", stdin=-1, stdout=-1)
    return (await process.communicate(b"echo"))[0]

async def serve():
    async def answer(reader, writer):
        writer.write(await reader.readline())
        writer.close()
    async with await asyncio.start_unix_server(answer, "server"):
        reader, writer = await asyncio.open_unix_connection("server")
        writer.write(b"line\\n")
        return await reader.read()

with mmap.mmap(0, 0, access=mmap.ACCESS_READ) as given:
    assert given[:] == b"given"
with ThreadPoolExecutor(4) as threads, ProcessPoolExecutor(2) as processes:
    assert list(threads.map(square, range(9))) == list(processes.map(square, range(9)))
with multiprocessing.Manager() as manager:
    assert manager.list([1])[0] == 1
with multiprocessing.Pool(2) as pool:
    assert pool.map(abs, [-1]) == [1]
one, other = multiprocessing.Pipe()
one.send("x")
value = multiprocessing.Array("i", 1000)
memory = shared_memory.SharedMemory(create=True, size=1000)
memory.unlink()
assert other.recv() == "x" and asyncio.run(echo()) == b"echo" and asyncio.run(serve()) == b"line\\n"
assert subprocess.run("echo $((1 + 1)) | cat", shell=True, capture_output=True, text=True).stdout == "2\\n"
assert socket.getaddrinfo("127.0.0.1", 80) and socket.gethostname()
try:
    socket.getaddrinfo("localhost", 80)
except socket.gaierror:
    pass
database = sqlite3.connect("file.db")
database.execute("create table t (x)")
database.commit()
with tempfile.TemporaryFile() as file:
    file.truncate(4096)
    mmap.mmap(file.fileno(), 4096)[:2] = b"ab"
assert numpy.linalg.det(numpy.eye(300)) == 1
print("all")
"""


@pytest.mark.usefixtures("isolated")
def test_what_python_has_still_works() -> None:
    ran = run_python(HONEST, "given")
    assert (ran.fate, ran.stdout) == ("ok", "all\n"), ran


WITHOUT_FILTERS = """
import sys
from hpcrl.sandbox import seccomp
number = seccomp.number("seccomp 317 277", sys.argv[1])
seccomp.apply([(seccomp.LOAD, 0, 0, 0), (seccomp.EQUAL, 0, 1, number), (seccomp.RETURN, 0, 0, seccomp.ERROR | 38),
               (seccomp.RETURN, 0, 0, seccomp.ALLOW)])
"""
REFUSED = """
from hpcrl.config.schema import RewardConfig
from hpcrl.rewards.manager import check_rewards
from hpcrl.runtime.exits import InputError
from hpcrl.sandbox import fork_server
from hpcrl.sandbox.program import SandboxUnavailable, run_python
fork_server.start()
program = "import os; os.memfd_create('x'); print(os.path.exists('/etc/passwd'), os.getcwd())"
try:
    run_python(program)
except SandboxUnavailable as error:
    print(error)
try:
    check_rewards(RewardConfig(), {"apps"})
except InputError as error:
    print(error)
print(run_python(program, best_effort=True).stdout)
"""


@pytest.mark.usefixtures("isolated")
def test_a_kernel_without_filters_runs_programs_only_with_best_effort() -> None:
    """Then with the namespaces that it has."""
    command = [sys.executable, "-c", WITHOUT_FILTERS + REFUSED, os.uname().machine]
    done = subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY)
    refused, job, ran = done.stdout.splitlines()[:3]
    why = "seccomp: Function not implemented"
    assert refused == f"this kernel does not isolate programs: {why}", done.stderr
    assert why in job and "seccomp filters" in job and "reward.sandbox=best_effort" in job
    assert ran == "False /box"


def test_a_machine_without_a_table_is_named() -> None:
    if os.uname().machine != "x86_64":
        pytest.skip("setarch gives x86_64 another name")
    probe = "from hpcrl.sandbox.isolation import probe_isolation; print(probe_isolation())"
    done = subprocess.run(
        ["setarch", "i686", sys.executable, "-c", probe], capture_output=True, text=True, cwd=REPOSITORY
    )
    assert "filtered=False" in done.stdout, done.stderr
    assert not probe_isolation().complete or "x86_64 and aarch64, not for i686" in done.stdout
