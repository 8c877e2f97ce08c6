"""Files and text of others: run folders, checkpoints, model directories, configs; text of models and users.

A file is opened only if it is a regular file inside the folder that the user named: a link in a copied folder could
lead to a private file, and a pipe would block for ever. What is read whole is bounded in size, and what expands (JSON,
YAML with aliases) is bounded before anything else handles it. A file may grow while it is read.

Text is made safe for files and terminals. It may hold surrogates without the other half, which no encoding has: JSON
can write them, and the name of a file whose bytes are not UTF-8 has them.
"""

from __future__ import annotations

import errno
import json
import os
import re
import stat
import sys
import unicodedata
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import TextIOWrapper
from pathlib import Path
from typing import Any, BinaryIO

MOST_TEXT = 1 << 26  # bytes of a file that is read whole
MOST_CONFIG = 1 << 20  # bytes of a YAML file; its parser takes a second for each 100 KB
MOST_DEPTH = 100  # of nested values in JSON and YAML
MOST_VALUES = 200_000  # in YAML, each alias counted as what it stands for
BUNDLED = 1 << 26  # bytes; a job's bundle has links to larger files: see `hpcrl.slurm.bundle`
MOST_TEMPLATE = 1 << 20  # bytes of a chat template
TEMPLATES = "additional_chat_templates"  # a folder in that of a model
READ_BY_NAME = (".json", ".jinja", ".txt", ".model", ".tiktoken")  # what transformers opens for tokenizers and images
MOST_NAMED = 20  # lines of `left_out`

_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_FOLDER = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC
_LINK = (errno.ELOOP, errno.ENOTDIR)  # what O_NOFOLLOW answers for a link to a file and to a folder
_KINDS = {
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}

Name = str | os.PathLike[str]


class ForeignFileError(OSError):
    """A file that is not opened: its name, what was found, what was expected."""

    user_error = True

    def __init__(self, path: Name, found: str, expected: str = "a regular file") -> None:
        super().__init__(errno.EPERM, f"{found}; expected {expected}", str(path))
        self.found = found

    def __str__(self) -> str:
        return f"{self.filename}: {self.strerror}"


