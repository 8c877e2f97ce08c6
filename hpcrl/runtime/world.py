"""The world of ranks: starting MPI and torch.distributed, and ending the process, planned or not."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import importlib
import logging
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from hpcrl.runtime import exits, gpus, launcher, run_owner
from hpcrl.runtime.events import Events
from hpcrl.runtime.exits import InputError
from hpcrl.runtime.gpus import rank_threads, select_device
from hpcrl.runtime.key_value_store import KeyValueStore, open_key_value_store
from hpcrl.runtime.mpi import all_gather_object, barrier, broadcast_object, duplicate, run_collectively
from hpcrl.runtime.rank_status import RankStatus
from hpcrl.runtime.stop_requests import StopRequests
from hpcrl.runtime.store import C10dStore, listening_host
from hpcrl.sandbox import fork_server
from hpcrl.sandbox.foreign_files import ERRORS, printable

if TYPE_CHECKING:
    import torch
    from mpi4py import MPI

    from hpcrl.runtime.node_memory import NodeMemory

T = TypeVar("T")

log = logging.getLogger(__name__)

_to_close: list[Callable[[], None]] = []


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
    stop: StopRequests | None = None  # if the job handles signals
    ends_at: float | None = None  # end of the allocation, in seconds since the epoch
    status: RankStatus = field(default_factory=RankStatus)
    nccl_timeout: timedelta | None = None  # of collectives, if device tensors use NCCL
    events: Events = field(default_factory=Events)  # of rank 0
    node_memory: NodeMemory | None = None  # for snapshots

    def barrier(self) -> None:
        barrier(self.comm)

    def broadcast_object(self, obj: Any, root: int = 0) -> Any:
        """Return rank `root`'s `obj` on every rank. Collective; uses pickle."""
        return broadcast_object(self.comm, obj, root)

    def all_gather_object(self, obj: Any) -> list[Any]:
        """Return every rank's `obj`, in rank order, on every rank. Collective; uses pickle."""
        return all_gather_object(self.comm, obj)

    def run_collectively(self, fn: Callable[[], T]) -> T:
        """Run `fn` on every rank; a user error on any rank is raised on all of them. See `mpi.run_collectively`."""
        return run_collectively(self.comm, fn)


def start_mpi() -> MPI.Intracomm:
    """Initialise MPI and return a duplicate of its world communicator. Call it first, in the main thread.

    Requests MPI_THREAD_MULTIPLE, though only the main thread calls MPI. Raises InputError if MPI cannot be loaded or
    would abort, or if the launcher started several ranks and each of them is a world of its own.
    """
    prepare_environment(os.environ)
    launched = dict(os.environ)  # an Open MPI singleton adds OMPI_COMM_WORLD_SIZE of its own while it starts
    try:
        import mpi4py

        mpi4py.rc.thread_level = "multiple"
        mpi4py.rc.finalize = False  # `finish` does it; after an exception it would wait for the other ranks forever
        # The watchdog does not run yet, and no other Python thread could: a C thread prints the stack and ends a hang.
        faulthandler.dump_traceback_later(float(os.environ.get("HPCRL_MPI_START_SECONDS", 600)), exit=True)
        if launcher.slurm_pmi1(os.environ):
            _import_mpi_in_thread()
        else:
            _load_mpi()
        from mpi4py import MPI

        faulthandler.cancel_dump_traceback_later()
    except (ImportError, RuntimeError) as error:
        raise InputError(
            f"cannot load MPI: {error}; `pip install 'hpcrl[cpu]'` brings MPICH; then `hpcrl check`"
        ) from error

    problem = launcher.split_world(launched, MPI.COMM_WORLD.size, MPI.Get_library_version())
    if problem:
        raise InputError(problem)
    return duplicate(MPI.COMM_WORLD)


def _import_mpi_in_thread() -> None:
    """Import mpi4py.MPI, which starts MPI, where Slurm answers MPICH's PMI-1 requests.

    Slurm reads at most 1,024 bytes of a request. MPICH sends 4,096 bytes from where a rank's address begins, in
    hexadecimal, in up to 1,023 characters a request; only runs of zeros are shortened. In the heap of a program that
    has imported a lot, text lies behind the address. The first allocation of a thread starts a heap of its own, which
    is all zeros, and MPICH's own buffers, which have the text of earlier requests, are kept out of it (measured after
    importing torch: the longest request has 680 bytes, 800 with the buffers, and 1,060 without a thread).
    """
    with ThreadPoolExecutor(1) as executor:
        executor.submit(_import_mpi).result()


