"""The files of a task's sandbox: what its commands see, in a tmpfs and a mount namespace of its supervisor's own.

Linux only, standard library only, as in process_tree.py.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

from hpcrl.sandbox import isolation, mounts, process_tree
from hpcrl.sandbox.writable_files import Copies, Layers, has_layers, remove

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

    folder: what is in /workspace at first. image: a folder with the root, or a squashfs file with it; "": the system's
    programs, `shown`, which are read-only. squashfuse: a program. layers: False to copy even where the kernel has them.
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
