"""The world of ranks: MPI first, then torch.distributed on top of it, and the two ways out."""

from __future__ import annotations

import ctypes
import faulthandler
import ipaddress
import logging
import os
import resource
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from hpcrl.runtime import cpu_binding, exits, gpus, trtllm
from hpcrl.runtime.exits import InputError
from hpcrl.runtime.launcher import split_world
from hpcrl.runtime.mpi import all_gather_object, barrier, broadcast_object, run_collectively
from hpcrl.runtime.rank_status import RankStatus
from hpcrl.runtime.rendezvous import KeyValueStore
from hpcrl.runtime.stop import StopRequests
from hpcrl.sandbox import fork_server

if TYPE_CHECKING:
    import torch
    from mpi4py import MPI

T = TypeVar("T")

log = logging.getLogger(__name__)

# an address reserved for documentation, which takes the default route; then private networks, for nodes without one
PROBES = ("192.0.2.1", "10.0.0.1", "172.16.0.1", "192.168.0.1")
_to_close: list[Callable[[], None]] = []
STORE_TIMEOUT = timedelta(minutes=10)
SECONDS_TO_REPORT = 1.0  # launchers drop what is still in their pipes when MPI_Abort arrives


@dataclass(frozen=True)
class World:
    rank: int
    size: int
    comm: MPI.Intracomm
    local_rank: int
    local_size: int
    threads: int
    device: torch.device
    key_value_store: KeyValueStore
    stop: StopRequests | None = None  # where the job heeds signals
    ends_at: float | None = None  # end of the allocation, in seconds since the epoch
    status: RankStatus = field(default_factory=RankStatus)
    nccl_timeout: timedelta | None = None  # of collectives, where device tensors go over NCCL

    def barrier(self) -> None:
        barrier(self.comm)

    def broadcast_object(self, obj: Any, root: int = 0) -> Any:
        """`obj` of rank `root` on every rank, by pickle."""
        return broadcast_object(self.comm, obj, root)

    def all_gather_object(self, obj: Any) -> list[Any]:
        """Every rank's `obj`, in rank order, on every rank, by pickle."""
        return all_gather_object(self.comm, obj)

    def run_collectively(self, fn: Callable[[], T]) -> T:
        """Run `fn` on every rank and agree on how it went, see `mpi.run_collectively`."""
        return run_collectively(self.comm, fn)


def start_mpi() -> MPI.Intracomm:
    """Initialise MPI, first thing and in the main thread, and return a duplicate of its world for the program's use.

    MPI_THREAD_MULTIPLE where the library has it, though only the main thread calls MPI. Ranks that were meant to be one
    world and came up as several are an InputError.
    """
    prepare_environment(os.environ)
    launched = dict(os.environ)  # an Open MPI singleton adds OMPI_COMM_WORLD_SIZE of its own while it starts
    try:
        import mpi4py

        mpi4py.rc.thread_level = "multiple"
        mpi4py.rc.finalize = False  # a planned end does; after an exception Finalize would wait for the others forever
        # A hang in here is nobody's to watch yet, and no Python runs meanwhile: a thread of C ends it, with this stack.
        faulthandler.dump_traceback_later(float(os.environ.get("HPCRL_MPI_START_SECONDS", 600)), exit=True)
        from mpi4py import MPI

        faulthandler.cancel_dump_traceback_later()
    except (ImportError, RuntimeError) as error:
        raise InputError(f"cannot load MPI: {error}; `pip install mpi4py mpich`, then `hpcrl check`") from error

    problem = split_world(launched, MPI.COMM_WORLD.size, MPI.Get_library_version())
    if problem:
        raise InputError(problem)
    from hpcrl.runtime.mpi import duplicate

    return duplicate(MPI.COMM_WORLD)


def prepare_environment(environ: dict[str, str] | os._Environ[str]) -> None:
    """Defaults that libraries read when they start; what the user has set stays."""
    environ.setdefault("HF_HUB_OFFLINE", "1")
    environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if on_one_node(environ):
        # else MPICH and NCCL listen on the outside address
        environ.setdefault("UCX_NET_DEVICES", "lo")
        environ.setdefault("NCCL_SOCKET_IFNAME", "lo")


def use_expandable_segments(environ: dict[str, str] | os._Environ[str]) -> None:
    """Unless the user has configured torch's allocator: roles and the KV cache take turns with blocks of different
    sizes, which fragments a GPU's memory."""
    if "PYTORCH_ALLOC_CONF" not in environ:  # the newer name of the same
        environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")


