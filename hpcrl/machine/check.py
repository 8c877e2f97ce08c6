"""`hpcrl check`: a table of what is installed on this machine, and what is wrong with it.

Runs in one process or under a launcher, where rank 0 prints. The exit code is 1 if something that hpcrl needs is wrong.
With --trtllm it checks that engine only.
"""

from __future__ import annotations

import importlib.util
import itertools
import logging
import os
import platform
import shutil
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from hpcrl.runtime import exits, gpus
from hpcrl.runtime.exits import InputError
from hpcrl.runtime.launcher import is_first_launched, library_name, version_of
from hpcrl.runtime.mpi import all_gather_object, broadcast_object
from hpcrl.runtime.watchdog import format_ranks
from hpcrl.runtime.world import finish, start_mpi
from hpcrl.sandbox.isolation import probe_isolation
from hpcrl.sandbox.task_sandbox import NEEDED, probe_sandbox

if TYPE_CHECKING:
    from mpi4py import MPI

GIB = 2**30
SHARED_MEMORY_PER_RANK = 16 * 2**20  # bytes; MPICH's own shared segment takes 2 to 4 MB a rank


@dataclass(frozen=True)
class Finding:
    """One line of the table. wrong: what is wrong and what to do. needed: whether hpcrl fails because of it."""

    name: str
    found: str
    wrong: str | None = None
    needed: bool = True


def main(engine: Callable[[MPI.Intracomm], list[Finding]] | None) -> NoReturn:
    """Run the subcommand. Collective over the ranks that the launcher started.

    Args:
        engine: for --trtllm, a collective function that returns the findings.
    """
    probe_isolation()  # these start processes, so they come before MPI; the results are cached
    probe_sandbox()
    comm = start_mpi_or_exit(local_findings)
    hosts = all_gather_object(comm, (platform.node(), len(os.sched_getaffinity(0))))
    findings = engine(comm) if engine is not None else local_findings(comm.size)
    what = "TensorRT-LLM" if engine is not None else "hpcrl"
    code = report([*mpi_findings(comm, hosts), *findings], what) if comm.rank == 0 else None
    if engine is None and code == exits.DONE:
        has_slurm = "SLURM_JOB_ID" in os.environ or shutil.which("sbatch") is not None
        print(f"next: {next_command(gpus.memory_of_all(), has_slurm=has_slurm)}")
    finish(broadcast_object(comm, code))


# GiB of a GPU from which on `hpcrl plan` fits a template of configs/one_gpu, with 8% to spare; the largest first.
ONE_GPU = ((60, "grpo_1_5b"), (40, "grpo_3b_lora"), (22, "grpo_1_5b_lora"), (16, "grpo_0_5b"))


def next_command(memory: Sequence[int], *, has_slurm: bool) -> str:
    """What to try first on a machine.

    Args:
        memory: bytes of each of this node's usable GPUs.
    """
    if has_slurm or len(memory) > 1:
        return "hpcrl init first --slurm, then hpcrl plan grpo.yaml: does it fit these GPUs?"
    if not memory:
        return "hpcrl init first --laptop"
    gib = memory[0] / GIB
    fits = next((f"{name}.yaml, which fits {gib:.0f} GiB" for least, name in ONE_GPU if gib >= least), None)
    small = f"hpcrl plan configs/one_gpu/grpo_0_5b.yaml job.gpu_memory_gib={gib * 0.92:.1f}"
    return f"hpcrl init first --one-gpu, then {f'hpcrl train configs/one_gpu/{fits}' if fits else small}"


def start_mpi_or_exit(others: Callable[[], list[Finding]] = list) -> MPI.Intracomm:
    """Start MPI; where it cannot be used, print that with the findings `others`, once per job, and exit."""
    try:
        return start_mpi()
    except InputError as error:
        if is_first_launched(os.environ):
            report([Finding("MPI", "unusable", str(error)), *others()])
        os._exit(exits.OTHER)


