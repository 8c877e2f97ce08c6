"""A job beside a second user of its node, who attacks it at random until it ends.

    .venv/bin/python tools/attack_neighbour.py --folders /tmp runs -- mpiexec -n 2 python -m hpcrl train x.yaml
    .venv/bin/python tools/attack_neighbour.py --pids 4711 --user nobody --seconds 600

Starts the command, or takes processes that run, and attacks them and their descendants: on every port where they
listen it sends garbage, half messages, long lengths and floods, and sets and deletes keys as a client of torch's store;
in --folders, such as run.dir and the temporary folder, it plants files and links with names like those of a job, and
writes, replaces and removes what is there; it reads their /proc and sends them signals. Attacks are drawn by --seed.

Start it as root, or as the job's user: only they can see where a job listens. As root, the attacks run as --user. As
another user, they have the job's own rights, so that only those through the network are made. Prints a line for each
attack: how often it was made, and with what result. The exit code is the command's, or 1 if a file was changed or read,
or a signal sent.
"""

from __future__ import annotations

import argparse
import encodings.idna  # noqa: F401  # sockets import it, and --user may not be able to read it
import json
import os
import pwd
import random
import signal
import socket
import struct
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

import checkout  # noqa: F401
import psutil

from hpcrl.runtime.sockets import LAUNCHERS, Address, addresses_of_listening, socket_inodes

PAUSE = 0.005  # seconds between two attacks
TICK = 0.05  # seconds between two looks at the job's processes
MOST_HELD = 60  # connections that are kept open
MOST_PLANTED = 200  # files
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGURG, signal.SIGUSR1, signal.SIGSTOP, signal.SIGKILL)
NAMES = ("hpcrl_{}", "hpcrl_ranks_{}", "pymp-{}", "hydra_{}", "listener-{}", "torch_{}", ".exit.{}", "tmp{}")
KEYS = ("stop", "stop/saves", "save/1/actor/0", "save/2/actor/1", "hpcrl/stop", "default_pg/0//cpu//0/rank_0")
FORGED = "\x1b[31mSIGTERM on rank 0 (forged)\x1b[0m"
TORCH_HELLO = b"\0" + struct.pack("=I", 0x3C85F7CE)
DENIED, DONE = "denied", "DONE"


class Target(NamedTuple):
    """What the attacker knows of the job."""

    pids: list[int]
    ports: list[Address]


