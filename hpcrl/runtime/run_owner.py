"""The owner of a run's folder: the one job that may write there. Taking a folder, and losing it.

`<run>/owner/00000007.json` is the record of the folder's seventh owner. The highest number is the owner. Numbers only
rise, and the highest is never removed: a start takes the folder by linking the next number, which succeeds for one of
several starts, on NFS and Lustre too. An owner that ends as planned marks its record as released. No lock is used, no
modification time, and no clock of another host.

A start may take a folder whose owner has released it or has ended, in the order of `runs`: by its process if it was on
this host, by Slurm, and otherwise by a counter in its record, which the owner's thread increments at each heartbeat: an
owner whose counter does not change during three heartbeats, while the start looks, has ended.

So an owner that was stopped or cut off for three heartbeats may lose its folder while it runs. All ranks of a job call
`check` before they write there, and a thread of each rank does at each heartbeat. A job that has lost its folder ends
with one line and writes nothing more; so does a job whose folder was replaced by another user. Two things remain: a
write that was checked just before the folder was taken, and log lines and heartbeats of other ranks until their threads
check.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import NamedTuple, NoReturn

from hpcrl.runtime.launcher import SQUEUE_TIMEOUT, node_name
from hpcrl.sandbox import foreign_files, fork_server
from hpcrl.sandbox.process_tree import boot_id, pid_namespace, process_runs, started_at

FOLDER = "owner"  # below the run directory
HEARTBEATS_TO_TAKE = 3.0  # without a change of the counter: the owner has ended
HEARTBEATS_TO_SHOW = 1.5  # the same where nothing depends on it
LOOKS = 10  # at the counter for each heartbeat
DEFAULT_SECONDS = 10.0  # of a heartbeat, if the record is damaged
MOST_SECONDS = 3600.0
BLOCK = 2048  # bytes of a record, which is overwritten in one call
LONGEST = 96  # characters of a text in it
LAST_STEP = 0xFFFFFFF0  # higher numbers are batch scripts and shells of Slurm, which squeue does not list as steps
LOST = 2  # exit code: BAD_INPUT of hpcrl.runtime.exits
SECONDS_TO_REPORT = 1.0  # launchers drop output that is still in their pipes when the first rank exits
_NAME = re.compile(r"(\d{8,})\.json")


class OwnedError(Exception):
    """Another job owns the run's folder, and runs."""

    user_error = True


@dataclass(frozen=True)
class Owner:
    """The record of an owner; its rank 0.

    boot, pid_namespace: of the kernel, where `pid` means something. started: when the process did, in clock ticks since
    the boot, because a process id is used again. step, restart: of the Slurm job. since: for people. start: HPCRL_START
    of the batch script.
    """

    command: str
    host: str
    boot: str
    pid_namespace: str
    pid: int
    started: int
    cluster: str
    job: str
    step: str
    restart: int
    start: str
    since: str
    heartbeat_seconds: float
    beats: int = 0
    released: bool = False

    @classmethod
    def here(cls, heartbeat_seconds: float = DEFAULT_SECONDS, environ: Mapping[str, str] = os.environ) -> Owner:
        """The record of this process."""
        step = environ.get("SLURM_STEP_ID", "")
        is_listed = step.isdigit() and int(step) < LAST_STEP
        return cls(
            command=f"hpcrl {sys.argv[1]}"[:LONGEST] if len(sys.argv) > 1 else "hpcrl",
            host=node_name(),
            boot=boot_id(),
            pid_namespace=pid_namespace(),
            pid=os.getpid(),
            started=started_at(os.getpid()) or 0,
            cluster=environ.get("SLURM_CLUSTER_NAME", ""),
            job=environ.get("SLURM_JOB_ID", ""),
            step=step if is_listed else "",
            restart=int(environ.get("SLURM_RESTART_COUNT") or 0),
            start=environ.get("HPCRL_START", "")[:LONGEST],
            since=time.strftime("%F %T"),
            heartbeat_seconds=float(heartbeat_seconds),
        )

    @classmethod
    def from_bytes(cls, block: bytes) -> Owner | None:
        """None for a damaged record."""
        try:
            found = foreign_files.parse_json(block)
            owner = cls(**{field.name: found[field.name] for field in fields(cls)})
        except (ValueError, KeyError, TypeError):
            return None
        pairs = [(value, getattr(_EXAMPLE, name)) for name, value in vars(owner).items()]
        is_valid = all(type(value) is type(example) and str(value).isprintable() for value, example in pairs)
        return owner if is_valid and 0 < owner.heartbeat_seconds <= MOST_SECONDS else None

    def to_bytes(self) -> bytes:
        return json.dumps(asdict(self), indent=1).encode().ljust(BLOCK - 1) + b"\n"

    def __str__(self) -> str:
        slurm = f", Slurm job {self.job}" if self.job else ""
        slurm += f" step {self.step}" if self.step else ""
        return f"{self.command} on {self.host}, pid {self.pid}{slurm}, since {self.since}"