def report(findings: list[Finding], what: str = "hpcrl") -> int:
    """Print the table and what is wrong, and return the exit code.

    Args:
        what: what cannot run if something is wrong.
    """
    width = max(len(finding.name) for finding in findings)
    for finding in findings:
        mark = " " if finding.wrong is None else "!" if finding.needed else "?"
        print(f"{mark} {finding.name:<{width}}  {finding.found}")
    wrong = [finding for finding in findings if finding.wrong is not None]
    for finding in wrong:
        print(f"\n{'wrong' if finding.needed else 'note'}: {finding.name.strip()}: {finding.wrong}")
    needed = [finding for finding in wrong if finding.needed]
    print("\nready" if not needed else f"\n{len(needed)} thing{'s' * (len(needed) > 1)} to fix before {what} can run")
    return exits.OTHER if needed else exits.DONE


def mpi_findings(comm: MPI.Intracomm, hosts: list[tuple[str, int]]) -> Iterator[Finding]:
    """The MPI library and the nodes of its ranks.

    Args:
        hosts: (host, cores) of each rank.
    """
    from mpi4py import MPI

    names = ("SINGLE", "FUNNELED", "SERIALIZED", "MULTIPLE")
    level = next(name.lower() for name in names if getattr(MPI, f"THREAD_{name}") == MPI.Query_thread())
    standard = ".".join(map(str, MPI.Get_version()))
    yield Finding("MPI", f"{library_name(MPI.Get_library_version())}, MPI {standard}, threads: {level}")
    yield Finding("ranks", f"{comm.size} in one world on {len({host for host, _ in hosts})} node(s)")
    for (host, cores), same in itertools.groupby(range(comm.size), hosts.__getitem__):
        yield Finding(f"  {format_ranks(list(same))}", f"{host}, {cores} core(s)")
    crowded = [
        f"{host} ({count} ranks, {cores} cores)"
        for host, count in Counter(host for host, _ in hosts).items()
        if count > (cores := dict(hosts)[host])
    ]
    if crowded:
        yield Finding("  sharing", "ranks share cores", f"more ranks than cores on {', '.join(crowded)}: slow", False)


def local_findings(ranks: int = 1) -> list[Finding]:
    """Findings about this process's own node."""
    return [
        python(),
        package("mpi4py", needed=True),
        torch(),
        gpu(),
        triton(),
        megatron_core(),
        transformer_engine(),
        package("tensorrt_llm", absent="not installed (the native rollout engine is used)"),
        apex(),
        requirements(),
        sandbox(),
        task_sandbox(),
        cores(),
        memory(),
        shared_memory(ranks),
        disk(),
    ]


def python() -> Finding:
    found = f"{platform.python_version()} ({sys.executable})"
    fits = (3, 10) <= sys.version_info[:2] <= (3, 12)
    return Finding("python", found, None if fits else "Python 3.10 to 3.12 is needed; make .venv with one of them")


def package(name: str, *, absent: str = "not installed", needed: bool = False) -> Finding:
    """A package by its metadata only, because some are slow to import or print messages."""
    title = name.replace("_", "-")
    version = version_of(title)
    if version is not None:
        return Finding(title, version)
    return Finding(title, absent, install_extra() if needed else None)


def extra_here() -> str:
    """The extra of setup.py with what jobs need on this machine."""
    return "gpu" if gpus.driver_cuda_version() is not None or gpus.amd_devices() else "cpu"


def install_extra() -> str:
    first = ", after a torch for ROCm, see docs/amd.md" if gpus.amd_devices() else ""
    return f"`pip install 'hpcrl[{extra_here()}]'`{first}"


