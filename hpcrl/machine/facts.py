"""What a rank of `hpcrl check --job` finds on its node: versions, addresses, adapters, limits, the clock of its GPU."""

from __future__ import annotations

import ctypes
import hashlib
import ipaddress
import os
import platform
import re
import resource
import shutil
import socket
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpcrl.machine.check import shared_memory_free
from hpcrl.runtime import gpus
from hpcrl.runtime.exits import InputError
from hpcrl.runtime.launcher import library_name, loaded_libraries, node_name, version_of
from hpcrl.runtime.store import own_address

PACKAGES = ("hpcrl", "torch", "megatron-core", "mpi4py", "numpy", "transformers", "tensorrt-llm", "transformer-engine")
LIMITS = {"memlock": resource.RLIMIT_MEMLOCK, "nofile": resource.RLIMIT_NOFILE, "nproc": resource.RLIMIT_NPROC}


@dataclass(frozen=True)
class NodeState:
    """What a node has for communication.

    adapters: kinds of its RDMA adapters: cxi (Slingshot), efa, ib. limits: soft and hard limit by name, -1 is
    none. shared_memory: bytes free in /dev/shm, None without it. huge_pages: mode of transparent huge pages.
    """

    adapters: tuple[str, ...] = ()
    limits: dict[str, tuple[int, int]] = field(default_factory=dict)
    shared_memory: int | None = None
    huge_pages: str | None = None
    has_gpus: bool = False


@dataclass(frozen=True)
class Facts:
    """What one rank finds on its node.

    versions: versions that must be the same on all ranks, None for what is not installed. address: this node's address
    for other nodes, with its interface. no_address: why it has none. scratch_free: bytes.
    """

    host: str
    versions: dict[str, str | None]
    address: str
    no_address: str | None
    scratch: str
    scratch_free: int
    state: NodeState = NodeState()


def find_facts(mpi_library: str) -> Facts:
    address, no_address = address_here()
    scratch = os.environ.get("SLURM_TMPDIR") or tempfile.gettempdir()
    free = shutil.disk_usage(scratch).free
    return Facts(node_name(), versions(mpi_library), address, no_address, scratch, free, find_node_state())


def find_node_state(sysfs: str = "/sys") -> NodeState:
    return NodeState(
        find_adapters(sysfs),
        {name: resource.getrlimit(number) for name, number in LIMITS.items()},
        shared_memory_free(),
        huge_pages_mode(Path(sysfs, "kernel/mm/transparent_hugepage/enabled")),
        bool(gpus.nvidia_devices() or gpus.amd_devices(sysfs)),
    )


def find_adapters(sysfs: str) -> tuple[str, ...]:
    """Kinds of the RDMA adapters that are connected. EFA's devices are rdmap* or efa_*."""
    cxi = ["cxi" for _ in Path(sysfs, "class/cxi").glob("*")]
    states = sorted(Path(sysfs, "class/infiniband").glob("*/ports/*/state"))
    active = [path.parents[2].name for path in states if "ACTIVE" in path.read_text(encoding="ascii")]
    return tuple(dict.fromkeys(cxi + ["efa" if name.startswith(("efa", "rdmap")) else "ib" for name in active]))


def huge_pages_mode(path: Path) -> str | None:
    """The mode in brackets of `always [madvise] never`."""
    try:
        found = re.search(r"\[(\w+)\]", path.read_text(encoding="ascii"))
    except OSError:
        return None
    return found[1] if found else None


def versions(mpi_library: str) -> dict[str, str | None]:
    return {
        "python": platform.python_version(),
        "MPI library": library_name(mpi_library),
        **{package: version_of(package) for package in PACKAGES},
        "hpcrl's code": code_hash(Path(__file__).parents[1]),
        "GPU driver": gpu_driver(),
        "libfabric": libfabric_version(loaded_libraries()),
    }


def libfabric_version(loaded: list[str]) -> str | None:
    """Version of the libfabric that the MPI library has loaded; None without one."""
    path = next((path for path in loaded if os.path.basename(path).startswith("libfabric.so")), None)
    if path is None:
        return None
    version = int(ctypes.CDLL(path).fi_version())
    return f"{version >> 16}.{version & 0xFFFF}"


def code_hash(folder: Path) -> str:
    """Hash of the Python files below a folder: the same version may be another checkout."""
    digest = hashlib.blake2b(digest_size=4)
    for path in sorted(folder.rglob("*.py")):
        digest.update(path.relative_to(folder).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def gpu_driver(paths: Sequence[str] = ("/proc/driver/nvidia/version", "/sys/module/amdgpu/version")) -> str | None:
    """Version of NVIDIA's driver or of AMD's; a driver that is part of the kernel has none."""
    path = next((Path(each) for each in paths if os.path.exists(each)), None)
    if path is None:
        return None
    found = re.search(r"\b\d+\.\d+(\.\d+)?\b", path.read_text(encoding="utf-8"))
    return found.group() if found else "of unknown version"


def address_here() -> tuple[str, str | None]:
    """This node's address, such as `10.0.0.3 (hsn0)`, and why other nodes cannot reach it, or None."""
    try:
        address = own_address(socket.gethostname())
    except InputError as error:
        return "no address", str(error)
    wrong = None
    if ipaddress.IPv4Address(address).is_link_local:
        wrong = f"its address {address} is link-local: other nodes cannot reach it; correct it in DNS or /etc/hosts"
    return f"{address} ({interface_of(address)})", wrong


def interface_of(address: str) -> str:
    import psutil

    for name, entries in psutil.net_if_addrs().items():
        if any(entry.family == socket.AF_INET and entry.address == address for entry in entries):
            return str(name)
    return "?"


@dataclass(frozen=True)
class GpuClock:
    """MHz of the multiprocessors, now and at most. throttles: NVML's bits of why they are slower."""

    now: int
    most: int
    throttles: int


def gpu_clock(pci_id: str, library: str = "libnvidia-ml.so.1") -> GpuClock | None:
    """The clock of an NVIDIA GPU by NVML; None without NVML.

    Args:
        pci_id: such as 0000:17:00.0.
    """
    try:
        nvml = ctypes.CDLL(library)
    except OSError:
        return None
    gpu = ctypes.c_void_p()
    if nvml.nvmlInit_v2() or nvml.nvmlDeviceGetHandleByPciBusId_v2(pci_id.encode(), ctypes.byref(gpu)):
        return None

    def read(function: Callable[..., int], result: Any, *arguments: int) -> int:
        return -1 if function(gpu, *arguments, ctypes.byref(result)) else int(result.value)

    multiprocessors = 1  # NVML_CLOCK_SM
    now = read(nvml.nvmlDeviceGetClockInfo, ctypes.c_uint(), multiprocessors)
    most = read(nvml.nvmlDeviceGetMaxClockInfo, ctypes.c_uint(), multiprocessors)
    throttles = read(nvml.nvmlDeviceGetCurrentClocksThrottleReasons, ctypes.c_ulonglong())
    nvml.nvmlShutdown()
    return GpuClock(now, most, max(throttles, 0))
