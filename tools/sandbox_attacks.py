"""Programs that try to reach what the sandbox keeps from programs under test (`hpcrl.sandbox.program.run_python`).

Each prints a line "reached ..." for what it reached, and nothing else. They need Linux on x86_64 or aarch64.
"""

from __future__ import annotations

LIMIT_MB, HELD_MB = 256, 500  # programs of MEMORY try to hold the second where the first is the limit, for a second

PRELUDE = f"""
import ctypes, mmap, os, socket, subprocess, sys, threading, time

MB, HELD = 1 << 20, {HELD_MB} << 20
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)

def call(x86_64, aarch64, *arguments):
    number = x86_64 if os.uname().machine == "x86_64" else aarch64
    given = [ctypes.c_long(each) if isinstance(each, int) else each for each in arguments]
    found = libc.syscall(ctypes.c_long(number), *given)
    if found == -1:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return found

def reached(what):
    os.write(1, f"reached {{what}}\\n".encode())

def attempt(what, do):
    try:
        do()
    except OSError:
        return
    reached(what)

def mapped(size, flags, file=-1):
    address = libc.mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, flags, file, 0)
    if address in (None, 2**64 - 1):
        raise OSError(ctypes.get_errno(), "mmap")
    return address

def hold(what, size):
    if size >= HELD:
        time.sleep(1)
        reached(what)
"""

KEYS = """
def keyring(number):
    buffer = ctypes.create_string_buffer(4096)
    if call(250, 219, 11, number, buffer, 4096) < 4:  # KEYCTL_READ
        raise OSError
def search():
    call(249, 218, b"user", b"hpcrl attack", None, 0)
def all_of_them():
    for number in (-3, -4, -5):  # session, user and user session
        attempt(f"keyring {number}", lambda: keyring(number))
    attempt("a key", search)
    attempt("a place for a key", lambda: call(248, 217, b"user", b"hpcrl left", b"x", 1, -4))
"""

CALLS = {
    "keys, from a thread": KEYS + "thread = threading.Thread(target=all_of_them); thread.start(); thread.join()",
    "keys, after exec": KEYS + "subprocess.run([sys.executable, '-c', PRELUDE + KEYS + 'all_of_them()'])",
    "io_uring": "attempt('io_uring', lambda: call(425, 425, 4, ctypes.create_string_buffer(120)))",
    "sockets of other families": """
for name, family, kind in (
    ("vsock", 40, socket.SOCK_STREAM), ("netlink", 16, socket.SOCK_RAW), ("alg", 38, socket.SOCK_SEQPACKET),
    ("internet", 2, socket.SOCK_DGRAM), ("internet 6", 10, socket.SOCK_STREAM), ("bluetooth", 31, socket.SOCK_RAW),
    ("xdp", 44, socket.SOCK_RAW), ("smc", 43, socket.SOCK_STREAM),
):
    attempt(name, lambda: socket.socket(family, kind))
""",
    "namespaces and mounts": """
for flag in (1 << 17, 1 << 28, (1 << 28) | (1 << 29)):
    attempt(f"unshare {flag:#x}", lambda: call(272, 97, flag))
    def clone(number, *arguments):
        if call(number, {56: 220}.get(number, number), *arguments) == 0:
            os._exit(0)
    attempt(f"clone {flag:#x}", lambda: clone(56, flag | 17, 0, 0, 0, 0))
    attempt(f"clone3 {flag:#x}", lambda: clone(435, (ctypes.c_uint64 * 11)(flag, 0, 0, 0, 17), 88))
attempt("fsopen", lambda: call(430, 430, b"tmpfs", 0))
attempt("open_tree", lambda: call(428, 428, -100, b"/", 1))
attempt("chroot", lambda: os.chroot("/"))
""",
    "processes and memory of the kernel": """
attempt("ptrace", lambda: call(101, 117, 0, 0, 0, 0))
attempt("userfaultfd", lambda: call(323, 282, 1))
attempt("process_vm_readv", lambda: call(310, 270, os.getpid(), None, 0, None, 0, 0))
attempt("perf_event_open", lambda: call(298, 241, ctypes.create_string_buffer(128), 0, -1, -1, 0))
attempt("bpf", lambda: call(321, 280, 0, ctypes.create_string_buffer(128), 128))
attempt("personality", lambda: call(135, 92, 0x40000))
""",
    "memory of no process": """
ALLOW = ctypes.create_string_buffer(bytes((6, 0, 0, 0, 0, 0, 255, 127)))
attempt("memfd_create", lambda: os.memfd_create("held"))
attempt("memfd_secret", lambda: call(447, 447, 0))
attempt("shmget", lambda: call(29, 194, 0, 4096, 0o1600))
attempt("semget", lambda: call(64, 190, 0, 32000, 0o1600))
attempt("msgget", lambda: call(68, 186, 0, 0o1600))
attempt("inotify", lambda: call(294, 26, 0))
attempt("io_setup", lambda: call(206, 0, 1024, (ctypes.c_long * 1)()))
attempt("standard input", lambda: os.ftruncate(0, 8 * MB))
attempt("landlock", lambda: call(444, 444, (ctypes.c_uint64 * 2)(0, 3), 16, 0))
attempt("a filter", lambda: call(317, 277, 1, 0, (ctypes.c_uint64 * 2)(1, ctypes.addressof(ALLOW))))
""",
}