# Bytes from which an allocation has pages of its own. 32 MiB is the most that glibc takes, and that it sets by itself.
OWN_PAGES, LARGEST_KEPT = 4096, 2**25
MOST_KEPT = 2**30


def set_allocator(mmap_threshold: int, trim_threshold: int) -> None:
    """Set two parameters of glibc's mallopt(3). Other C libraries have no such parameters."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(-3, mmap_threshold)
        mallopt(-1, trim_threshold)


def _import_mpi() -> None:
    set_allocator(OWN_PAGES, 2 * LARGEST_KEPT)
    try:
        _load_mpi()
    finally:
        set_allocator(LARGEST_KEPT, 2 * LARGEST_KEPT)


def _load_mpi() -> None:
    """Import mpi4py.MPI, which starts MPI. If GPU-aware MPI is requested, check first that MPI would not abort."""
    import mpi4py

    mpi4py.rc.initialize = not launcher.asks_for_gpu_support(os.environ)
    mpi: Any = importlib.import_module("mpi4py.MPI")
    if mpi4py.rc.initialize or mpi.Is_initialized():
        return
    if launcher.is_cray(mpi.Get_library_version()):
        if problem := launcher.lacks_gpu_support(launcher.loaded_libraries()):
            raise InputError(problem)
        if launcher.is_first_launched(os.environ):
            print(f"hpcrl: warning: {launcher.BESIDE_NCCL}", file=sys.stderr)
    mpi.Init_thread(mpi.THREAD_MULTIPLE)


def prepare_environment(environ: dict[str, str] | os._Environ[str]) -> None:
    """Set defaults of variables that libraries read when they start. Variables that the user has set stay."""
    environ.setdefault("HF_HUB_OFFLINE", "1")
    environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if launcher.on_one_node(environ):
        # otherwise MPICH and NCCL listen on the address of the outside network; shared memory reaches all ranks
        environ.setdefault("UCX_NET_DEVICES", "lo")
        environ.setdefault("UCX_TLS", "^tcp")
        environ.setdefault("NCCL_SOCKET_IFNAME", "lo")


def use_expandable_segments(environ: dict[str, str] | os._Environ[str]) -> None:
    """Use expandable segments in torch's caching allocator, unless the user has configured it.

    Roles and the KV cache allocate blocks of different sizes in turn, which fragments the GPU's memory otherwise. Not
    on AMD: ROCm before 7.0 has none, and with newer ones a copy was reported to hang
    (https://github.com/pytorch/pytorch/issues/192259).
    """
    is_configured = "PYTORCH_ALLOC_CONF" in environ  # the newer name of the variable
    if not is_configured and not gpus.amd_devices():
        environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")


def set_deterministic_libraries(full_determinism: bool) -> None:
    """Set the variables that make cuBLAS, NCCL and Transformer Engine deterministic. Call it before CUDA starts."""
    if full_determinism:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        os.environ.setdefault("NCCL_ALGO", "Ring")
        os.environ.setdefault("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")  # of Transformer Engine


def set_torch_precision(full_determinism: bool) -> None:
    """Use full fp32 (no TF32) in fp32 products, and fp32 sums in bf16 products.

    With `full_determinism`, nondeterministic kernels raise. The CPU does all of this by default. The dtype of weights
    and activations is `model.dtype`; log-probs, losses, gradient sums and optimizer state are fp32 whatever it is.
    """
    import torch

    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    if full_determinism and torch.cuda.is_available():
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False


def start_torch(
    comm: MPI.Intracomm,
    backend: str = "mpi_host",
    *,
    first: Callable[[MPI.Intracomm], None] | None = None,
    expandable_segments: bool = True,
    needs_bfloat16: bool = False,
    cpu_bind: bool = False,
    nccl_timeout: float = 1800.0,
    stop: StopRequests | None = None,
    ends_at: float | None = None,
    status: RankStatus | None = None,
) -> World:
    """Start torch and torch.distributed on the ranks of `comm`. Collective.

    Args:
        backend: "mpi_host" (`mpi_backend`) or "gloo", for the CPU. With CUDA the backend is NCCL for device tensors
            and gloo for host tensors, because a Python process group cannot be one of two backends of a group. Ranks
            that share a GPU (HPCRL_SHARE_GPU=1, for tests) use "mpi_host" for both, through the host.
        first: called with `comm`, collectively, before torch.distributed starts, to import a library that calls MPI.
        expandable_segments: CUDA's allocator may use them.
        needs_bfloat16: raise InputError for a GPU without bfloat16.
        cpu_bind: bind the rank, its threads and children to CPUs near its GPU, unless the launcher has bound it.
        nccl_timeout: seconds after which a collective fails, with CUDA.
        stop: gets the store through which rank 0 sees signals.
        ends_at: end of the allocation, in seconds since the epoch.
        status: this rank's status, for `World`.
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
    _prepare_torch(os.environ, threads, expandable_segments=expandable_segments)

    import torch

    device, shares_gpu = select_device(comm, local_rank, needs_bfloat16=needs_bfloat16)
    if device.type == "cuda" and cpu_bind:
        threads = _bind(node, device, launched) or threads
    node.Free()
    torch.set_num_threads(threads)
    if device.type == "cpu":
        _prepare_cpu()
    if first is not None:
        first(comm)
    timeout = None
    if shares_gpu:
        backend = "mpi_host"
        torch.autograd.set_multithreading_enabled(False)  # backward would call MPI from another thread
    elif device.type == "cuda":
        backend, timeout = "cpu:gloo,cuda:nccl", timedelta(seconds=nccl_timeout)
    key_value_store = _connect(comm, backend, device, timeout, stop, one_node=one_node)
    here, ranks = status or RankStatus(), (local_rank, local_size)
    return World(comm.rank, comm.size, comm, *ranks, threads, device, key_value_store, stop, ends_at, here, timeout)


def _prepare_torch(environ: os._Environ[str], threads: int, *, expandable_segments: bool) -> None:
    """Set what torch reads when it is imported."""
    environ.setdefault("OMP_NUM_THREADS", str(threads))
    environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    for cache in ("LRU_CACHE_CAPACITY", "ONEDNN_PRIMITIVE_CACHE_CAPACITY"):
        environ.setdefault(cache, "256")  # of compiled products, 0.6 MiB each; 1024 by default
    if expandable_segments:
        use_expandable_segments(environ)


def _prepare_cpu() -> None:
    from hpcrl.kernels.onednn import use_onednn

    keep_freed_memory()
    use_onednn()


def _bind(node: MPI.Intracomm, device: torch.device, launched: dict[str, str]) -> int | None:
    """Bind this rank to CPUs near its GPU. Return its number of threads; None: it was not bound."""
    import torch

    pci_id = gpus.pci_id(torch.cuda.get_device_properties(device))
    cpus = gpus.bind_near_gpu(node, pci_id)
    if not cpus:
        return None
    log.info("bound to CPUs %s, near GPU %s", launcher.format_spans(cpus), pci_id)
    threads = rank_threads(launched, len(cpus), 1)
    os.environ["OMP_NUM_THREADS"] = str(threads)
    return threads


def _connect(
    comm: MPI.Intracomm,
    backend: str,
    device: torch.device,
    timeout: timedelta | None,
    stop: StopRequests | None,
    *,
    one_node: bool,
) -> KeyValueStore:
    """Start torch.distributed over a store of rank 0's.

    Args:
        timeout: timeout of NCCL's collectives; None: without NCCL.
    """
    import torch.distributed as dist

    if backend == "mpi_host":
        from hpcrl.runtime import mpi_backend

        mpi_backend.register(comm)
    host = listening_host(one_node) if comm.rank == 0 else None
    store = C10dStore.open(comm, host)
    key_value_store = open_key_value_store(comm, host)
    if timeout is None:  # NCCL's process groups open connections of their own, also later
        store.close_to_others(comm)
    if stop is not None:
        stop.connect(key_value_store)
    dist.init_process_group(
        backend,
        store=store.connection,
        rank=comm.rank,
        world_size=comm.size,
        timeout=timeout,
        device_id=device if timeout else None,  # connects now, so that a broken network ends the job here
    )
    if timeout:
        # Otherwise NCCL splits each group's communicator from the world's, which is collective over all ranks, but a
        # group of size 1 is made by its only member.
        dist.distributed_c10d._get_default_group().bound_device_id = None
    return key_value_store


def before_mpi_finalize(close: Callable[[], None]) -> None:
    """Have `finish` call `close` before MPI_Finalize, for threads that use MPI. Call it on all ranks."""
    _to_close.append(close)


def finish(code: int) -> NoReturn:
    """Planned end: flush logs, finalize MPI, exit. Collective; every rank passes the same exit code."""
    from mpi4py import MPI

    flush()
    release_folder = run_owner.let_go()
    barrier(MPI.COMM_WORLD)
    release_folder()
    while _to_close:
        _to_close.pop()()
    if "torch.distributed" in sys.modules:
        cuda, dist = sys.modules["torch"].cuda, sys.modules["torch.distributed"]
        if dist.is_initialized():
            if cuda.is_initialized():
                cuda.synchronize()  # kernels and autograd's threads must end before the libraries are torn down
            dist.destroy_process_group()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # srun --kill-on-bad-exit sends it when the first rank has exited
    MPI.Finalize()
    fork_server.remove_files()
    flush()
    # Not os._exit: MPICH 5 disconnects from the launcher in a C exit handler; if a rank exits without it, mpiexec kills
    # the ranks that are still exiting. Not sys.exit: Python's teardown is slow and waits for threads. PyDLL keeps the
    # interpreter's lock, so that no other thread runs during the libraries' teardown.
    ctypes.PyDLL(None).exit(code)
    raise AssertionError("exit returned")


def finish_with_error(error: BaseException, rank: int, run_dir: str | os.PathLike[str] | None = None) -> NoReturn:
    """End with exit code 2 after a user error that all ranks have raised. Rank 0 reports it. Collective."""
    if rank == 0:
        exits.write_exit(run_dir, exits.BAD_INPUT, error=exits.summary(error))
        print(exits.one_line(error), file=sys.stderr)
        exits.wait_before_kill()
    finish(exits.BAD_INPUT)


def abort(
    error: BaseException,
    *,
    run_dir: str | os.PathLike[str] | None = None,
    rank: int,
    role: str | None = None,
    phase: str | None = None,
) -> NoReturn:
    """Unplanned end: report `error` and end the whole job from this rank, whatever the others are doing.

    The failing rank prints to its own stderr, because rank 0 may be waiting; launchers forward all ranks' stderr.
    If several ranks fail, only the first one, which writes exit.json, prints; the others write to their log files.
    """
    code = exits.exit_code(error)
    stack = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    first = exits.write_exit(run_dir, code, rank, role, phase, exits.summary(error))
    if code == exits.INTERRUPTED and run_dir is None:
        first = rank == 0  # Ctrl-C ends all ranks
    if logging.root.handlers:  # the rank's log file; without a handler logging would print to stderr
        logging.root.error("rank %d ends the job\n%s", rank, stack.rstrip())
    if first:
        if exits.is_user_error(error):
            text = exits.one_line(error)
        elif code == exits.INTERRUPTED:
            text = "hpcrl: interrupted"
        else:
            where = f"role {role or '-'}, phase {phase or '-'}"
            text = f"hpcrl: rank {rank} failed ({where}): {type(error).__name__}: {error}\n{stack.rstrip()}"
            if run_dir is not None:
                text += f"\nhpcrl: see {os.path.join(run_dir, 'logs')} and {os.path.join(run_dir, 'exit.json')}"
        os.write(2, (printable(text) + "\n").encode(errors=ERRORS))
    flush()
    # Time for the first rank's message to reach the terminal; the others wait longer than the first one.
    time.sleep(exits.SECONDS_TO_REPORT if first else 2 * exits.SECONDS_TO_REPORT)
    exits.wait_before_kill()
    kill_job(code)


def kill_job(code: int) -> NoReturn:
    """Call MPI_Abort, without the messages of the MPI library, which would hide the report."""
    from mpi4py import MPI

    fork_server.remove_files()
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 2)
    MPI.COMM_WORLD.Abort(code)
    os._exit(code)


def flush() -> None:
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()


def keep_freed_memory() -> None:
    """Make glibc keep freed memory for later allocations of up to 32 MiB. Larger ones are always mapped anew.

    By default it returns tensors of a megabyte to the system, so that every page of the next one is cleared and mapped
    when it is first written, which took a fifth of the time of small decode steps.
    """
    set_allocator(LARGEST_KEPT, MOST_KEPT)