class Attacker:
    def __init__(self, seed: int, folders: list[Path], only_network: bool) -> None:
        self._draw = random.Random(seed)
        self._folders = folders
        self._held: list[socket.socket] = []
        self._planted: list[Path] = []
        self.target = Target([], [])
        self.results: Counter[tuple[str, str]] = Counter()
        self._on_ports = (self.garbage, self.long_length, self.half_message, self.flood, self.forge, self.own_message)
        self._on_files = () if only_network else (self.plant, self.change_file, self.read_file)
        self._on_processes = () if only_network else (self.send_signal, self.read_proc)

    def attack(self) -> None:
        """Make one attack."""
        attacks: list[Callable[[], str]] = [*(self._on_files if self._folders else ())]
        attacks += [*(self._on_ports if self.target.ports else ()), *(self._on_processes if self.target.pids else ())]
        if not attacks:
            return
        method = self._draw.choice(attacks)
        try:
            result = method()
        except PermissionError:
            result = DENIED
        except (OSError, RuntimeError) as error:
            result = type(error).__name__
        self.results[method.__name__, result] += 1

    def clean_up(self) -> None:
        for path in self._planted:
            with suppress(OSError):
                path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()

    def garbage(self) -> str:
        with self._connect() as connection:
            connection.sendall(self._draw.randbytes(self._draw.choice((1, 32, 1000, 100_000))))
        return "sent"

    def long_length(self) -> str:
        with self._connect() as connection:
            length = self._draw.choice((2**31 - 1, 2**32 - 1, 2**63 - 1))
            connection.sendall(length.to_bytes(8, self._draw.choice(("little", "big"))) + bytes(1000))
            connection.settimeout(0.05)
            with suppress(TimeoutError):
                connection.recv(1)
        return "sent"

    def half_message(self) -> str:
        """Keep a connection open, and send a byte on another one."""
        self._held.append(self._connect())
        if len(self._held) > MOST_HELD:
            self._held.pop(self._draw.randrange(MOST_HELD)).close()
        self._draw.choice(self._held).sendall(self._draw.randbytes(1))
        return "sent"

    def flood(self) -> str:
        opened, address = [], self._draw.choice(self.target.ports)
        for _ in range(self._draw.choice((30, 300))):
            one = socket.socket(socket.AF_INET6 if ":" in address[0] else socket.AF_INET)
            one.setblocking(False)
            with suppress(BlockingIOError):
                one.connect(address)
            opened.append(one)
        time.sleep(0.05)
        for one in opened:
            one.close()
        return "sent"

    def forge(self) -> str:
        """Set and delete keys as a client of torch's store does."""
        with self._connect() as connection:
            connection.sendall(TORCH_HELLO)
            for key in KEYS:
                if self._draw.random() < 0.5:
                    connection.sendall(b"\1" + _string(f"/{key}") + _string(self._draw.choice((FORGED, ""))))
                else:
                    connection.sendall(b"\10" + _string(f"/{key}"))
        return "sent"

    def own_message(self) -> str:
        """A guess of the secret, and a request for the key-value store."""
        request = json.dumps(["set", self._draw.choice(KEYS), FORGED]).encode()
        guess = self._draw.randbytes(self._draw.choice((0, 32)))
        with self._connect() as connection:
            connection.sendall(guess + len(request).to_bytes(4, "big") + request)
            connection.settimeout(0.05)
            with suppress(TimeoutError):
                return "an answer" if connection.recv(1) else "closed"
        return "sent"

    def plant(self) -> str:
        """A file, a folder or a link with a name as a job has it."""
        name = self._draw.choice(NAMES).format(self._draw.randbytes(4).hex())
        path = self._draw.choice(self._folders) / name
        if len(self._planted) >= MOST_PLANTED:
            return "enough"
        kind = self._draw.randrange(3)
        if kind == 0:
            path.write_text(FORGED)
        elif kind == 1:
            path.mkdir(0o777)
        else:
            path.symlink_to(self._draw.choice(("/etc/passwd", "/dev/zero", name)))
        self._planted.append(path)
        return "planted"

    def change_file(self) -> str:
        path = self._path()
        if path is None:
            return "nothing there"
        kind = self._draw.randrange(5)
        if kind == 0:
            with open(path, "ab") as file:
                file.write(b"\0")
        elif kind == 1:
            path.rename(path.with_name(f"{path.name}.moved"))
        elif kind == 2:
            path.rmdir() if path.is_dir() else path.unlink()
        elif kind == 3:
            (path / self._draw.choice(("exit.json", "metrics.jsonl", "latest", "owner"))).symlink_to("/etc/passwd")
        else:
            path.chmod(0o777)
        return DONE

    def read_file(self) -> str:
        path = self._path()
        if path is None:
            return "nothing there"
        os.listdir(path) if path.is_dir() else path.read_bytes()
        return DONE

    def send_signal(self) -> str:
        os.kill(self._draw.choice(self.target.pids), self._draw.choice(SIGNALS))
        return DONE

    def read_proc(self) -> str:
        name = self._draw.choice(("environ", "mem", "maps", "fd"))
        path = Path(f"/proc/{self._draw.choice(self.target.pids)}/{name}")
        found = os.listdir(path) if name == "fd" else path.read_bytes()
        return DONE if found else "nothing there"  # of a process that ends

    def _connect(self) -> socket.socket:
        return socket.create_connection(self._draw.choice(self.target.ports), timeout=0.2)

    def _path(self) -> Path | None:
        """Something of another user in the folders, or a folder below them into which no other user may look."""
        path = self._draw.choice(self._folders)
        while path.is_dir() and not path.is_symlink():
            try:
                inside = [entry for entry in sorted(path.iterdir()) if entry.lstat().st_uid != os.getuid()]
            except PermissionError:
                break
            if not inside:
                break
            path = self._draw.choice(inside)
        return None if path in self._folders else path


def _string(text: str) -> bytes:
    """As the protocol of torch's store has it."""
    return struct.pack("=Q", len(text.encode())) + text.encode()


