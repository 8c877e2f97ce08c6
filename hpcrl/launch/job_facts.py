"""What one rank sees of its node: versions, address, folders. Nothing here imports torch or waits for other ranks."""

from __future__ import annotations

import hashlib
import ipaddress
import os
import platform
import re
import shutil
import socket
import tempfile
import time
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from hpcrl.launch.exits import InputError
from hpcrl.launch.mpi_library import library_name
from hpcrl.launch.node import node_name
from hpcrl.launch.world import own_address

PACKAGES = ("hpcrl", "torch", "megatron-core", "mpi4py", "numpy", "transformers", "tensorrt-llm", "transformer-engine")
CANARY_SECONDS = 10.0


@dataclass(frozen=True)
class Facts:
    """versions: of what must be the same everywhere, None where it is not installed. address: this node's for others,
    with its interface. no_address: why it has none. scratch_free: bytes."""

    host: str
    versions: dict[str, str | None]
    address: str
    no_address: str | None
    scratch: str
    scratch_free: int


def facts(mpi_library: str) -> Facts:
    address, no_address = address_here()
    scratch = os.environ.get("SLURM_TMPDIR") or tempfile.gettempdir()
    free = shutil.disk_usage(scratch).free
    return Facts(node_name(), versions(mpi_library), address, no_address, scratch, free)


def versions(mpi_library: str) -> dict[str, str | None]:
    found: dict[str, str | None] = {"python": platform.python_version(), "MPI library": library_name(mpi_library)}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = None
    return found | {"hpcrl's code": code_hash(Path(__file__).parents[1]), "CUDA driver": cuda_driver()}


def code_hash(folder: Path) -> str:
    """Of the Python files below: the same version may be another checkout."""
    digest = hashlib.blake2b(digest_size=4)
    for path in sorted(folder.rglob("*.py")):
        digest.update(path.relative_to(folder).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def cuda_driver(path: str = "/proc/driver/nvidia/version") -> str | None:
    try:
        found = re.search(r"\b\d+\.\d+(\.\d+)?\b", Path(path).read_text(encoding="utf-8"))
    except OSError:
        return None
    return found.group() if found else "of unknown version"


def address_here() -> tuple[str, str | None]:
    """`10.0.0.3 (hsn0)`, and what is wrong with it for other nodes."""
    try:
        address = own_address(socket.gethostname())
    except InputError as error:
        return "no address", str(error)
    wrong = None
    if ipaddress.IPv4Address(address).is_link_local:
        wrong = (
            f"its address {address} is link-local, which other nodes do not reach; mend its name in DNS or /etc/hosts"
        )
    return f"{address} ({interface_of(address)})", wrong


def interface_of(address: str) -> str:
    import psutil

    for name, entries in psutil.net_if_addrs().items():
        if any(entry.family == socket.AF_INET and entry.address == address for entry in entries):
            return str(name)
    return "?"


def write_canary(folder: str, token: str) -> str | None:
    """Leave `token` in a file that is named for it; what is wrong if that cannot be done."""
    try:
        canary_path(folder, token).write_text(token, encoding="utf-8")
    except OSError as error:
        return f"cannot be written to ({error.strerror})"
    return None


def see_canary(folder: str, token: str, patience: float = CANARY_SECONDS) -> bool:
    """Whether the file is here, with its content, within `patience` seconds: other nodes' caches may take some."""
    give_up = time.monotonic() + patience
    while True:
        try:
            if canary_path(folder, token).read_text(encoding="utf-8") == token:
                return True
        except OSError:
            pass
        if time.monotonic() > give_up:
            return False
        time.sleep(0.05)


def canary_path(folder: str, token: str) -> Path:
    return Path(folder) / f".canary_{token}"