_EXAMPLE = Owner("", "", "", "", 0, 0, "", "", "", 0, "", "", 0.0)


class Found(NamedTuple):
    """What a folder's highest record holds. block: its bytes, which change at each heartbeat."""

    number: int
    block: bytes

    @property
    def owner(self) -> Owner | None:
        return Owner.from_bytes(self.block)

    @property
    def heartbeat_seconds(self) -> float:
        return self.owner.heartbeat_seconds if self.owner is not None else DEFAULT_SECONDS

    def __str__(self) -> str:
        return str(self.owner or "a job whose record is damaged")


def runs(
    owner: Owner,
    here: Owner,
    process_runs: Callable[[int, int], bool | None],
    slurm_ended: Callable[[Owner], bool],
) -> bool | None:
    """Whether an owner still runs, as far as it can be known at once; None: its counter has to be watched.

    process_runs(pid, started), slurm_ended(owner): what this host and Slurm answer. A process that is stopped runs.
    """
    if owner.released:
        return False
    if owner.boot and (owner.host, owner.boot, owner.pid_namespace) == (here.host, here.boot, here.pid_namespace):
        return process_runs(owner.pid, owner.started)
    if owner.job and (owner.cluster, owner.job) == (here.cluster, here.job) and owner.restart < here.restart:
        return False  # requeued
    return False if owner.job and slurm_ended(owner) else None


def newest(folder: Path) -> Found | None:
    """The highest record of a run's folder; None if it has never had an owner."""
    while True:
        numbers = _numbers(folder)
        if not numbers:
            return None
        with suppress(FileNotFoundError):  # a later owner has removed it meanwhile
            with foreign_files.open_file(_path(folder, max(numbers)), folder) as file:
                return Found(max(numbers), file.read(4 * BLOCK))


def watch(records: Mapping[Path, Found], heartbeats: float) -> set[Path]:
    """Those of these folders whose highest record changes within so many heartbeats of its owner.

    Only the pauses between two looks count: a file system that does not answer stops the owner's counter, too.
    """
    seconds_left = {folder: heartbeats * record.heartbeat_seconds for folder, record in records.items()}
    changed: set[Path] = set()
    while seconds_left:
        pause = min(records[folder].heartbeat_seconds for folder in seconds_left) / LOOKS
        time.sleep(pause)
        seconds_left = {folder: seconds - pause for folder, seconds in seconds_left.items()}
        changed |= {folder for folder in seconds_left if newest(folder) != records[folder]}
        # The last look comes one pause early: looks take time as well, and nothing waits for more than `heartbeats`.
        seconds_left = {folder: s for folder, s in seconds_left.items() if folder not in changed and s > 1.5 * pause}
    return changed


def live_owners(folders: Iterable[Path]) -> dict[Path, Found]:
    """The owners, of those of these folders that have one which runs. Watches counters at most 1.5 heartbeats."""
    here, owners, unknown = Owner.here(), dict[Path, Found](), dict[Path, Found]()
    for folder in folders:
        with suppress(OSError):  # of another user
            record = newest(folder)
            state = _runs(record, here)
            if record is not None and state is not False:
                (unknown if state is None else owners)[folder] = record
    with suppress(OSError):
        moved = watch(unknown, HEARTBEATS_TO_SHOW)
        owners |= {folder: record for folder, record in unknown.items() if folder in moved}
    return owners