def attempt(name: str, load: Callable[[str], object] = importlib.import_module) -> Exception | None:
    """Import a module without warnings and logs. Returns the exception if it raises one."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.disable(logging.CRITICAL)
        try:
            load(name)
        except Exception as error:
            return error
        finally:
            logging.disable(logging.NOTSET)
    return None


def torch() -> Finding:
    error = attempt("torch")
    version = version_of("torch")
    if error is not None:
        why = f"cannot be imported: {exits.summary(error)}" if version else install_extra()
        return Finding("torch", version or "not installed", why)
    return Finding("torch", sys.modules["torch"].__version__)


def gpu() -> Finding:
    """CUDA or ROCm, whichever torch is built for, and the GPUs that it can use."""
    if "torch" not in sys.modules:
        return Finding("CUDA", "torch is missing")
    hardware = gpus.find_gpus()
    return gpu_finding(hardware, [gpus.gpu_here(index) for index in range(hardware.num_usable)])


def gpu_finding(hardware: gpus.FoundGpus, usable: list[gpus.Gpu]) -> Finding:
    name = hardware.toolkit.name
    if hardware.wheel is None:
        return Finding("CUDA", "torch is built for the CPU", gpus.unused(hardware), needed=False)
    if not usable:
        wrong = gpus.unusable(hardware)
        why = "no GPU can be used here: normal on a login node, wrong on a compute node (driver? --gpus-per-node?)"
        return Finding(name, f"{hardware.wheel}, no GPU", wrong or why, needed=wrong is not None)
    kinds = Counter(f"{each.name} ({gpus.described(each.architecture).split()[-1]})" for each in usable)
    old = [line for each in usable if (line := gpus.too_old(each))]
    without_bfloat16 = [line for each in usable if (line := gpus.lacks_bfloat16(each))]
    wrong = next(iter([*old, *without_bfloat16]), None)
    text = ", ".join(f"{count} x {kind}" for kind, count in kinds.items())
    return Finding(name, f"{hardware.wheel}, {text}", wrong, needed=bool(old))


def _on_gpu() -> bool:
    return "torch" in sys.modules and sys.modules["torch"].cuda.is_available()


def triton() -> Finding:
    """Triton, which is needed if there is a GPU."""
    wrong = gpus.missing_triton(os.environ, gpus.triton_is_installed()) if _on_gpu() else None
    return Finding("triton", version_of("triton") or "not installed (needed on GPUs only)", wrong)


def transformer_engine() -> Finding:
    version = version_of("transformer-engine")
    if not _on_gpu():  # it cannot be imported without a driver, and jobs do not try
        return Finding("transformer-engine", f"{version or 'not installed'} (used on GPUs, for fp8)")
    if importlib.util.find_spec("transformer_engine") is None:
        return Finding("transformer-engine", version or "not installed (used for fp8)")
    error = attempt("transformer_engine.pytorch")
    if error is None:
        return Finding("transformer-engine", version or "installed")
    return Finding(
        "transformer-engine",
        f"{version or 'installed'}, half-installed",
        f"it is installed but cannot be imported ({exits.summary(error)}), and megatron-core then fails to import: "
        "`pip uninstall transformer-engine transformer-engine-torch`, or on CUDA install `transformer-engine[pytorch]` "
        "built for this torch",
    )


def megatron_core() -> Finding:
    version = version_of("megatron-core")
    if version is None:
        return Finding("megatron-core", "not installed", install_extra())
    error = attempt("megatron.core", _as_a_job_does)
    if error is None:
        return Finding("megatron-core", version)
    why = f"cannot be imported: {exits.summary(error)}"
    if importlib.util.find_spec("transformer_engine") is not None and attempt("transformer_engine") is not None:
        why = "cannot be imported because Transformer Engine is half-installed, see transformer-engine"
    return Finding("megatron-core", version, why)


def _as_a_job_does(name: str) -> None:
    from hpcrl.runtime.platform import import_megatron

    import_megatron()
    importlib.import_module(name)


def apex() -> Finding:
    """NVIDIA's Apex, or the unrelated package that `pip install apex` installs."""
    spec = importlib.util.find_spec("apex")
    if spec is None:
        return Finding("apex", "not installed (not needed)")
    folders = [Path(folder) for folder in spec.submodule_search_locations or []]
    if any((folder / "normalization").is_dir() or (folder / "multi_tensor_apply").is_dir() for folder in folders):
        return Finding("apex", f"NVIDIA Apex {version_of('apex') or ''}".strip())
    why = "this is PyPI's `apex`, an unrelated package, not NVIDIA's Apex; megatron-core may fail because of it: "
    return Finding("apex", f"{version_of('apex') or 'installed'}, not NVIDIA's", why + "`pip uninstall apex`")