def on_one_node(environ: Mapping[str, str]) -> bool:
    """Whether the launcher's variables say that all ranks are on this node; MPI cannot be asked before it starts."""
    for here, all_ranks in (("MPI_LOCALNRANKS", "PMI_SIZE"), ("OMPI_COMM_WORLD_LOCAL_SIZE", "OMPI_COMM_WORLD_SIZE")):
        if here in environ and all_ranks in environ:
            return environ[here] == environ[all_ranks]
    nodes = environ.get("SLURM_STEP_NUM_NODES", environ.get("SLURM_JOB_NUM_NODES"))
    if nodes is not None:
        return nodes == "1"
    return not any(name in environ for name in ("PMI_SIZE", "PMIX_RANK"))  # started without a launcher


def start_torch(
    comm: MPI.Intracomm,
    backend: str = "mpi_host",
    *,
    with_tensorrt_llm: bool = False,
    needs_bfloat16: bool = False,
    cpu_bind: bool = False,
    nccl_timeout: float = 1800.0,
    stop: StopRequests | None = None,
    ends_at: float | None = None,
    status: RankStatus | None = None,
) -> World:
    """Start torch and torch.distributed on the ranks of `comm`. Collective.

    Args:
        backend: "mpi_host" (our own over MPI) or "gloo", for the CPU. With CUDA the world is NCCL for device tensors
            and gloo for host tensors (torch takes a Python process group only as the whole of a group); that
            combination has not been tried on a machine with GPUs yet. Ranks that share a GPU, which HPCRL_SHARE_GPU=1
            allows for tests, have "mpi_host" for both, which copies device tensors through the host.
        with_tensorrt_llm: import that package here, on all ranks; `comm` must then have all of MPI's world.
        needs_bfloat16: whether a GPU that lacks bfloat16 is an InputError.
        cpu_bind: bind the rank, its threads and children to CPUs near its GPU, where no launcher has bound it.
        nccl_timeout: seconds after which a collective of NCCL, or on GPUs of gloo, that has not ended fails.
        stop: gets the store through which rank 0 sees signals.
        ends_at: for `World`.
    """
    from mpi4py import MPI

    barrier(comm)  # Split_type spins until all ranks are here
    node: MPI.Intracomm = comm.Split_type(MPI.COMM_TYPE_SHARED, key=comm.rank)  # type: ignore[assignment]
    local_rank, local_size = node.rank, node.size
    one_node = all(size == comm.size for size in all_gather_object(comm, local_size))
    if one_node:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    launched = dict(os.environ)
    threads = rank_threads(launched, len(os.sched_getaffinity(0)), local_size)
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))  # before torch, whose OpenMP reads it once
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    if not with_tensorrt_llm:  # whose sleep mode has memory pools, which torch 2.9 does not make of such segments
        use_expandable_segments(os.environ)

    import torch
    import torch.distributed as dist

    device, shares_gpu = take_gpu(comm, local_rank, needs_bfloat16=needs_bfloat16)
    if device.type == "cuda" and cpu_bind:
        pci_id = gpus.pci_id(torch.cuda.get_device_properties(device))
        if cpus := cpu_binding.bind_near_gpu(node, pci_id):
            log.info("bound to CPUs %s, near GPU %s", cpu_binding.format_cpu_list(cpus), pci_id)
            threads = rank_threads(launched, len(cpus), 1)
            os.environ["OMP_NUM_THREADS"] = str(threads)
    node.Free()
    torch.set_num_threads(threads)
    if with_tensorrt_llm:
        trtllm.import_on_all_ranks(comm)
    timeout = None
    if shares_gpu:
        backend = "mpi_host"
        torch.autograd.set_multithreading_enabled(False)  # backward of a GPU has its own thread, and MPI serves one
    elif device.type == "cuda":
        backend, timeout = "cpu:gloo,cuda:nccl", timedelta(seconds=nccl_timeout)
    if backend == "mpi_host":
        from hpcrl.runtime import mpi_backend

        mpi_backend.register(comm)
    store, address = open_store(comm, one_node)
    key_value_store = KeyValueStore(connect_store(address, comm.size))
    if stop is not None:
        stop.connect(key_value_store)
    dist.init_process_group(
        backend,
        store=dist.PrefixStore("hpcrl", store),
        rank=comm.rank,
        world_size=comm.size,
        timeout=timeout,
        device_id=device if timeout else None,  # connects now, so that a broken network ends the job here
    )
    if timeout:
        # Else NCCL splits a group's communicator from the world's, which is collective over all ranks, and a group of
        # size 1 is made by its only member.
        dist.distributed_c10d._get_default_group().bound_device_id = None
    here = status or RankStatus()
    return World(
        comm.rank,
        comm.size,
        comm,
        local_rank,
        local_size,
        threads,
        device,
        key_value_store,
        stop,
        ends_at,
        here,
        timeout,
    )