def open_file(path: Name, root: Name | None = None, *, most: int | None = None, links: bool = True) -> BinaryIO:
    """Open a regular file below `root` to read its bytes; None: its own folder.

    Links are followed if they lead to a file below `root`, or in a folder of the Hugging Face cache to its blobs.
    Raises OSError if it cannot be opened, ForeignFileError if it must not be.

    Args:
        most: bytes that the file may have.
        links: whether it may be a link at all.
    """
    path = Path(path)
    root = path.parent if root is None else Path(root)
    descriptor = _open(path, root, links)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise ForeignFileError(path, _kind(status.st_mode))
        if most is not None and status.st_size > most:
            raise ForeignFileError(path, f"{status.st_size} bytes", f"at most {most}")
        return open(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def read_bytes(path: Name, root: Name | None = None, *, most: int = MOST_TEXT, links: bool = True) -> bytes:
    """Read a whole file; of one that grows meanwhile, at most `most` bytes."""
    with open_file(path, root, most=most, links=links) as file:
        return file.read(most)


def read_text(path: Name, root: Name | None = None, *, most: int = MOST_TEXT, errors: str = "strict") -> str:
    """Read a whole file in UTF-8; line breaks become "\\n". Raises UnicodeDecodeError too."""
    text = read_bytes(path, root, most=most).decode("utf-8", errors=errors)
    return text.replace("\r\n", "\n").replace("\r", "\n") if "\r" in text else text


def read_end(path: Name, most: int, root: Name | None = None) -> str:
    """Read the last `most` bytes of a file in UTF-8, which may begin inside a line."""
    with open_file(path, root) as file:
        file.seek(max(os.fstat(file.fileno()).st_size - most, 0))
        return file.read(most).decode("utf-8", errors="replace")


def read_json(path: Name, root: Name | None = None, *, most: int = MOST_TEXT, links: bool = True) -> Any:
    """Read the value of a JSON file. Raises ValueError too."""
    return parse_json(read_bytes(path, root, most=most, links=links))


def parse_json(text: str | bytes) -> Any:
    """Parse JSON. Raises ValueError, also for values that are nested too deeply."""
    try:
        content = json.loads(text)
    except RecursionError:
        raise _too_deep() from None
    level, depth = [content], 0
    while level := [child for value in level if isinstance(value, (dict, list)) for child in _children(value)]:
        depth += 1
        if depth > MOST_DEPTH:
            raise _too_deep()
    return content


def check_yaml(root: Any) -> None:
    """Raise ValueError if the value of a PyYAML node, with its aliases expanded, is nested too deeply or too large."""
    sizes: dict[int, tuple[int, int]] = {}  # of a node: values in it, and its depth

    def measure(node: Any, above: int) -> tuple[int, int]:
        if above > MOST_DEPTH:
            raise ValueError(f"{_too_deep()}, or an alias that contains itself")
        if id(node) not in sizes:
            parts = node.value if isinstance(node.value, list) else []
            inner = [measure(it, above + 1) for part in parts for it in (part if isinstance(part, tuple) else (part,))]
            sizes[id(node)] = 1 + sum(size for size, _ in inner), 1 + max((depth for _, depth in inner), default=0)
        size, depth = sizes[id(node)]
        if above + depth > MOST_DEPTH:
            raise _too_deep()
        if size > MOST_VALUES:
            raise ValueError(f"its aliases stand for more than {MOST_VALUES} values; write them out")
        return size, depth

    measure(root, 0)


@contextmanager
def named(path: Name, root: Name | None = None, *, most: int | None = None) -> Iterator[str]:
    """Context in which a file has a name that no link can change, for libraries that open files by name."""
    with open_file(path, root, most=most) as file:
        yield f"/proc/self/fd/{file.fileno()}"


def check_folder(folder: Name) -> None:
    """Check the files of a model's folder that a library will open by itself. Raises ForeignFileError."""
    for place in (Path(folder), Path(folder, TEMPLATES)):
        if not place.is_dir():
            continue
        if not _is_inside(place, folder):
            raise ForeignFileError(place, f"a link that leads out of {folder}", "the folder itself (cp -rL)")
        for entry in os.scandir(place):
            if entry.name.endswith(READ_BY_NAME) and not entry.is_dir():
                open_file(
                    entry.path, folder, most=MOST_TEMPLATE if entry.name.endswith(".jinja") else MOST_TEXT
                ).close()


def left_out(root: Name) -> list[str]:
    """A line for each link and special file in the folder of a run that is not read, at most `MOST_NAMED` and one with
    the number of the others. Bundles are not searched."""
    root, lines = Path(root), list[str]()
    waiting = [root]
    while waiting:
        with suppress(OSError):
            for entry in sorted(os.scandir(waiting.pop()), key=lambda entry: entry.name):
                name = os.path.relpath(entry.path, root)
                if entry.is_symlink():
                    if not _is_inside(entry.path, root):
                        lines.append(f"{name}: a link that leads out of the run's folder; it was not read")
                elif entry.is_dir(follow_symlinks=False):
                    if not name.startswith("bundle") and len(Path(name).parts) < 4:
                        waiting.append(Path(entry.path))
                elif not entry.is_file(follow_symlinks=False):
                    lines.append(f"{name}: {_kind(entry.stat(follow_symlinks=False).st_mode)}; it was not read")
    more = [f"{len(lines) - MOST_NAMED} more links were not read"] if len(lines) > MOST_NAMED else []
    return lines[:MOST_NAMED] + more


def is_folder(path: Name, root: Name) -> bool:
    """Whether a folder is there, and inside `root` after links."""
    return os.path.isdir(path) and _is_inside(path, root)


def _open(path: Path, root: Path, links: bool) -> int:
    try:
        return _walk(root, path.relative_to(root).parts, path)
    except OSError as error:
        if error.errno == errno.ENXIO:
            raise ForeignFileError(path, "a socket") from None
        if error.errno not in _LINK:
            raise
        real = Path(os.path.realpath(path))
        if real == path.absolute():  # no link
            raise
    if not links:
        raise ForeignFileError(path, "a link")
    base = _base_of(real, path, root)
    if base is None:
        raise ForeignFileError(
            path, f"a link that leads out of {root}", "the file itself: replace the link by it (cp -L)"
        )
    return _walk(base, real.relative_to(base).parts, path)


def _walk(root: Path, parts: tuple[str, ...], path: Path) -> int:
    """Open a file without following a link below `root`. Raises OSError with the name `path`."""
    if not parts or ".." in parts:
        raise ForeignFileError(path, "a path", f"a file below {root}")
    folder = None
    try:
        if len(parts) == 1:
            return os.open(root / parts[0], _FLAGS)
        folder = os.open(root, _FOLDER)
        for part in parts[:-1]:
            inner = os.open(part, _FOLDER | os.O_NOFOLLOW, dir_fd=folder)
            os.close(folder)
            folder = inner
        return os.open(parts[-1], _FLAGS, dir_fd=folder)
    except OSError as error:
        error.filename = str(path)
        raise
    finally:
        if folder is not None:
            os.close(folder)


def _base_of(real: Path, path: Path, root: Path) -> Path | None:
    """The folder below which `path`, whose links lead to `real`, may be; None if they lead elsewhere."""
    base = Path(os.path.realpath(root))
    if real.is_relative_to(base):
        return base
    if base.parent.name == "snapshots" and real.is_relative_to(base.parents[1] / "blobs"):
        return base.parents[1]
    is_bundled = any(it.name == "inputs" and it.parent.name.startswith("bundle") for it in (base, *base.parents))
    if is_bundled and os.lstat(path).st_uid == os.geteuid() and real.stat().st_size > BUNDLED:
        return real.parent
    return None


def _is_inside(path: Name, root: Name) -> bool:
    return Path(os.path.realpath(path)).is_relative_to(os.path.realpath(root))


def _kind(mode: int) -> str:
    return _KINDS.get(stat.S_IFMT(mode), "a special file")


def _children(value: dict[str, Any] | list[Any]) -> Iterator[Any]:
    return iter(value.values() if isinstance(value, dict) else value)


def _too_deep() -> ValueError:
    return ValueError(f"nested too deeply: more than {MOST_DEPTH} levels")


ERRORS = "backslashreplace"  # how streams of text write what their encoding lacks, as Python's stderr does
_HARMLESS = {"\n", "\t", "\u200c", "\u200d"}  # joiners are parts of emoji and of words
_SUSPECT = re.compile(r"[^\x20-\x7e\n]")  # all of it is looked up; most text has little


def writable(text: str) -> str:
    r"""`text` as UTF-8 can hold it: an unpaired surrogate becomes its escape, `\ud83d`.

    Of JSON text, this is the escape that JSON has for it, so the value is read back as it was.
    """
    return text if text.isascii() else text.encode("utf-8", ERRORS).decode("utf-8")


def take_any_text() -> None:
    """Let stdout take text that its encoding lacks: surrogates, and on an ASCII terminal all but ASCII."""
    if isinstance(sys.stdout, TextIOWrapper):  # tests replace it
        sys.stdout.reconfigure(errors=ERRORS)


def printable(text: str, *, one_line: bool = False) -> str:
    """`text` without characters that a terminal acts on: controls, escapes, and marks that change the direction.

    Control characters become their pictures (ESC: U+241B), others `<U+202E>`; line breaks and tabs stay, unless
    `one_line` is true: then a line break becomes U+23CE.
    """
    text = _SUSPECT.sub(_shown, text)
    return text.replace("\n", "\u23ce").replace("\t", " ") if one_line else text


def _shown(match: re.Match[str]) -> str:
    character = match[0]
    code = ord(character)
    if character in _HARMLESS or unicodedata.category(character) not in ("Cc", "Cf", "Cs", "Zl", "Zp"):
        return character
    if code < 0x20:
        return chr(0x2400 + code)
    return "\u2421" if code == 0x7F else f"<U+{code:04X}>"