def requirements() -> Finding:
    """The requirements in hpcrl's own metadata, and which of its extras are installed."""
    from packaging.requirements import Requirement

    try:
        asked = [Requirement(text) for text in metadata.requires("hpcrl") or []]
    except metadata.PackageNotFoundError:
        return Finding("hpcrl", "not installed", "runs from its source folder only; `pip install -e .`", needed=False)

    def of(extra: str) -> list[Requirement]:
        """Requirements of an extra, with those of every installation."""
        return [one for one in asked if one.marker is None or one.marker.evaluate({"extra": extra})]

    def missing(extra: str) -> list[str]:
        return [one.name for one in of(extra) if version_of(one.name) is None]

    wrong = []
    for requirement in of(""):
        version = version_of(requirement.name)
        if version is not None and not requirement.specifier.contains(version, prereleases=True):
            wrong.append(f"{requirement.name} {version} found, {requirement.specifier} expected")
    here = extra_here()
    if absent := [name for name in missing(here) if name != "mpich"]:  # the site may have another MPI library
        wrong.append(f"not installed: {', '.join(absent)}")
    extras = [extra for extra in metadata.metadata("hpcrl").get_all("Provides-Extra") or [] if not missing(extra)]
    installed = f"{version_of('hpcrl')}, extras: {', '.join(extras) or 'none'}"
    return Finding("hpcrl", installed, f"{'; '.join(wrong)}; {install_extra()}" if wrong else None)


def sandbox() -> Finding:
    """Isolation of the programs that a model wrote, which code rewards run."""
    isolation = probe_isolation()
    name, limits = "code sandbox", "limits of time, memory and processes"
    parts = (
        (isolation.network or isolation.filtered, "no network", "use the network"),
        (isolation.network, "no other processes", "read and kill your processes"),
        # sockets with a path are reachable from a network namespace
        (
            isolation.shown,
            "none of your files",
            "read and write your files, ground truths too, and connect to services",
        ),
        (isolation.filtered, "none of your keys", "use your keys in the kernel, and memory that no limit counts"),
    )
    has = ", ".join(what for holds, what, _ in parts if holds)
    protection = f"{has}; {limits}" if has else f"{limits} only"
    if isolation.complete:
        return Finding(name, protection)
    reach = ", ".join(what for holds, _, what in parts if not holds)
    if isolation.shown:
        needed = "seccomp filters (CONFIG_SECCOMP_FILTER, on x86_64 or aarch64)"
    else:
        needed = (
            "user namespaces, and mounts in them (user.max_user_namespaces, user.max_mnt_namespaces, or the "
            "container's seccomp profile)"
        )
    return Finding(
        name,
        protection,
        f"programs under test can {reach} ({isolation.why_not}); where you score code, allow {needed}",
        needed=False,
    )


def task_sandbox() -> Finding:
    """Sandboxes in which environments run a task's commands."""
    why_not, layers = probe_sandbox()
    if why_not:
        return Finding("task sandbox", "none", f"{why_not}; where environments run commands, {NEEDED}", needed=False)
    protection = "no network, no other processes, none of your files; files of a task in memory, with snapshots"
    if layers:
        return Finding("task sandbox", protection)
    copied = "each sandbox copies its task's folder, and cannot have an image: no overlayfs over a tmpfs (Linux 6.6)"
    return Finding("task sandbox", protection, copied, needed=False)


def cores() -> Finding:
    return Finding("cores", f"{len(os.sched_getaffinity(0))} for this process, {os.cpu_count()} on the node")


def memory() -> Finding:
    import psutil

    host = psutil.virtual_memory()
    return Finding("memory", f"{host.available / GIB:.1f} GiB free of {host.total / GIB:.1f} GiB")


def shared_memory(ranks: int) -> Finding:
    return shared_memory_finding(shared_memory_free(), ranks)


def shared_memory_finding(free: int | None, ranks: int) -> Finding:
    """/dev/shm, through which the ranks of a node exchange messages; containers often have 64 MB of it."""
    if free is None:
        return Finding("/dev/shm", "missing", "MPI needs it for ranks on one node: mount a tmpfs there")
    why = "too small for this many ranks: remove old files there, or give the container more"
    return Finding("/dev/shm", f"{free / GIB:.2f} GiB free", why if free < ranks * SHARED_MEMORY_PER_RANK else None)


def shared_memory_free() -> int | None:
    """Bytes free in /dev/shm; None if it is missing."""
    return shutil.disk_usage("/dev/shm").free if os.path.isdir("/dev/shm") else None


def disk() -> Finding:
    usage = shutil.disk_usage(".")
    why = None if usage.free > GIB else "less than 1 GiB for runs and checkpoints: set run.dir to another file system"
    return Finding("disk", f"{usage.free / GIB:.1f} GiB free at {os.getcwd()}", why, needed=False)