def take_gpu(comm: MPI.Intracomm, local_rank: int, *, needs_bfloat16: bool) -> tuple[torch.device, bool]:
    """This rank's device, and whether ranks share a GPU. Collective; InputError on all ranks where one cannot run."""
    import torch

    found = gpus.find_gpus()
    run_collectively(comm, lambda: gpus.check_usable(found))
    if comm.rank == 0 and (line := gpus.unused(found)):
        log.warning(line)
    counts = all_gather_object(comm, found.num_usable)
    run_collectively(comm, lambda: gpus.check_all_or_none(counts))
    if not found.num_usable:
        return torch.device("cpu"), False
    device = torch.device("cuda", local_rank % found.num_usable)
    torch.cuda.set_device(device)
    gpu, has_triton = gpus.gpu_here(device.index), gpus.triton_is_installed()
    run_collectively(
        comm,
        lambda: gpus.check_gpu(gpu, needs_bfloat16=needs_bfloat16, environ=os.environ, has_triton=has_triton),
    )
    uuids = all_gather_object(comm, str(torch.cuda.get_device_properties(device).uuid))
    may_share = os.environ.get("HPCRL_SHARE_GPU") == "1"
    run_collectively(comm, lambda: None if may_share else gpus.check_own_gpus(uuids))
    return device, len(set(uuids)) < len(uuids)


