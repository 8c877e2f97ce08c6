"""A seccomp filter for programs under test: it denies system calls that reach what namespaces and limits do not cover.

The filter is a program in classic BPF, which the kernel runs at each system call of the process and its descendants. It
needs no privileges. Linux on x86_64 and aarch64. Standard library only, as in process_tree.py.
"""

from __future__ import annotations

import ctypes
import os
import struct
from errno import ENOSYS, EPERM

from hpcrl.sandbox.process_tree import LIBC, libc_call

AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
X32 = 1 << 30  # in the numbers of x86_64's other ABI
NEWEST = 462  # last number that was looked at; calls that kernels got later do not exist for the program

# Why a call is denied: its name, its number on x86_64, its number on aarch64, -1 if there is no such call.
DENIED = {
    "keys of the user": "add_key 248 217, request_key 249 218, keyctl 250 219",
    "memory that no process shows": (
        "memfd_create 319 279, memfd_secret 447 447, shmget 29 194, shmat 30 196, semget 64 190, msgget 68 186, "
        "mq_open 240 180, vmsplice 278 75, io_setup 206 0, inotify_init 253 -1, inotify_init1 294 26, "
        "fanotify_init 300 262, setxattr 188 5, lsetxattr 189 6, fsetxattr 190 7, seccomp 317 277, "
        "landlock_create_ruleset 444 444"
    ),
    "calls that no filter sees, and large parts of the kernel that few programs use": (
        "io_uring_setup 425 425, io_uring_enter 426 426, io_uring_register 427 427, bpf 321 280, "
        "perf_event_open 298 241, userfaultfd 323 282"
    ),
    "namespaces, mounts, and files by number instead of by path": (
        "unshare 272 97, setns 308 268, mount 165 40, umount2 166 39, pivot_root 155 41, chroot 161 51, "
        "open_tree 428 428, move_mount 429 429, fsopen 430 430, fsconfig 431 431, fsmount 432 432, fspick 433 433, "
        "mount_setattr 442 442, open_by_handle_at 304 265"
    ),
    "other processes, which are the user's where there is no process namespace": (
        "ptrace 101 117, process_vm_readv 310 270, process_vm_writev 311 271, pidfd_getfd 438 438, kcmp 312 272"
    ),
    "the machine, for root where there is no user namespace": (
        "kexec_load 246 104, kexec_file_load 320 294, init_module 175 105, finit_module 313 273, "
        "delete_module 176 106, swapon 167 224, swapoff 168 225, reboot 169 142, quotactl 179 60, quotactl_fd 443 443, "
        "acct 163 89, settimeofday 164 170, clock_settime 227 112, clock_adjtime 305 266, adjtimex 159 171, "
        "syslog 103 116, sethostname 170 161, setdomainname 171 162, iopl 172 -1, ioperm 173 -1, modify_ldt 154 -1, "
        "personality 135 92"
    ),
}
ABSENT = "clone3 435 435"  # its flags are out of a filter's sight; the C library takes clone instead

AF_UNIX = 1
CLONE_FILES, CLONE_THREAD = 0x400, 0x10000
CLONE_NEW = (0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000)
SHARED_ANONYMOUS, MAP_HUGETLB = 0x21, 0x40000
SO_SNDBUF, SO_ATTACH_FILTER, SO_SNDBUFFORCE = 7, 26, 32
F_OFD_SETLK, F_OFD_SETLKW, F_SETPIPE_SZ = 37, 38, 1031
PR_SET_SECCOMP = 22
ALL_BITS = 0xFFFFFFFF

# A call, an argument's index, and (mask, value) of it with which the call is denied.
DENIED_WITH = (
    # A thread with files of its own would have more of them than its process may.
    ("clone 56 220", 0, [*((flag, flag) for flag in CLONE_NEW), (CLONE_THREAD | CLONE_FILES, CLONE_THREAD)]),
    # A shared mapping keeps all its memory while one page of it is mapped. Huge pages are not in resident memory.
    ("mmap 9 222", 3, [(SHARED_ANONYMOUS, SHARED_ANONYMOUS), (MAP_HUGETLB, MAP_HUGETLB)]),
    # Buffers stay as small as `process_tree.socket_bytes` takes them to be. The kernel names no owner of OFD locks.
    ("setsockopt 54 208", 2, [(ALL_BITS, name) for name in (SO_SNDBUF, SO_SNDBUFFORCE, SO_ATTACH_FILTER)]),
    ("fcntl 72 25", 1, [(ALL_BITS, command) for command in (F_OFD_SETLK, F_OFD_SETLKW, F_SETPIPE_SZ)]),
    ("prctl 157 167", 0, [(ALL_BITS, PR_SET_SECCOMP)]),
)
# A program has no network. Other families (vsock, netlink, alg) reach the host or much of the kernel.
DENIED_UNLESS = (("socket 41 198", 0, AF_UNIX), ("socketpair 53 199", 0, AF_UNIX))