def find_target(roots: list[int], with_launcher: bool) -> Target:
    """The processes `roots` and their descendants, without this one, and where they listen."""
    family: dict[int, psutil.Process] = {}
    for root in roots:
        with suppress(psutil.NoSuchProcess):
            family |= {one.pid: one for one in (psutil.Process(root), *psutil.Process(root).children(recursive=True))}
    mine = {os.getpid(), *(child.pid for child in psutil.Process().children())} - set(roots)
    sockets: dict[bool, set[str]] = {True: set(), False: set()}
    for pid in family.keys() - mine:
        with suppress(OSError, psutil.NoSuchProcess):
            sockets[family[pid].name() in LAUNCHERS] |= socket_inodes(pid)
    # processes of a job inherit the launcher's sockets
    inodes = sockets[False] | sockets[True] if with_launcher else sockets[False] - sockets[True]
    here = {"0.0.0.0": "127.0.0.1", "::": "::1"}
    ports = {(here.get(host, host), port) for host, port in addresses_of_listening(inodes).values()}
    return Target(sorted(family.keys() - mine), sorted(ports))


def leave_root(user: str) -> None:
    entry = pwd.getpwnam(user)
    os.setgroups([])
    os.setgid(entry.pw_gid)
    os.setuid(entry.pw_uid)


def attack_until_closed(targets: int, results: int, attacker: Attacker) -> None:
    """Attack what the pipe `targets` names last, and write what came of it to `results` once that is closed."""
    os.set_blocking(targets, False)
    buffer = b""
    while True:
        try:
            part = os.read(targets, 1 << 20)
            if not part:
                break
            *lines, buffer = (buffer + part).split(b"\n")
            if lines:
                pids, ports = json.loads(lines[-1])
                attacker.target = Target(pids, [(host, port) for host, port in ports])
        except BlockingIOError:
            attacker.attack()
            time.sleep(PAUSE)
    attacker.clean_up()
    os.write(results, json.dumps([[*key, count] for key, count in attacker.results.items()]).encode())


def start_attacker(user: str | None, make: Callable[[], Attacker]) -> tuple[int, int, int]:
    """Fork; gives the child's process id, the pipe that tells it what to attack, and the one with its results."""
    (targets_end, targets), (results, results_end) = os.pipe(), os.pipe()
    child = os.fork()
    if child:
        os.close(targets_end)
        os.close(results_end)
        return child, targets, results
    code = 1
    try:
        os.close(targets)
        os.close(results)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        if user is not None:
            leave_root(user)
        attack_until_closed(targets_end, results_end, make())
        code = 0
    except BaseException:
        import traceback

        traceback.print_exc()
    os._exit(code)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--user", default="nobody", help="user of the attacks, where this one is root")
    parser.add_argument("--pids", type=int, nargs="*", default=[], help="processes to attack, with their descendants")
    parser.add_argument("--launcher", action="store_true", help="attack mpiexec's port too, which may stop the job")
    parser.add_argument("--folders", type=Path, nargs="*", default=[], help="folders to attack")
    parser.add_argument("--seconds", type=float, default=600.0, help="the longest time")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("command", nargs=argparse.REMAINDER, help="-- and a command to start and attack")
    options = parser.parse_args()
    command = options.command[options.command[:1] == ["--"] :]
    if not (command or options.pids):
        parser.error("found neither --pids nor a command; give one of them")
    is_root = os.geteuid() == 0
    folders = [path.resolve() for path in options.folders]
    make = partial(Attacker, options.seed, folders, not is_root)
    child, targets, results = start_attacker(options.user if is_root else None, make)
    job = subprocess.Popen(command) if command else None
    roots = [*options.pids, *([job.pid] if job is not None else [])]
    give_up = time.monotonic() + options.seconds
    while time.monotonic() < give_up and (job is None or job.poll() is None):
        target = find_target(roots, options.launcher)
        if not target.pids:
            break
        os.write(targets, json.dumps(target).encode() + b"\n")
        time.sleep(TICK)
    os.close(targets)
    results_of_attacks = json.loads(Path(f"/dev/fd/{results}").read_bytes())
    os.waitpid(child, 0)
    for attack, result, count in sorted(results_of_attacks):
        print(f"{attack:<14} {count:>7} {result}")
    code = job.wait() if job is not None else 0
    return 1 if any(result == DONE for _, result, _ in results_of_attacks) else code


if __name__ == "__main__":
    sys.exit(main())
