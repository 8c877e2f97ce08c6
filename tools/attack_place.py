"""Where attacks of `attack.py` are made: a folder with a private file, and commands of hpcrl that must not reach it."""

from __future__ import annotations

import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import checkout

MOST_SECONDS, MOST_MB = 60, 3000  # of a command on hostile input
TERMINAL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")  # what a terminal acts on


class Reached(Exception):
    """What an attack has read, written, run or broken."""


class NotPossible(Exception):
    """Why an attack cannot be made here."""


class Attack(NamedTuple):
    kind: str
    name: str
    against: str
    is_fast: bool
    make: Callable[[Place], None]


ATTACKS: list[Attack] = []


def attack(kind: str, name: str, against: str, *, is_fast: bool = False) -> Callable[..., Callable[[Place], None]]:
    def add(make: Callable[[Place], None]) -> Callable[[Place], None]:
        ATTACKS.append(Attack(kind, name, against, is_fast, make))
        return make

    return add


class Place:
    """private: a folder of the user's, with `secret` in its file key. theirs: of the attacker. out: what commands make.
    marker: a file that hostile code makes.
    """

    def __init__(self, root: Path, user: str) -> None:
        self.root, self.user, self.secret = root, user, secrets.token_hex(16)
        self.private, self.theirs, self.out = (root / name for name in ("private", "theirs", "out"))
        self.marker, self.key = root / "marker", self.private / "key"
        self.home = root / "home"
        for folder in (self.private, self.theirs, self.out, self.home):
            folder.mkdir(mode=0o700)
        self.key.write_text(self.secret)
        self.last = ""  # command
        self.code = f"import pathlib; pathlib.Path({str(self.marker)!r}).touch()\n"

    def hpcrl(self, *arguments: str | Path, **options: object) -> str:
        """Run a command of hpcrl; its output. Raises Reached."""
        return self.python("-m", "hpcrl", *arguments, **options)  # type: ignore[arg-type]

    def python(
        self, *arguments: str | Path, codes: tuple[int, ...] = (0, 2), cwd: Path | None = None, lines: int = 4
    ) -> str:
        """Run Python, with "y" as the answer to each question.

        Args:
            codes: exit codes of a command that handles its input.
            lines: those of its stderr, where it ends with 2.
        """
        environment = {
            **{name: os.environ[name] for name in ("PATH", "LD_LIBRARY_PATH", "LANG") if name in os.environ},
            "HOME": str(self.home),
            "TMPDIR": str(self.root),
            "HPCRL_ATTACK_SECRET": self.secret,
            "PYTHONPATH": str(checkout.ROOT),
            "OMP_NUM_THREADS": "1",
        }
        (self.root / "given").write_text("y\n" * 100)
        output = self.root / "output"
        before = sorted(self.private.rglob("*"))
        with open(self.root / "given") as given, open(output, "wb") as said, open(self.root / "errors", "wb") as errors:
            child = subprocess.Popen(
                [sys.executable, *map(str, arguments)], stdin=given, stdout=said, stderr=errors, env=environment,
                cwd=cwd or self.out, start_new_session=True,
            )  # fmt: skip
        usage = _wait(child, " ".join(map(str, arguments))[:60])
        printed, error = output.read_text(errors="replace"), (self.root / "errors").read_text(errors="replace")
        self.last = " ".join(map(str, arguments))
        self.check(printed + error)
        if sorted(self.private.rglob("*")) != before or self.key.read_text() != self.secret:
            raise Reached("it wrote to a private folder")
        if usage > MOST_MB:
            raise Reached(f"it took {usage:.0f} MB")
        if "Traceback" in error or child.returncode not in codes:
            raise Reached(f"exit code {child.returncode}: {' '.join(error.split())[-300:]}")
        if child.returncode == 2 and len(error.splitlines()) > lines:
            raise Reached(f"{len(error.splitlines())} lines of errors: {error[:100]}")
        return printed + error

    def check(self, text: str) -> None:
        """Raise Reached if hostile code ran, or private text or controls of a terminal are in `text` or a new file."""
        if self.marker.exists():
            raise Reached("hostile code ran")
        if self.secret in text:
            raise Reached("private text was printed")
        if found := TERMINAL.search(text.replace("\r\n", "\n")):
            start = max(found.start() - 60, 0)
            raise Reached(f"{found[0]!r} was printed: {text[start : start + 120]!r}")
        for path in self.out.rglob("*"):
            if path.is_file() and self.secret.encode() in path.read_bytes():
                raise Reached(f"private text was written to {path.name}")

    def link(self, path: Path) -> None:
        path.unlink(missing_ok=True)
        path.symlink_to(self.key)

    def as_other_user(self, act: Callable[[], None]) -> None:
        """Run `act` as the second user, in a child."""
        if os.geteuid() != 0:
            raise NotPossible("needs root to become another user")
        import pwd

        entry, child = pwd.getpwnam(self.user), os.fork()
        if child == 0:
            code = 1
            try:
                os.setgroups([])
                os.setgid(entry.pw_gid)
                os.setuid(entry.pw_uid)
                os.umask(0)
                act()
                code = 0
            finally:
                os._exit(code)
        if os.waitpid(child, 0)[1]:
            raise NotPossible(f"{self.user} could not make it")

    def open_to_others(self) -> Path:
        """A folder where all users can make files, as /tmp."""
        folder = self.root / "shared"
        folder.mkdir()
        folder.chmod(0o1777)
        self.root.chmod(0o711)
        return folder

    def remove(self) -> None:
        shutil.rmtree(self.root, ignore_errors=True)


def _wait(child: subprocess.Popen[bytes], what: str) -> float:
    """The largest memory of a child in MB. Raises Reached if it does not end."""
    end = time.monotonic() + MOST_SECONDS
    while True:
        pid, status, usage = os.wait4(child.pid, os.WNOHANG)
        if pid:
            child.returncode = os.waitstatus_to_exitcode(status)
            return usage.ru_maxrss / 1024
        if time.monotonic() > end:
            os.killpg(child.pid, signal.SIGKILL)
            os.wait4(child.pid, 0)
            child.returncode = -signal.SIGKILL
            raise Reached(f"no end after {MOST_SECONDS} s: {what}")
        time.sleep(0.02)
