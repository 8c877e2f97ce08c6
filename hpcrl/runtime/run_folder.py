"""The folder of a run: made for its user only, and an error where another user could redirect writes.

A job follows the names in its folder when it writes. So at the start:

* on the way to the folder, links are the user's or root's, and no folder lets every user rename what is in it;
* the folder is the user's, and only the user can write to it;
* what it holds is the user's or root's, and other users can write to no folder in it.

From then on, only the run's own job makes names there. Links that the user made are followed: `checkpoints ->
$SCRATCH/...` is a common habit. Folders above that a group can write to, or that another user owns, are common in
projects, and are a warning: if another folder is put in the place of the run's, `run_owner.check` ends the job.
"""

from __future__ import annotations

import errno
import functools
import grp
import os
import pwd
import stat
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from hpcrl.runtime.exits import InputError
from hpcrl.runtime.run_owner import say
from hpcrl.sandbox.foreign_files import printable

PRIVATE, GROUP_READABLE = 0o077, 0o027  # umasks of run.group_readable
MOST_LINKS = 40  # on the way to a folder, as in Linux
ROOT = 0
WRITABLE = stat.S_IWGRP | stat.S_IWOTH
NOTHING = "nothing was written"


def make_directory(path: Path, *, is_shared: bool) -> None:
    """Make a folder of a run, for its user only.

    Raises InputError, one line, if another user could redirect what a job writes there. Nothing is written then.

    Args:
        is_shared: run.group_readable; the user's group can read it too, with the files of an earlier attempt.
    """
    try:
        _check_place(path)
        missing = [folder for folder in path.parents if not folder.exists()]
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        _check_place(path)  # again: another user may have made it meanwhile
        _check_contents(path)
        if is_shared:
            open_to_group(path, missing)
    except OSError as error:
        raise cannot_make(path, error) from error


def check(path: Path) -> None:
    """Raise InputError where `make_directory` does. Writes nothing."""
    try:
        _check_place(path)
        if path.is_dir():
            _check_contents(path)
    except OSError as error:
        raise cannot_make(path, error) from error


def open_to_group(path: Path, made: Sequence[Path] = ()) -> None:
    """Let the user's group read a run's folder, with the files of an earlier attempt, and enter the folders `made`."""
    if path.stat().st_mode & 0o050 != 0o050:
        for one in (*made, *path.rglob("*"), path):  # the folder last, so that a start that is killed is repeated
            if not one.is_symlink():
                one.chmod(one.stat().st_mode | (0o050 if one.is_dir() else 0o040))


def close_to_others(folder: Path, *, is_shared: bool) -> None:
    """Take the permissions of a run's files from what was copied into its folder."""
    for one in (folder, *folder.rglob("*")):
        if not one.is_symlink():
            one.chmod(one.stat().st_mode & ~(GROUP_READABLE if is_shared else PRIVATE))


def cannot_make(path: Path, error: OSError) -> InputError:
    return InputError(f"cannot make the run directory {path}: {error.strerror}; change run.dir or run.name")


def _check_place(path: Path) -> None:
    """Check the way to a run's folder, and the folder, as far as they exist."""
    for place, found, is_end in _way(path):
        if is_end and stat.S_ISDIR(found.st_mode):
            _check_folder(path, found)
        else:
            _check_step(path, place, found)


def _way(path: Path) -> Iterator[tuple[Path, os.stat_result, bool]]:
    """The folders and links that the system passes on its way to `path`, as far as they exist, each with its lstat and
    whether it is the end."""
    here, rest, num_links = Path("/"), list(path.parts[1:]), 0
    yield here, os.lstat(here), not rest
    while rest:
        place = here / rest.pop(0)
        try:
            stats = os.lstat(place)
        except (FileNotFoundError, NotADirectoryError):
            return
        is_link = stat.S_ISLNK(stats.st_mode)
        yield place, stats, not rest and not is_link
        if not is_link:
            here = Path(os.path.normpath(place)) if place.name == ".." else place  # `here` has no links
            continue
        if (num_links := num_links + 1) > MOST_LINKS:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
        target = Path(os.readlink(place))
        here, parts = (Path("/"), target.parts[1:]) if target.is_absolute() else (here, target.parts)
        rest = [*parts, *rest]