LOAD, EQUAL, AT_LEAST, AND, RETURN = 0x20, 0x15, 0x35, 0x54, 0x06  # BPF's; they work on one register of 32 bits
ALLOW, KILL, ERROR = 0x7FFF0000, 0x80000000, 0x00050000
NUMBER, ABI, ARGUMENTS = 0, 4, 16  # offsets in what BPF sees of a call; arguments have 8 bytes
PR_SET_NO_NEW_PRIVS = 38
SET_MODE_FILTER, SPEC_ALLOW = 1, 4
KEYCTL_JOIN_SESSION_KEYRING = 1

Instruction = tuple[int, int, int, int]  # operation, instructions to skip if true, if false, operand


def number(call: str, machine: str) -> int:
    """Number of a call of the tables on a machine as `os.uname` names it; -1 if it has no such call."""
    return int(call.split()[1 + list(AUDIT_ARCH).index(machine)])


def filter_for(machine: str) -> list[Instruction]:
    """The filter for a machine. Raises OSError for others than x86_64 and aarch64."""
    if machine not in AUDIT_ARCH:
        raise OSError(ENOSYS, f"there is a seccomp filter for {' and '.join(AUDIT_ARCH)}, not for {machine}")
    # a number has another meaning in another ABI
    instructions = [(LOAD, 0, 0, ABI), (EQUAL, 1, 0, AUDIT_ARCH[machine]), (RETURN, 0, 0, KILL), (LOAD, 0, 0, NUMBER)]
    if machine == "x86_64":
        instructions += [(AT_LEAST, 0, 1, X32), (RETURN, 0, 0, KILL)]
    instructions += [(AT_LEAST, 0, 1, NEWEST + 1), (RETURN, 0, 0, ERROR | ENOSYS)]
    deny = (RETURN, 0, 0, ERROR | EPERM)
    for call, argument, cases in DENIED_WITH:
        body: list[Instruction] = []
        for mask, value in cases:
            body += [(LOAD, 0, 0, ARGUMENTS + 8 * argument), (AND, 0, 0, mask), (EQUAL, 0, 1, value), deny]
        instructions += [(EQUAL, 0, len(body) + 1, number(call, machine)), *body, (RETURN, 0, 0, ALLOW)]
    for call, argument, value in DENIED_UNLESS:
        instructions += [(EQUAL, 0, 4, number(call, machine)), (LOAD, 0, 0, ARGUMENTS + 8 * argument)]
        instructions += [(EQUAL, 1, 0, value), deny, (RETURN, 0, 0, ALLOW)]
    for calls, error in ((ABSENT, ENOSYS), *((calls, EPERM) for calls in DENIED.values())):
        for which in (number(call, machine) for call in calls.split(", ")):
            if which >= 0:
                instructions += [(EQUAL, 0, 1, which), (RETURN, 0, 0, ERROR | error)]
    return [*instructions, (RETURN, 0, 0, ALLOW)]


def install() -> None:
    """Filter the calls of this process, which must have one thread, and of all that descends from it, for good.

    Raises OSError if the kernel has no filters, or for a machine other than x86_64 and aarch64.
    """
    apply(filter_for(os.uname().machine))


def apply(instructions: list[Instruction]) -> None:
    code = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *instruction) for instruction in instructions))
    program = struct.pack("@HP", len(instructions), ctypes.addressof(code))
    call = ctypes.c_long(number("seccomp 317 277", os.uname().machine))
    libc_call("prctl", PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    # Without this flag, Linux before 5.16 makes the process slower: it turns the speculation of loads off.
    for flags in (SPEC_ALLOW, 0):  # Linux has the flag from 4.17 on
        if LIBC.syscall(call, SET_MODE_FILTER, flags, program) == 0:
            return
    error = ctypes.get_errno()
    raise OSError(error, f"seccomp: {os.strerror(error)}")


def leave_keyring() -> None:
    """Join a new empty session keyring, so that this process has none of the caller's keys. Call it before `install`.

    Ignores errors: the kernel may have no keys, the user's quota may be used up. The filter denies keys as well.
    """
    machine = os.uname().machine
    if machine in AUDIT_ARCH:
        call = ctypes.c_long(number("keyctl 250 219", machine))
        LIBC.syscall(call, KEYCTL_JOIN_SESSION_KEYRING, None)