def rank_threads(environ: Mapping[str, str], cores: int, local_size: int) -> int:
    """Threads of a rank: an even share of the cores it may use, unless OMP_NUM_THREADS says otherwise.

    Under `srun --cpus-per-task` with binding each rank sees only its own cores; where ranks share a node without
    binding they all see the node's.
    """
    chosen = environ.get("OMP_NUM_THREADS", "")
    if chosen.isdigit() and int(chosen) > 0:
        return int(chosen)
    bound = environ.get("SLURM_CPUS_PER_TASK", "")
    if bound.isdigit() and cores == int(bound):
        return cores
    return max(1, cores // local_size)


def open_store(comm: MPI.Intracomm, one_node: bool) -> tuple[torch.distributed.Store, tuple[str, int]]:
    """The c10d store on rank 0, on a free port, listening on loopback only when there is one node; and its address."""
    from torch.distributed import TCPStore

    host, port = "127.0.0.1", 0
    if comm.rank == 0:
        if not one_node:
            host = own_address(socket.gethostname())
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))  # two connections of every rank end here
        listener = socket.socket()
        listener.bind((host, 0))
        listener.listen(1024)
        port = listener.getsockname()[1]
        # the port is open before its number is told, so nobody can take it in between
        store = TCPStore(
            host,
            port,
            comm.size,
            is_master=True,
            timeout=STORE_TIMEOUT,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
    host, port = broadcast_object(comm, (host, port))
    return (store if comm.rank == 0 else connect_store((host, port), comm.size)), (host, port)


def connect_store(address: tuple[str, int], size: int) -> torch.distributed.Store:
    """A connection of its own: one serves one thread at a time."""
    from torch.distributed import TCPStore

    return TCPStore(*address, size, is_master=False, timeout=STORE_TIMEOUT, wait_for_workers=False)


def own_address(hostname: str) -> str:
    """An IPv4 address of this node for the other nodes."""
    try:
        named = socket.gethostbyname(hostname)
    except OSError:
        named = None
    host = reachable((named, *map(interface_address, PROBES)))
    if host is None:
        raise InputError(
            f"this node's name {hostname!r} resolves to {named or 'nothing'}, which other nodes do not reach, and no "
            "interface leads to them; give the name the node's address in /etc/hosts or DNS"
        )
    return host


def reachable(addresses: Iterable[str | None]) -> str | None:
    """The first IPv4 address that is neither loopback (127.0.1.1, as Debian resolves a node's own name) nor 0.0.0.0."""
    for address in addresses:
        if address is not None:
            ip = ipaddress.IPv4Address(address)
            if not (ip.is_loopback or ip.is_unspecified):
                return address
    return None


def interface_address(destination: str) -> str | None:
    """Address of the interface that leads to `destination`, None without a route. Connecting UDP sends no packet."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((destination, 9))
        except OSError:
            return None
        return str(probe.getsockname()[0])


def before_leaving_mpi(close: Callable[[], None]) -> None:
    """Have `finish` call `close`, on all ranks alike, while MPI still works: for what uses it from a thread."""
    _to_close.append(close)


def finish(code: int) -> NoReturn:
    """Planned end: every rank calls it with the same code. Flush, meet, leave MPI, exit at once."""
    from mpi4py import MPI

    flush()
    barrier(MPI.COMM_WORLD)
    while _to_close:
        _to_close.pop()()
    if "torch.distributed" in sys.modules:
        cuda, dist = sys.modules["torch"].cuda, sys.modules["torch.distributed"]
        if dist.is_initialized():
            if cuda.is_initialized():
                cuda.synchronize()  # kernels and autograd's threads must not meet the libraries' teardown
            dist.destroy_process_group()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # srun --kill-on-bad-exit sends it when the first of us has left
    MPI.Finalize()
    fork_server.remove_files()
    flush()
    # Not os._exit: MPICH 5 takes leave of the launcher in a C exit handler, and mpiexec kills the ranks that are still
    # leaving when one goes without it. Not sys.exit: Python's own teardown takes long and waits for threads. PyDLL
    # keeps the interpreter's lock, so that no other thread runs into the libraries' teardown.
    ctypes.PyDLL(None).exit(code)
    raise AssertionError("exit returned")


def abort(
    error: BaseException,
    *,
    run_dir: str | os.PathLike[str] | None = None,
    rank: int,
    role: str | None = None,
    phase: str | None = None,
) -> NoReturn:
    """Unplanned end of the whole job from one rank, whatever the others are doing.

    The failing rank tells by itself, on stderr, as rank 0 may be deep in a wait; launchers forward every rank's stderr.
    When several fail, the first one (whose exit.json it is) speaks; the others only fill their own logs.
    """
    code = exits.exit_code(error)
    said = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    first = exits.write_exit(run_dir, code, rank, role, phase, exits.summary(error))
    if logging.root.handlers:  # the rank's log file; without one Python would print this to stderr
        logging.root.error("rank %d ends the job\n%s", rank, said.rstrip())
    if first:
        if exits.is_user_error(error):
            text = exits.one_line(error)
        elif code == exits.INTERRUPTED:
            text = "hpcrl: interrupted"
        else:
            where = f"role {role or '-'}, phase {phase or '-'}"
            text = f"hpcrl: rank {rank} failed ({where}): {type(error).__name__}: {error}\n{said.rstrip()}"
            if run_dir is not None:
                text += f"\nhpcrl: see {os.path.join(run_dir, 'logs')} and {os.path.join(run_dir, 'exit.json')}"
        os.write(2, (text + "\n").encode(errors="replace"))
    flush()
    # The first needs this for its words to reach the terminal; the others leave the first room to speak.
    time.sleep(SECONDS_TO_REPORT if first else 2 * SECONDS_TO_REPORT)
    kill_job(code)


def kill_job(code: int) -> NoReturn:
    """MPI_Abort without MPI's own words: they would bury the report."""
    from mpi4py import MPI

    fork_server.remove_files()
    silence = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silence, 2)
    MPI.COMM_WORLD.Abort(code)
    os._exit(code)


def flush() -> None:
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            pass


def set_deterministic_libraries(full_determinism: bool) -> None:
    """Environment that the libraries read when they start: to be called before torch starts CUDA."""
    if full_determinism:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        os.environ.setdefault("NCCL_ALGO", "Ring")
        os.environ.setdefault("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")  # of Transformer Engine


def set_torch_precision(full_determinism: bool) -> None:
    """fp32 products are of fp32 numbers, not of TF32's ten bits, and bf16 products are summed in fp32; with
    `full_determinism` a kernel that may add in another order each time is an error. On the CPU all hold anyway."""
    import torch

    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    if full_determinism and torch.cuda.is_available():
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False