def take(folder: Path, heartbeat_seconds: float) -> int:
    """Make this process the owner of a run's folder, on rank 0, and return its number.

    Waits at most three heartbeats of the owner before. Raises OwnedError if that one runs, or if another start is
    faster; writes nothing then. Raises OSError if the folder cannot be written.
    """
    global _waited
    here = Owner.here(heartbeat_seconds)
    (folder / FOLDER).mkdir(exist_ok=True)
    has_watched = False
    while True:
        owner = newest(folder)
        state = _runs(owner, here)
        if state is None and not has_watched:
            assert owner is not None
            has_watched, began = True, time.monotonic()
            most = HEARTBEATS_TO_TAKE * owner.heartbeat_seconds
            say(f"{folder} was not released by {owner}; watching its heartbeat for {most:g} s at most")
            has_changed = bool(watch({folder: owner}, HEARTBEATS_TO_TAKE))
            _waited += time.monotonic() - began
            if has_changed:
                continue  # an owner that is new, or whose counter has changed, runs, unless more is known of it
            state = False
        if state is not False:
            assert owner is not None
            raise OwnedError(in_use(folder, owner))
        number = owner.number + 1 if owner is not None else 1
        if _link(folder, number, here):
            hold(folder, number, heartbeat_seconds, 0, here)
            return number


def hold(folder: Path, number: int, heartbeat_seconds: float, rank: int, record: Owner | None = None) -> None:
    """Have this rank check its job's ownership from now on.

    Args:
        record: on rank 0, the record of the owner, whose counter it writes.
    """
    global _held
    _held = Held(folder, number, heartbeat_seconds, rank, record)
    threading.Thread(target=_held.run, name="owner", daemon=True).start()


def check() -> None:
    """End this job with one line if another one has taken its run's folder. Call it before a write to the folder.

    Costs a listing of <run>/owner. Does nothing in a process that is no rank of a job.
    """
    if (held := _held) is not None:
        held.check()


def number() -> int | None:
    """Number of this rank's job among the owners of its folder."""
    return _held.number if _held is not None else None


def let_go() -> Callable[[], None]:
    """Stop checking. Call it on all ranks of a job that ends as planned and has written everything; call what it
    returns once all of them have, to release the folder."""
    global _held
    held, _held = _held, None
    return held.release if held is not None else lambda: None


def seconds_waited() -> float:
    """Seconds that `take` has watched counters in this process."""
    return _waited


def in_use(folder: Path, found: Found) -> str:
    """The line about a folder whose owner runs."""
    owner = found.owner
    command = "" if owner is None else f" (scancel {owner.job})" if owner.job else f" (kill {owner.pid})"
    return f"{folder} is in use by {found}; end that job first{command}, or choose another run.name"


def is_lost(folder: Path, number: int) -> bool:
    """Whether the owner with this number has lost the folder."""
    try:
        return is_replaced(folder) or max(_numbers(folder), default=0) != number
    except OSError:
        return False  # the file system does not answer, and neither will it take a write


def is_replaced(folder: Path) -> bool:
    """Whether another user's folder or link is in the place of the run's folder, which was this user's at the start."""
    with suppress(FileNotFoundError):
        return os.lstat(folder).st_uid != os.geteuid() or os.stat(folder).st_uid != os.geteuid()
    return False


