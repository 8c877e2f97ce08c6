"""Selection of each rank's GPU, and the CPUs of a rank: number of threads, binding near its GPU.

Copies between host and device then stay within a NUMA node.
"""

from __future__ import annotations

import contextlib
import ctypes
import glob
import importlib.util
import logging
import os
import sys
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpcrl.kernels import chips
from hpcrl.runtime.exits import InputError
from hpcrl.runtime.mpi import all_gather_object, run_collectively
from hpcrl.sandbox import fork_server

if TYPE_CHECKING:
    import torch
    from mpi4py import MPI


Core = tuple[int, ...]  # its CPUs: one for each hardware thread


def bind_near_gpu(node: MPI.Intracomm, pci_id: str) -> list[int] | None:
    """Bind this process to CPUs near the GPU with this PCI id and return them. Collective over the ranks of `node`.

    Returns None and binds nothing if the launcher has bound any of these ranks, or if sysfs does not list the CPUs.
    """
    everyone = all_gather_object(node, (is_bound(os.sched_getaffinity(0), online_cpus()), cores_near(pci_id)))
    if any(bound for bound, _ in everyone):
        return None
    cpus = share([cores for _, cores in everyone], node.rank)
    if cpus:
        bind(cpus)
    return cpus or None


def share(cores: Sequence[Sequence[Core]], rank: int) -> list[int]:
    """The CPUs of `rank`.

    Ranks with the same cores divide them in rank order, as evenly as possible; a core is not divided. Empty if there
    are fewer cores than ranks.

    Args:
        cores: the cores near the GPU of each rank of the node.
    """
    mine = list(cores[rank])
    sharers = [other for other, theirs in enumerate(cores) if list(theirs) == mine]
    if len(mine) < len(sharers):
        return []
    place = sharers.index(rank)
    first, end = (len(mine) * at // len(sharers) for at in (place, place + 1))
    return sorted(cpu for core in mine[first:end] for cpu in core)


def is_bound(allowed: Iterable[int], online: Iterable[int]) -> bool:
    """Whether a process is bound to a part of the CPUs. It counts as bound if `online` is empty."""
    return set(allowed) != set(online)


def parse_cpu_list(text: str) -> list[int]:
    """Convert '0-2,8', the kernel's format, to [0, 1, 2, 8]."""
    cpus: list[int] = []
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cpus.extend(range(int(first), int(last or first) + 1))
    return cpus


def cores_near(pci_id: str, sysfs: str = "/sys") -> list[Core]:
    """Cores near a PCI device such as 0000:17:00.0, in the order of their first CPUs; [] if sysfs has none."""
    cpus = read_cpu_list(Path(sysfs, "bus/pci/devices", pci_id, "local_cpulist"))
    cores: dict[Core, None] = {}
    for cpu in cpus:
        siblings = read_cpu_list(Path(sysfs, f"devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"))
        cores[tuple(each for each in siblings if each in cpus) or (cpu,)] = None
    return list(cores)


def online_cpus(sysfs: str = "/sys") -> list[int]:
    return read_cpu_list(Path(sysfs, "devices/system/cpu/online"))


def read_cpu_list(path: Path) -> list[int]:
    try:
        return parse_cpu_list(path.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return []


def bind(cpus: Sequence[int]) -> None:
    """Bind all threads of this process, and the child processes that it starts from now on."""
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(ProcessLookupError):  # it has ended
            os.sched_setaffinity(int(thread), cpus)
    fork_server.bind(cpus)


def rank_threads(environ: Mapping[str, str], cores: int, local_size: int) -> int:
    """Number of threads of a rank: OMP_NUM_THREADS, or an even share of the cores that it may use.

    Under `srun --cpus-per-task` with binding, each rank sees only its own cores. Without binding, the ranks of a node
    all see the node's cores.
    """
    chosen = environ.get("OMP_NUM_THREADS", "")
    if chosen.isdigit() and int(chosen) > 0:
        return int(chosen)
    bound = environ.get("SLURM_CPUS_PER_TASK", "")
    if bound.isdigit() and cores == int(bound):
        return cores
    return max(1, cores // local_size)


log = logging.getLogger(__name__)

ON_CPU = "set CUDA_VISIBLE_DEVICES= (empty) to run on the CPU"
HIDDEN = ("", "-1", "NoDevFiles")  # values of the variables with which there are no GPUs


@dataclass(frozen=True)
class Toolkit:
    """What torch is built for, to use the GPUs of a vendor. variables: that choose GPUs. tool: that lists them."""

    name: str
    vendor: str
    variables: tuple[str, ...]
    tool: str
    on_cpu: str = ON_CPU


CUDA = Toolkit("CUDA", "NVIDIA", ("CUDA_VISIBLE_DEVICES",), "nvidia-smi")
ROCM = Toolkit(
    "ROCm",
    "AMD",
    ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"),
    "rocm-smi",
    "set HIP_VISIBLE_DEVICES=-1 to run on the CPU",  # an empty value counts as unset
)


@dataclass(frozen=True)
class FoundGpus:
    """GPUs of this node.

    num_devices: GPUs that the driver has. num_usable: GPUs that torch can use. wheel: version of the toolkit that
    torch is built for, None for a CPU build. visible: those of the toolkit's variables that are set. If torch can use
    none: driver_cuda is the newest CUDA version that the driver supports (None without a driver library), and problem
    is torch's warning. vendor: of the GPUs.
    """

    num_devices: int
    num_usable: int
    wheel: str | None
    visible: Mapping[str, str] = field(default_factory=dict)
    driver_cuda: tuple[int, int] | None = None
    problem: str = ""
    toolkit: Toolkit = CUDA
    vendor: str = "NVIDIA"


@dataclass(frozen=True)
class Gpu:
    """architecture: such as sm_90 or gfx942. wheel_archs: those that torch has kernels for."""

    name: str
    architecture: str
    wheel_archs: Sequence[str]


def find_gpus() -> FoundGpus:
    """Find this node's GPUs by torch and the driver. Imports torch."""
    import torch

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        num_usable = torch.cuda.device_count() if torch.cuda.is_available() else 0
    toolkit = ROCM if torch.version.hip else CUDA
    devices = {"NVIDIA": nvidia_devices(), "AMD": amd_devices()}
    vendor = max(devices, key=lambda name: (devices[name] > 0, name == toolkit.vendor))
    visible = {name: os.environ[name] for name in toolkit.variables if name in os.environ}
    wheel = torch.version.hip or torch.version.cuda
    gpus = FoundGpus(devices[vendor], num_usable, wheel, visible, toolkit=toolkit, vendor=vendor)
    if num_usable or not gpus.num_devices:
        return gpus
    problem = " ".join(str(warning.message) for warning in caught)
    return replace(gpus, driver_cuda=driver_cuda_version(), problem=problem)


def nvidia_devices() -> int:
    """Number of GPUs that NVIDIA's driver has device files for."""
    return len(glob.glob("/dev/nvidia[0-9]*")) if os.path.exists("/dev/nvidiactl") else 0


def amd_devices(sysfs: str = "/sys") -> int:
    """Number of GPUs of AMD's driver; an MI250X has two. CPUs are nodes of its topology, too, with the id 0."""
    ids = Path(sysfs, "class/kfd/kfd/topology/nodes").glob("*/gpu_id")
    return sum(path.read_text(encoding="ascii").strip() not in ("", "0") for path in ids)


def driver_cuda_version() -> tuple[int, int] | None:
    """Newest CUDA version that the driver supports, or None without a driver. Does not initialize CUDA."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    version = ctypes.c_int()
    if library.cuDriverGetVersion(ctypes.byref(version)) != 0:
        return None
    return version.value // 1000, version.value % 1000 // 10


def unusable(found: FoundGpus) -> str | None:
    """Why torch can use none of the node's GPUs, and what to do.

    None if it can use one, if there are none, or if the user has chosen the CPU: by a variable, or by a torch that is
    built for the CPU.
    """
    if found.num_usable or not found.num_devices or found.wheel is None:
        return None
    if any(value.strip() in HIDDEN for value in found.visible.values()):
        return None
    here = f"this node has {found.num_devices} GPU{'s' * (found.num_devices > 1)}, but torch can use none"
    return f"{here}{_why_unusable(found)}, or {found.toolkit.on_cpu}"


def _why_unusable(gpus: FoundGpus) -> str:
    toolkit, wheel = gpus.toolkit, str(gpus.wheel)
    if gpus.vendor != toolkit.vendor:
        built = f"torch is built for {toolkit.name} {wheel}"
        return f": they are {gpus.vendor}'s, and {built}; install a torch that is built for {gpus.vendor}"
    if toolkit is CUDA and gpus.driver_cuda is None:
        return ": the driver's library libcuda.so.1 is missing or broken; install the NVIDIA driver"
    if toolkit is CUDA and gpus.driver_cuda and gpus.driver_cuda[0] < int(wheel.split(".")[0]):
        newest = ".".join(map(str, gpus.driver_cuda))
        return (
            f": its NVIDIA driver supports CUDA {newest} at most, and torch is built for {wheel}; "
            f"update the driver, install a torch that is built for CUDA {gpus.driver_cuda[0]}"
        )
    chosen = ", ".join(f"{name}={value}" for name, value in gpus.visible.items())
    named, why = f" with {chosen}" if chosen else "", f" ({gpus.problem})" if gpus.problem else ""
    return f"{named}{why}; ask the batch system for GPUs (--gpus-per-node), try {toolkit.tool}"


def check_usable(found: FoundGpus) -> None:
    """Raise InputError if the job would run on the CPU by mistake."""
    if (problem := unusable(found)) is not None:
        raise InputError(problem)


def unused(found: FoundGpus) -> str | None:
    """A line about GPUs that a CPU build of torch does not use, or None."""
    if found.wheel is None and found.num_devices:
        return f"torch is built for the CPU; the GPUs of this node ({found.num_devices}) are not used"
    return None


def too_old(gpu: Gpu) -> str | None:
    """Error text if this torch has no kernels for the GPU, otherwise None."""
    if not gpu.wheel_archs or any(runs_on(gpu.architecture, arch) for arch in gpu.wheel_archs):
        return None
    return (
        f"{gpu.name} has {described(gpu.architecture)}, which this torch has no kernels for "
        f"({', '.join(gpu.wheel_archs)}); install a torch that has them, or {ON_CPU}"
    )


def lacks_bfloat16(gpu: Gpu) -> str | None:
    """Error text if the GPU has no bfloat16, otherwise None."""
    if chips.chip(gpu.architecture).bfloat16:
        return None
    return (
        f"{gpu.name} has {described(gpu.architecture)}, and bfloat16 needs 8.0 or newer; "
        "set model.dtype and rollout.dtype to float32"
    )


def runs_on(architecture: str, arch: str) -> bool:
    """Whether a GPU runs code that is built for `arch`.

    sm_80 runs on 8.x from 8.0 on, compute_80 (PTX, compiled when it is loaded) on all from 8.0 on, sm_90a on 9.0 only.
    AMD's code runs on its own architecture; that gfx9-4-generic, for instance, runs on gfx942, is assumed.
    """
    if architecture.startswith("gfx"):
        return arch.partition(":")[0] == architecture or "generic" in arch
    kind, _, version = arch.partition("_")
    if kind not in ("sm", "compute"):
        return False
    here, built_for = chips.capability(architecture), chips.capability(f"sm_{version.rstrip('af')}")
    if version.endswith("a"):
        return here == built_for
    return here >= built_for and (kind == "compute" or here[0] == built_for[0])


def described(architecture: str) -> str:
    """Return what an architecture is called in documents: compute capability 9.0, or architecture gfx942."""
    if architecture.startswith("gfx"):
        return f"architecture {architecture}"
    return f"compute capability {'.'.join(map(str, chips.capability(architecture)))}"


def missing_triton(environ: Mapping[str, str], is_installed: bool) -> str | None:
    """Error text if Triton is not installed and HPCRL_KERNELS is not torch, otherwise None."""
    if is_installed or environ.get("HPCRL_KERNELS") == "torch":
        return None
    return (
        "Triton is not installed, and without its kernels a job on GPUs is slow and takes more memory; "
        "`pip install triton`, or set HPCRL_KERNELS=torch to use the functions of torch"
    )


def triton_is_installed() -> bool:
    return importlib.util.find_spec("triton") is not None


def gpu_here(index: int) -> Gpu:
    """The GPU with this index in torch."""
    cuda = sys.modules["torch"].cuda
    return Gpu(cuda.get_device_name(index), chips.architecture(index), tuple(cuda.get_arch_list()))


def memory_of_all() -> list[int]:
    """Bytes of each GPU that torch can use; none without torch."""
    if "torch" not in sys.modules or not sys.modules["torch"].cuda.is_available():
        return []
    cuda = sys.modules["torch"].cuda
    return [cuda.get_device_properties(index).total_memory for index in range(cuda.device_count())]


def pci_id(properties: Any) -> str:
    """PCI id such as 0000:17:00.0 from torch's properties of a GPU; empty for a torch older than 2.8."""
    if not hasattr(properties, "pci_bus_id"):
        return ""
    return f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"


def check_gpu(gpu: Gpu, *, needs_bfloat16: bool, environ: Mapping[str, str], has_triton: bool) -> None:
    """Raise InputError if a job cannot run on the GPU."""
    problem = too_old(gpu) or (lacks_bfloat16(gpu) if needs_bfloat16 else None) or missing_triton(environ, has_triton)
    if problem is not None:
        raise InputError(problem)


def check_all_or_none(counts: Sequence[int]) -> None:
    """Raise InputError if some ranks have GPUs and others have none.

    Args:
        counts: usable GPUs of each rank.
    """
    if any(counts) and not all(counts):
        without, having = counts.index(0), [count > 0 for count in counts].index(True)
        raise InputError(
            f"rank {without} can use no GPU, and rank {having} can; run all ranks on nodes with GPUs, or {ON_CPU}"
        )


def check_own_gpus(uuids: Sequence[str]) -> None:
    """Raise InputError if two ranks have the same GPU.

    Args:
        uuids: the UUID of each rank's GPU.
    """
    for rank, uuid in enumerate(uuids):
        first = uuids.index(uuid)
        if first < rank:
            raise InputError(
                f"ranks {first} and {rank} have the same GPU ({uuid}), and NCCL takes one rank per GPU; start as many "
                "ranks per node as it has GPUs (job.ntasks_per_node), or set HPCRL_SHARE_GPU=1 for a slow test"
            )


def select_device(comm: MPI.Intracomm, local_rank: int, *, needs_bfloat16: bool) -> tuple[torch.device, bool]:
    """Select this rank's device; returns it and whether ranks share a GPU. Collective.

    Raises InputError on all ranks if one of them cannot run.
    """
    import torch

    gpus = find_gpus()
    run_collectively(comm, lambda: check_usable(gpus))
    if comm.rank == 0 and (line := unused(gpus)):
        log.warning(line)
    counts = all_gather_object(comm, gpus.num_usable)
    run_collectively(comm, lambda: check_all_or_none(counts))
    if not gpus.num_usable:
        return torch.device("cpu"), False
    device = torch.device("cuda", local_rank % gpus.num_usable)
    torch.cuda.set_device(device)
    gpu, has_triton = gpu_here(device.index), triton_is_installed()
    run_collectively(
        comm, lambda: check_gpu(gpu, needs_bfloat16=needs_bfloat16, environ=os.environ, has_triton=has_triton)
    )
    uuids = all_gather_object(comm, str(torch.cuda.get_device_properties(device).uuid))
    may_share = os.environ.get("HPCRL_SHARE_GPU") == "1"
    run_collectively(comm, lambda: None if may_share else check_own_gpus(uuids))
    return device, len(set(uuids)) < len(uuids)
