"""The files that a task may change: the folders that it starts with stay as they are, and changes are in memory.

`Layers` leaves copying to the kernel: overlayfs in a user namespace (Linux 5.11), over a tmpfs (Linux 6.6). `Copies` is
for other kernels. Both have snapshots, which take room in the same tmpfs, and which a task cannot reach.

Names are relative to the working folder, the tmpfs of the sandbox's supervisor, which has a folder "removed".
Linux only, standard library only, as in process_tree.py.
"""

from __future__ import annotations

import itertools
import os
import stat
from collections.abc import Iterable

from hpcrl.sandbox.mounts import MS_BIND, MS_NODEV, MS_NOSUID, MS_REC, detach
from hpcrl.sandbox.process_tree import libc_call
from hpcrl.sandbox.untrusted_folder import made_below

MAX_LAYERS = 200  # the kernel takes 500, and 4,096 bytes of names


class Layers:
    """A stack of folders for each place of the view. Only the top one is written to; a snapshot puts a new one on it.

    start: for each place ("" is the root), the folder that it starts with.
    """

    def __init__(self, start: dict[str, str]) -> None:
        self._start = start
        self._marks: dict[int, list[int]] = {}  # of each snapshot, its layers
        self.num_marks = 0  # with those that were dropped
        self._below: list[int] = []
        self._top, self._num_layers = 0, 1
        self._make_top(0)

    def mount(self, place: str, view: str) -> None:
        """Mount the files of a place of the view. Raises OSError."""
        below = [_name(layer, place) for layer in reversed(self._below)]
        with made_below(view, place) as target:
            mount_layers([*below, self._start[place]], _name(self._top, place), target)

    def snapshot(self) -> None:
        """Keep the files as they are. What was mounted must be mounted anew. Raises OSError; then nothing changes."""
        if len(self._below) == MAX_LAYERS:
            raise OSError(f"more than {MAX_LAYERS} snapshots of one history; restore an earlier one")
        below = [*self._below, self._top]
        self._make_top(self._num_layers)
        self._marks[self.num_marks] = self._below = below
        self._top = self._num_layers
        self._num_layers += 1
        self.num_marks += 1

    def restore(self, mark: int) -> None:
        """Return to the files of a snapshot. What was mounted must be mounted anew."""
        for place in self._start:
            remove(_name(self._top, place))
        self._make_top(self._top)
        self._below = self._marks[mark]

    def drop(self, mark: int) -> None:
        """Forget a snapshot, and remove layers that no other one and no file of now needs."""
        dropped = self._marks.pop(mark)
        for layer in set(dropped).difference(self._below, *self._marks.values()):
            for place in self._start:
                remove(_name(layer, place))

    def _make_top(self, layer: int) -> None:
        for place in self._start:
            os.makedirs(_name(layer, place), exist_ok=True)


class Copies:
    """A folder with a copy of the files of all places; a snapshot is another copy."""

    def __init__(self, start: dict[str, str]) -> None:
        self.num_marks = 0
        for place, folder in start.items():
            copy(folder, f"now{place}")

    def mount(self, place: str, view: str) -> None:
        """Mount the files of a place of the view."""
        if not place:  # has the others in it
            libc_call("mount", b"now", view.encode(), None, MS_BIND | MS_REC, None)

    def snapshot(self) -> None:
        """Keep the files as they are. Raises OSError."""
        try:
            copy("now", f"mark{self.num_marks}")
        except OSError:
            remove(f"mark{self.num_marks}")
            raise
        self.num_marks += 1

    def restore(self, mark: int) -> None:
        """Return to the files of a snapshot. What was mounted must be mounted anew."""
        remove("now")
        copy(f"mark{mark}", "now")

    def drop(self, mark: int) -> None:
        """Forget a snapshot."""
        remove(f"mark{mark}")


def has_layers() -> bool:
    """Whether the kernel lets this user mount an overlayfs that can replace a folder of the one below."""
    for name in ("probe/below/folder", "probe/top", "probe/view"):
        os.makedirs(name)
    try:
        mount_layers(["probe/below"], "probe/top", "probe/view")
    except OSError:
        return False
    try:
        os.rmdir("probe/view/folder")
        os.mkdir("probe/view/folder")
        return True
    except OSError:
        return False
    finally:
        detach("probe/view")


def mount_layers(below: list[str], top: str, target: str) -> None:
    """Mount the files of the folders `below`, the uppermost first, with changes in the folder `top`."""
    os.makedirs(f"{top}.work", exist_ok=True)  # the kernel's
    options = f"lowerdir={':'.join(below)},upperdir={top},workdir={top}.work,userxattr,index=off".encode()
    libc_call("mount", b"overlay", target.encode(), b"overlay", MS_NOSUID | MS_NODEV, options)


def copy(source: str, target: str) -> None:
    """Copy a folder into one that may exist; sockets, pipes and devices are left out. Raises OSError."""
    import shutil  # takes longer than the rest of the supervisor

    def special(folder: str, names: Iterable[str]) -> list[str]:
        modes = ((name, os.lstat(os.path.join(folder, name)).st_mode) for name in names)
        return [name for name, mode in modes if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode) or stat.S_ISLNK(mode))]

    try:
        shutil.copytree(source, target, symlinks=True, ignore=special, dirs_exist_ok=True)
    except shutil.Error as error:
        raise OSError(str(error.args[0][0][2])) from None
    except RecursionError:
        raise OSError("its folders are nested too deeply") from None


def remove(folder: str) -> None:
    """Remove a folder with all that is in it, without following links. Folders in it may be nested to any depth."""
    waiting = [folder]
    while waiting:
        emptied = waiting.pop()
        for entry in list(os.scandir(emptied)):
            if entry.is_dir(follow_symlinks=False):
                waiting.append(f"removed/{next(_numbers)}")
                os.rename(entry.path, waiting[-1])
            else:
                os.unlink(entry.path)
        os.rmdir(emptied)


_numbers = itertools.count()


def _name(layer: int, place: str) -> str:
    return f"{layer}{place.replace('/', '.')}"