class Held:
    """A rank's view of its job's ownership."""

    def __init__(self, folder: Path, number: int, seconds: float, rank: int, record: Owner | None) -> None:
        self._folder, self.number, self._seconds, self._rank = folder, number, seconds, rank
        self._record = record
        self._writing, self._ending = threading.Lock(), threading.Lock()

    def run(self) -> None:
        while _held is self:
            time.sleep(self._seconds)
            if _held is self:
                self.check()
                self._update(1)

    def check(self) -> None:
        if is_lost(self._folder, self.number):
            self._end()

    def release(self) -> None:
        self._update(1, released=True)

    def _update(self, beats: int, released: bool = False) -> None:
        """Overwrite the record in place and close it: other nodes of a network file system see a file once it is
        closed. It may have been removed; it is not made again."""
        with self._writing:
            if self._record is None or self._record.released:
                return
            self._record = replace(self._record, beats=self._record.beats + beats, released=released)
            with suppress(OSError):  # the file system is full or does not answer; the next heartbeat tries again
                handle = os.open(_path(self._folder, self.number), os.O_WRONLY)
                try:
                    os.pwrite(handle, self._record.to_bytes(), 0)
                finally:
                    os.close(handle)

    def _end(self) -> NoReturn:
        """End this process, from whichever thread, without MPI and without a write; the launcher ends the others."""
        with self._ending:  # never left: a second thread waits here
            if self._rank:
                time.sleep(2 * SECONDS_TO_REPORT)  # rank 0 says it, unless it is stopped
            by = f"has no {FOLDER}/ any more"
            with suppress(OSError):
                if is_replaced(self._folder):
                    by = "was replaced by another user"
                elif successor := newest(self._folder):
                    by = f"is now owned by {successor}"
            say(f"error: {self._folder} {by}; this job has lost it and ends without writing there")
            time.sleep(SECONDS_TO_REPORT)
            fork_server.remove_files()
            os._exit(LOST)


_held: Held | None = None
_waited = 0.0


def say(line: str) -> None:
    """Print a line on stderr, from whichever thread."""
    with suppress(OSError):
        os.write(2, f"hpcrl: {line}\n".encode(errors="replace"))


def _runs(found: Found | None, here: Owner) -> bool | None:
    if found is None:
        return False
    return runs(found.owner, here, process_runs, slurm_ended) if found.owner is not None else None


def _numbers(folder: Path) -> list[int]:
    """Numbers of all records. Listing a folder asks the server of a network file system, unlike a look for a name."""
    try:
        names = os.listdir(folder / FOLDER)
    except FileNotFoundError:
        return []
    return [int(found[1]) for name in names if (found := _NAME.fullmatch(name))]


def _path(folder: Path, number: int) -> Path:
    return folder / FOLDER / f"{number:08d}.json"


def _link(folder: Path, number: int, record: Owner) -> bool:
    """Make the record with this number, with its content from the beginning. Returns whether it is the highest one."""
    path = _path(folder, number)
    draft = path.with_name(f".{secrets.token_hex(8)}")
    try:
        with open(draft, "xb") as file:
            file.write(record.to_bytes())
            file.flush()
            os.fsync(file.fileno())
        try:
            os.link(draft, path)  # unlike rename, link fails if the name exists
        except FileExistsError:
            # The answer to a link that succeeded may be lost, and the client's second try finds the name.
            if not os.path.samefile(draft, path):
                return False
    finally:
        draft.unlink(missing_ok=True)
    numbers = _numbers(folder)
    if max(numbers) != number:  # it had been removed by a later owner before this start linked it again
        path.unlink(missing_ok=True)
        return False
    for lower in numbers:
        if lower < number:
            with suppress(OSError):
                _path(folder, lower).unlink()
    return True


def slurm_ended(owner: Owner) -> bool:
    """Whether Slurm answers that the owner's step, or its job where the step is not known, has ended."""
    if owner.cluster != _cluster():
        return False  # its jobs are not known here
    which = f"--steps={owner.job}.{owner.step}" if owner.step else f"--jobs={owner.job}"
    try:
        answer = _ask("squeue", "--noheader", which, "--format=%i")
    except (OSError, subprocess.TimeoutExpired):
        return False
    if answer.returncode:
        return "Invalid job id" in answer.stderr  # it ended long ago and is forgotten
    return not answer.stdout.strip()


@cache
def _cluster() -> str:
    """Name of the Slurm cluster here; "" if it is not known."""
    if "SLURM_CLUSTER_NAME" in os.environ:
        return os.environ["SLURM_CLUSTER_NAME"]
    try:
        text = _ask("scontrol", "show", "config").stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""
    found = re.search(r"^ClusterName\s*=\s*(\S+)", text, re.MULTILINE)
    return found[1] if found else ""


def _ask(*command: str) -> subprocess.CompletedProcess[str]:
    # MPI has started. Python starts a program by vfork, which copies no page.
    return subprocess.run(command, capture_output=True, text=True, timeout=SQUEUE_TIMEOUT)