def _check_folder(path: Path, found: os.stat_result) -> None:
    why = "others could redirect what a job writes there"
    if found.st_uid != os.geteuid():
        raise InputError(
            f"the run directory {_described(path, found)}, not by {_user(os.geteuid())}: {why}; {NOTHING}; choose "
            "another run.name or run.dir"
        )
    if found.st_mode & WRITABLE:
        raise InputError(
            f"the run directory {_described(path, found)} and can be written to by other users: {why}; {NOTHING}; look "
            f"at what is in it, then chmod go-w {path}, or choose another run.name or run.dir"
        )


def _check_step(path: Path, place: Path, stats: os.stat_result) -> None:
    """Check a folder above a run's, or a link on the way to it. A user who can rename what is in a folder above can put
    something else in the place of the run's."""
    is_foreign = stats.st_uid not in (os.geteuid(), *_system_users())
    if stat.S_ISLNK(stats.st_mode):
        if is_foreign:
            raise InputError(
                f"{_described(place, stats)}: its owner chooses where {path} is; {NOTHING}; choose another run.name or "
                "run.dir"
            )
        return
    is_sticky = stats.st_mode & stat.S_ISVTX
    if stats.st_mode & stat.S_IWOTH and not is_sticky:
        raise InputError(
            f"{_described(place, stats)}: every user can put something else in the place of {path}; {NOTHING}; "
            f"chmod +t {place}, or choose another run.dir"
        )
    if is_foreign or (stats.st_mode & stat.S_IWGRP and not is_sticky and not _is_own_group(stats.st_gid)):
        group = "its owner" if is_foreign else f"the group {_group(stats.st_gid)}"
        _warn(f"{_described(place, stats)}: {group} could put something else in the place of what is below it")


def _check_contents(folder: Path) -> None:
    """Check all that the folder holds, without following links, and where the links in the folder itself lead."""
    reachable = folder.stat().st_mode << 1 & WRITABLE  # who may not enter the run's folder cannot write below it
    folders = [str(folder)]
    while folders:
        here = folders.pop()
        # a job that runs removes some meanwhile; what the user cannot list has been closed by the user
        with suppress(FileNotFoundError, PermissionError), os.scandir(here) as entries:
            for entry in entries:
                with suppress(FileNotFoundError):
                    stats = entry.stat(follow_symlinks=False)
                    is_folder = stat.S_ISDIR(stats.st_mode)
                    is_foreign = stats.st_uid not in (os.geteuid(), ROOT)
                    if is_foreign or (is_folder and stats.st_mode & reachable):
                        raise InputError(
                            f"in the run directory {folder}, {_described(Path(entry.path), stats)}, and others could "
                            f"redirect what a job writes; {NOTHING}; look at it, then remove it or "
                            f"chmod -R go-w {folder}, or choose another run.name"
                        )
                    if is_folder:
                        folders.append(entry.path)
                    elif stat.S_ISLNK(stats.st_mode) and here == str(folder):
                        for place, step, _ in _way(Path(entry.path)):
                            _check_step(Path(entry.path), place, step)


@functools.cache
def _system_users() -> tuple[int, ...]:
    """Root. In a user namespace that maps some users only, as in most containers on clusters, also the number by which
    the kernel shows all others, root among them."""
    mapped = sum(int(line.split()[2]) for line in Path("/proc/self/uid_map").read_text().splitlines())
    is_partial = mapped < 2**32 - 1
    return (ROOT, int(Path("/proc/sys/kernel/overflowuid").read_text())) if is_partial else (ROOT,)


@functools.cache  # once for each
def _warn(line: str) -> None:
    say(f"warning: {line}")


def _described(place: Path, found: os.stat_result) -> str:
    kind = "the link " if stat.S_ISLNK(found.st_mode) else ""
    name = printable(str(place), one_line=True)
    return f"{kind}{name} is owned by {_user(found.st_uid)} (mode {stat.filemode(found.st_mode)})"


def _user(number: int) -> str:
    try:
        return printable(pwd.getpwuid(number).pw_name)
    except KeyError:
        return f"user {number}"


def _group(number: int) -> str:
    try:
        return printable(grp.getgrgid(number).gr_name)
    except KeyError:
        return str(number)


def _is_own_group(number: int) -> bool:
    """Whether a group is the one that many systems give to each user, named as the user and without other members."""
    try:
        group, user = grp.getgrgid(number), pwd.getpwuid(os.geteuid())
    except KeyError:
        return False
    return group.gr_name == user.pw_name and not set(group.gr_mem) - {user.pw_name}
