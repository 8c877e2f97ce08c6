"""The files of a task's sandbox: what its commands see, in a tmpfs and a mount namespace of its supervisor's own.

The folders that a task starts with stay as they are, and changes are in memory. `Layers` leaves copying to the kernel:
overlayfs in a user namespace (Linux 5.11), over a tmpfs (Linux 6.6). `Copies` is for other kernels. Both have
snapshots, which take room in the same tmpfs, and which a task cannot reach. Their names are relative to the working
folder, the tmpfs, which has a folder "removed".

Linux only, standard library only, as in process_tree.py.
"""

from __future__ import annotations

import itertools
import os
import stat
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from hpcrl.sandbox import isolation, mounts, process_tree
from hpcrl.sandbox.process_tree import libc_call

TMPFS = isolation.ROOT
VIEW = f"{TMPFS}/view"
WORKSPACE = "/workspace"
DEVICES = ("/dev/null", "/dev/random", "/dev/urandom")  # not /dev/zero: mapped, it is memory that no process shows
DEVICE_LINKS = {"fd": "/proc/self/fd", "stdin": "fd/0", "stdout": "fd/1", "stderr": "fd/2"}
OWNED = "copy the folder, or make the squashfs with mksquashfs -force-uid 1000 -force-gid 1000"
FILES_OF_LAYER = 16  # at most
BYTES_PER_FILE = 1024  # of the kernel's memory
SECONDS_TO_MOUNT = 30.0


class Files:
    """The task's view of files: below `VIEW` in this mount namespace, and the root of its commands.

    Args:
        folder: what is in /workspace at first.
        image: a folder with the root, or a squashfs file with it; "": the system's programs, `shown`, which are
            read-only.
        squashfuse: path of the program squashfuse.
        layers: False to copy even where the kernel has them.
    """

    def __init__(
        self, folder: str, image: str, squashfuse: str, shown: list[str], layers: bool, disk_mb: int, num_files: int
    ) -> None:
        mounts.unshare()
        given = {name: os.open(path, os.O_PATH) for name, path in (("folder", folder), ("image", image)) if path}
        devices = {name: os.open(name, os.O_PATH) for name in DEVICES}
        sources = {place: os.open(place, os.O_PATH) for place in shown}  # all before a mount covers `TMPFS`
        mounts.mount_memory(TMPFS, disk_mb, num_files)
        os.chdir(TMPFS)
        for name in ("image", "folder", "view", "dev", "dev/shm", "shm", "removed"):
            os.mkdir(name)
        os.chmod("shm", 0o1777)
        if os.path.isfile(f"/proc/self/fd/{given.get('image')}"):
            mount_squashfs(squashfuse, given.pop("image"), f"{TMPFS}/image")
        mounts.show({f"/{name}": source for name, source in given.items()}, TMPFS)
        if image and os.stat("image").st_uid != isolation.INSIDE_UID:
            raise OSError("its files would belong to another user, and could not be changed: " + OWNED)
        for name, source in devices.items():
            mounts.bind_mount(f"/proc/self/fd/{source}", TMPFS, name)
        for name, target in DEVICE_LINKS.items():
            os.symlink(target, f"dev/{name}")
        self._shown = sources | {"/dev": os.open("dev", os.O_PATH)}
        start = {"": "image"} | ({WORKSPACE: "folder"} if folder else {})
        if layers and has_layers():
            self.written: Layers | Copies = Layers(start)
        elif image:
            raise OSError("the kernel has no overlayfs for users over a tmpfs (Linux 6.6), which an image needs")
        else:
            self.written = Copies(start)
        self._places = list(start)
        self._num_files = num_files
        self.mount()

    def mount(self) -> None:
        """Mount the view. Raises OSError, also if there is a link in the place of a folder."""
        root, *others = self._places
        self.written.mount(root, VIEW)
        mounts.show(self._shown, VIEW)
        mounts.bind_mount(f"{TMPFS}/shm", VIEW, "/dev/shm")
        for place in others:
            self.written.mount(place, VIEW)

    def snapshot(self) -> int:
        with self._mounted_anew():
            self.written.snapshot()
        return self.written.num_marks - 1

    def restore(self, mark: int) -> None:
        with self._mounted_anew():
            self.written.restore(mark)

    @contextmanager
    def _mounted_anew(self) -> Iterator[None]:
        mounts.detach(VIEW)
        self._num_files += FILES_OF_LAYER  # a task that has used up its own can have snapshots, and return to one
        mounts.allow_files(TMPFS, self._num_files)
        try:
            yield
        finally:
            try:
                self.mount()
            except OSError:
                os._exit(1)  # no command must run in a part of the view

    def clear_shared_memory(self) -> None:
        """Remove the files in /dev/shm, as a machine that starts."""
        for entry in os.scandir("shm"):
            remove(entry.path) if entry.is_dir(follow_symlinks=False) else os.unlink(entry.path)


def mount_squashfs(squashfuse: str, image: int, target: str) -> None:
    """Mount a squashfs file. The process that serves it ends with this one. Raises OSError."""
    supervisor, before = os.getpid(), os.stat(target).st_dev
    server = os.fork()
    if server == 0:
        try:
            process_tree.signal_on_parent_death(supervisor)
            os.set_inheritable(image, True)
            isolation.keep_only_mounting()
            os.dup2(2, 1)  # the supervisor's replies
            os.execv(squashfuse, [squashfuse, "-f", f"/proc/self/fd/{image}", target])
        finally:
            os._exit(1)
    give_up = time.monotonic() + SECONDS_TO_MOUNT
    while os.stat(target).st_dev == before:
        if os.waitpid(server, os.WNOHANG)[0] or time.monotonic() > give_up:
            raise OSError("squashfuse does not mount the image: not a squashfs file, or no /dev/fuse for this user")
        time.sleep(0.01)


def memory_in_files() -> int:
    """Bytes that the files in the tmpfs take."""
    usage = os.statvfs(TMPFS)
    return (usage.f_blocks - usage.f_bfree) * usage.f_frsize + (usage.f_files - usage.f_ffree) * BYTES_PER_FILE


MAX_LAYERS = 200  # the kernel takes 500, and 4,096 bytes of names


class Layers:
    """A stack of folders for each place of the view. Only the top one is written to; a snapshot puts a new one on it.

    Args:
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
        with mounts.created_below(view, place) as target:
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
            libc_call("mount", b"now", view.encode(), None, mounts.MS_BIND | mounts.MS_REC, None)

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
        mounts.detach("probe/view")


def mount_layers(below: list[str], top: str, target: str) -> None:
    """Mount the files of the folders `below`, the uppermost first, with changes in the folder `top`."""
    os.makedirs(f"{top}.work", exist_ok=True)  # the kernel's
    options = f"lowerdir={':'.join(below)},upperdir={top},workdir={top}.work,userxattr,index=off".encode()
    libc_call("mount", b"overlay", target.encode(), b"overlay", mounts.MS_NOSUID | mounts.MS_NODEV, options)


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