MEMORY = {
    "pieces of shared mappings": """
flags, held = mmap.MAP_SHARED | mmap.MAP_ANONYMOUS, 0
while held < HELD:
    try:
        address = mapped(50 * MB, flags)
    except OSError:
        flags, file = mmap.MAP_SHARED, os.open("/dev/zero", os.O_RDWR)
        address = mapped(50 * MB, flags, file)
    ctypes.memset(address, 1, 50 * MB)
    libc.munmap(address + 4096, 50 * MB - 4096)
    held += 50 * MB
hold("memory of shared mappings", held)
""",
    "pages in pipes": """
class Part(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("length", ctypes.c_size_t)]
held, pipes = 0, []
try:
    while held < HELD:
        pipes.append(os.pipe())
        for _ in range(16):
            address = mapped(4 * MB, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            whole = (address + 2 * MB - 1) // (2 * MB) * (2 * MB)
            libc.madvise(whole, 2 * MB, 14)  # MADV_HUGEPAGE
            ctypes.memset(whole, 1, 2 * MB)
            call(278, 75, pipes[-1][1], ctypes.byref(Part(whole, 4096)), 1, 2)  # vmsplice; SPLICE_F_NONBLOCK
            libc.munmap(address, 4 * MB)
            held += 2 * MB
except OSError:
    pass
hold("memory of pages in pipes", held)
""",
    "connections that are not accepted": """
listener, held = socket.socket(socket.AF_UNIX), 0
listener.bind("/tmp/listener")
listener.listen(1 << 20)
while held < HELD:
    with socket.socket(socket.AF_UNIX) as sender:
        sender.setblocking(False)
        sender.connect("/tmp/listener")
        try:
            while True:
                held += sender.send(bytes(1 << 16))
        except BlockingIOError:
            pass
hold("memory of connections", held)
""",
    "datagrams of closed sockets": """
held, receivers = 0, []
while held < HELD:
    receiver = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    receiver.bind(f"/tmp/{len(receivers)}")
    receivers.append(receiver)
    for _ in range(11):
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.setblocking(False)
            sender.connect(receiver.getsockname())
            held += sender.send(bytes(200_000))
hold("memory of datagrams", held)
""",
    "sockets in messages": """
carrier, held = socket.socketpair(), 0
for _ in range(200):
    one, other = socket.socketpair()
    try:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 * MB)
    except OSError:
        pass
    one.setblocking(False)
    try:
        while True:
            held += one.send(bytes(1 << 16))
    except BlockingIOError:
        pass
    socket.send_fds(carrier[0], [b"x"], [other.fileno()])
    one.close()
    other.close()
hold("memory of sockets in messages", held)
""",
    "processes without a main thread": """
def work():
    time.sleep(0.2)
    taken = b"x" * (HELD // 5)
    os.write(ready[1], b"x")
    time.sleep(60)
ready = os.pipe()
for _ in range(5):
    if os.fork() == 0:
        threading.stack_size(1 << 17)
        threading.Thread(target=work).start()
        call(60, 93, 0)  # exit, of this thread only
for _ in range(5):
    os.read(ready[0], 1)
hold("memory of processes without a main thread", HELD)
os.kill(0, 9)
""",
    "small processes": """
ready = os.pipe()
for _ in range(20):
    if os.fork() == 0:
        taken = b"x" * (HELD // 20)
        os.write(ready[1], b"x")
        time.sleep(60)
for _ in range(20):
    os.read(ready[0], 1)
hold("memory of small processes", HELD)
os.kill(0, 9)
""",
    "access lists of files": """
import struct
entry = struct.Struct("<HHI")
group, other = entry.pack(4, 6, 2**32 - 1), entry.pack(16, 6, 2**32 - 1) + entry.pack(32, 6, 2**32 - 1)
entries = struct.pack("<I", 2) + entry.pack(1, 6, 2**32 - 1) + entry.pack(2, 6, os.getuid()) * 8000 + group + other
held = 0
try:
    while held < HELD:
        with open(f"/tmp/{held}", "w") as file:
            os.setxattr(file.fileno(), "system.posix_acl_access", entries)
        held += len(entries)
except OSError:
    pass
hold("memory of access lists", held)
""",
    "locks": """
import fcntl
kept = [open(f"/tmp/{number}", "w") for number in range(30)]
for file in kept:
    for start in range(2000):
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, 2 * start)
hold("60,000 locks", HELD)
""",
    "threads": """
libc.mallopt(-8, 1)  # one arena
threading.stack_size(1 << 15)
ready = os.pipe()
for _ in range(4):
    if os.fork() == 0:
        try:
            for started in range(1000):
                threading.Thread(target=time.sleep, args=[60], daemon=True).start()
        except RuntimeError:
            pass
        os.write(ready[1], b"x" if started > 400 else b"-")
        time.sleep(60)
if [os.read(ready[0], 1) for _ in range(4)] == [b"x"] * 4:
    hold("four processes with more than 400 threads", HELD)
os.kill(0, 9)
""",
}


def program(name: str) -> str:
    """Source of an attack of `CALLS` or `MEMORY`."""
    return f"{PRELUDE}\nPRELUDE, KEYS = {PRELUDE!r}, {KEYS!r}\n{(CALLS | MEMORY)[name]}"
