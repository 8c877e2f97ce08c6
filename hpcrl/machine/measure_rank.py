"""What a rank computes, copies and sends in a second, measured with torch on its own device.

Messages and all-reduces go through torch.distributed as jobs use it: MPI on the CPU, NCCL between GPUs. The path with
NCCL has not run on several GPUs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode

from hpcrl.machine.machine_file import bus_bandwidth, fit_link, fit_rate, group_sizes

if TYPE_CHECKING:
    from hpcrl.runtime.world import World

DTYPES = (torch.float32, torch.bfloat16)
LONGEST_CALL = 0.25  # seconds that one call may take; products and sequences grow up to it
REPEATS, REPEAT_SECONDS = 5, 0.2  # of a call, whichever ends first, but at least 3 calls
SMALL_CALLS = 500  # of an operator in a CUDA graph
SMALL_WIDTH, SMALL_TOKENS, SMALL_LAYERS = 64, 8, 20  # of layers that take nearly no time but the host's


@dataclass(frozen=True)
class Sizes:
    """What is measured.

    weight: rows and columns of the second factor of products. rows: of the first factor. heads, head_dim, lengths: of
    attention. copied: bytes of a copy, more than caches hold. calls: before each synchronization with the device.
    """

    weight: tuple[int, int]
    rows: tuple[int, ...]
    heads: int
    head_dim: int
    lengths: tuple[int, ...]
    copied: int
    calls: int


ON_CPU = Sizes((512, 2048), (1, 8, 64, 512, 4096), 4, 64, (64, 256, 1024), 2**27, 1)
ON_GPU = Sizes((8192, 8192), (1, 8, 64, 512, 4096), 32, 128, (512, 2048, 8192), 2**30, 10)


@dataclass(frozen=True)
class DeviceFigures:
    """Figures of one rank. matmul, attention: (flops, half_rows) by dtype. The others: bytes per second, and seconds.
    replay: None without CUDA graphs."""

    matmul: dict[str, tuple[float, float]]
    attention: dict[str, tuple[float, float]]
    memory_bandwidth: float
    launch: float
    replay: float | None
    host_copy: float


def best_figures(rounds: Sequence[DeviceFigures]) -> DeviceFigures:
    """Of each figure the best one: what else runs on the hardware, such as another virtual machine on the other thread
    of a core, only takes time."""

    def rates(kind: str) -> dict[str, tuple[float, float]]:
        tables = [getattr(figures, kind) for figures in rounds]
        return {dtype: max(table[dtype] for table in tables) for dtype in tables[0]}

    replays = [it.replay for it in rounds if it.replay is not None]
    return DeviceFigures(
        rates("matmul"),
        rates("attention"),
        max(it.memory_bandwidth for it in rounds),
        min(it.launch for it in rounds),
        min(replays) if replays else None,
        max(it.host_copy for it in rounds),
    )


def sizes_of(device: torch.device) -> Sizes:
    return ON_GPU if device.type == "cuda" else ON_CPU


def measure_device(device: torch.device) -> DeviceFigures:
    with torch.no_grad():
        return DeviceFigures(
            {_name(dtype): matmul_rate(device, dtype) for dtype in DTYPES},
            {_name(dtype): attention_rate(device, dtype) for dtype in DTYPES},
            memory_bandwidth(device),
            launch_seconds(device),
            replay_seconds(device) if device.type == "cuda" else None,
            host_copy(device),
        )


def matmul_rate(device: torch.device, dtype: torch.dtype) -> tuple[float, float]:
    """(flops, half_rows) of products with one weight, fitted over the numbers of rows."""
    sizes = sizes_of(device)
    inner, outer = sizes.weight
    weight = torch.randn(inner, outer, device=device).to(dtype)

    def product(rows: int) -> Callable[[], object]:
        factor = torch.randn(rows, inner, device=device).to(dtype)
        return lambda: torch.mm(factor, weight)

    rows, seconds = growing(sizes.rows, product, lambda rows: rows, device)
    return fit_rate(rows, seconds, 2.0 * inner * outer)


def attention_rate(device: torch.device, dtype: torch.dtype) -> tuple[float, float]:
    """(flops, half_rows) of causal attention forward, fitted over lengths L.

    Operations are counted as in `hpcrl.model.shape`: 2 * head_dim * (L + 1) * L per head, without products that
    the mask removes. So the time divided by L + 1 is linear in L.
    """
    sizes = sizes_of(device)

    def attention(length: int) -> Callable[[], object]:
        shape = (1, sizes.heads, length, sizes.head_dim)
        query, key, value = (torch.randn(shape, device=device).to(dtype) for _ in range(3))
        return lambda: scaled_dot_product_attention(query, key, value, is_causal=True)

    lengths, seconds = growing(sizes.lengths, attention, lambda length: length**2, device)
    per_row = [second / (length + 1) for length, second in zip(lengths, seconds, strict=True)]
    return fit_rate(lengths, per_row, 2.0 * sizes.heads * sizes.head_dim)


def memory_bandwidth(device: torch.device) -> float:
    """Bytes per second, read and written, of a copy within the device's memory."""
    source = torch.zeros(sizes_of(device).copied, dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)
    return 2 * source.numel() / median_seconds(lambda: target.copy_(source), device)


def host_copy(device: torch.device) -> float:
    """Bytes per second of a copy from pinned host memory to the device; on the CPU of a copy within memory."""
    source = torch.zeros(sizes_of(device).copied // 2, dtype=torch.uint8, pin_memory=device.type == "cuda")
    target = torch.zeros(source.shape, dtype=torch.uint8, device=device)
    return source.numel() / median_seconds(lambda: target.copy_(source, non_blocking=True), device)


class SmallLayer(torch.nn.Module):
    """A transformer layer: (tokens, width) -> the same shape."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.mlp_norm = torch.nn.RMSNorm(width), torch.nn.RMSNorm(width)
        self.to_heads, self.from_heads = torch.nn.Linear(width, 3 * width, False), torch.nn.Linear(width, width, False)
        self.up, self.down = torch.nn.Linear(width, 2 * width, False), torch.nn.Linear(width, width, False)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.to_heads(self.norm(x)).unflatten(-1, (3, 4, -1)).transpose(0, 2).unsqueeze(0)
        query, key, value = heads.unbind(2)
        attended = scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.from_heads(attended.squeeze(0).transpose(0, 1).flatten(1))
        gate, up = self.up(self.mlp_norm(x)).chunk(2, -1)
        return x + self.down(torch.nn.functional.silu(gate) * up)


class CountOperators(TorchDispatchMode):
    """Counts the operators that PyTorch runs in its context, views included."""

    def __init__(self) -> None:
        super().__init__()
        self.operators = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operators += 1
        return function(*args, **(kwargs or {}))


def launch_seconds(device: torch.device) -> float:
    """Seconds of a host for an operator, in the mean of a small layer's: with modules, arguments and results."""
    layer = SmallLayer(SMALL_WIDTH).to(device)
    x = torch.randn(SMALL_TOKENS, SMALL_WIDTH, device=device)
    with CountOperators() as count:
        layer(x)

    def layers() -> None:
        for _ in range(SMALL_LAYERS):
            layer(x)

    return median_seconds(layers, device) / SMALL_LAYERS / count.operators


def replay_seconds(device: torch.device) -> float:
    """Seconds of an operator on few elements in a replayed CUDA graph."""
    small = torch.zeros(16, device=device)
    _add(small)  # a graph may not load kernels
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        _add(small)
    return median_seconds(graph.replay, device) / SMALL_CALLS


def product_rate(device: torch.device, seconds: float) -> tuple[float, float]:
    """(operations, CPU seconds) per second of fp32 products of 64 rows, repeated for this time."""
    inner, outer = sizes_of(device).weight
    weight, factor = torch.randn(inner, outer, device=device), torch.randn(64, inner, device=device)
    used, began, count = time.process_time(), time.perf_counter(), 0
    while time.perf_counter() - began < seconds:
        torch.mm(factor, weight)
        synchronize(device)
        count += 1
    took = time.perf_counter() - began
    return 2.0 * 64 * inner * outer * count / took, (time.process_time() - used) / took


def growing(
    sizes: Sequence[int],
    make: Callable[[int], Callable[[], object]],
    cost: Callable[[int], float],
    device: torch.device,
) -> tuple[list[int], list[float]]:
    """Seconds of `make(size)()`, for growing sizes until a call is expected to take longer than `LONGEST_CALL`.

    Args:
        cost: work of a size in any unit, from which the time of the next size is expected.
    """
    measured: list[int] = []
    seconds: list[float] = []
    for size in sizes:
        if measured and seconds[-1] * cost(size) / cost(measured[-1]) > LONGEST_CALL:
            break
        measured.append(size)
        seconds.append(median_seconds(make(size), device))
    return measured, seconds


def median_seconds(call: Callable[[], object], device: torch.device) -> float:
    """Median time of a call on this device, after one that is not counted.

    Of a rank with one thread on the CPU it is CPU time, which is the same on an idle node and does not include what
    other programs take.
    """
    calls = sizes_of(device).calls
    clock = time.process_time if device.type == "cpu" and torch.get_num_threads() == 1 else time.perf_counter
    call()
    synchronize(device)
    seconds: list[float] = []
    while len(seconds) < 3 or (len(seconds) < REPEATS and sum(seconds) * calls < REPEAT_SECONDS):
        began = clock()
        for _ in range(calls):
            call()
        synchronize(device)
        seconds.append((clock() - began) / calls)
    return median(seconds)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _add(small: Tensor) -> None:
    for _ in range(SMALL_CALLS):
        small.add_(1.0)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


MESSAGES = (4, 2**16, 2**20, 2**23)  # bytes
LINK_REPEATS = 15  # of a message or an all-reduce
TURN, TURNS = (384, 384), 200  # a product of about a millisecond, and how often
STREAM = 8  # of the largest messages, from every rank of a node at the same time
REDUCED = {"cpu": 2**23, "cuda": 2**28}  # bytes of an all-reduce


def pair_link(world: World, pair: tuple[int, int]) -> tuple[float, float]:
    """(latency, bandwidth) of messages between two ranks, from half the time of a round trip. Collective."""
    times = []
    for nbytes in MESSAGES:
        world.barrier()
        times.append(_round_trip(world, pair, nbytes) / 2 if world.rank in pair else 0.0)
    return fit_link(MESSAGES, world.broadcast_object(times, root=pair[0]))


def _round_trip(world: World, pair: tuple[int, int], nbytes: int) -> float:
    message = torch.zeros(nbytes, dtype=torch.uint8, device=world.device)
    first = world.rank == pair[0]
    peer = pair[1] if first else pair[0]
    seconds = []
    for _ in range(LINK_REPEATS + 1):
        began = time.perf_counter()
        for sends in (first, not first):
            if sends:
                dist.send(message, peer)
            else:
                dist.recv(message, peer)
        synchronize(world.device)
        seconds.append(time.perf_counter() - began)
    return median(seconds[1:])  # the first one connects


def node_network(world: World, first: Sequence[int], second: Sequence[int]) -> float:
    """Bytes per second from one node to another if all of their ranks send at the same time. Collective.

    Args:
        first, second: the ranks of the two nodes; rank i of one sends to rank i of the other.
    """
    message = torch.zeros(MESSAGES[-1], dtype=torch.uint8, device=world.device)
    answer = torch.zeros(1, dtype=torch.uint8, device=world.device)
    mine = 0.0
    for _ in range(2):  # the first time connects
        world.barrier()
        began = time.perf_counter()
        for source, target in zip(first, second, strict=False):
            if world.rank == source:
                for _ in range(STREAM):
                    dist.send(message, target)
                dist.recv(answer, target)
            elif world.rank == target:
                for _ in range(STREAM):
                    dist.recv(message, source)
                dist.send(answer, source)
        synchronize(world.device)
        mine = STREAM * message.numel() / (time.perf_counter() - began) if world.rank in first else 0.0
    paired = min(len(first), len(second))
    rates = world.all_gather_object(mine)
    return sum(rates[rank] for rank in first[:paired])


def contention(world: World, local: Sequence[int]) -> float:
    """Seconds that an all-reduce of two ranks takes longer while more ranks of their node compute than have cores, the
    most of all ranks. Collective.

    All compute and reduce in turn, which takes longer than the products and the all-reduces one by one.

    Args:
        local: the ranks of this rank's node; neighbours are pairs.
    """
    pairs = [tuple(local[place : place + 2]) for place in range(0, len(local) - 1, 2)]
    every = sorted({pair for pairs in world.all_gather_object(pairs) for pair in pairs})
    groups = {pair: dist.new_group(list(pair)) for pair in every}
    mine = next((pair for pair in pairs if world.rank in pair), None)
    values, factor = torch.zeros(MESSAGES[1] // 4, device=world.device), torch.randn(*TURN, device=world.device)

    def turns(computes: bool, reduces: bool) -> float:
        world.barrier()
        began = time.perf_counter()
        for _ in range(TURNS if mine is not None else 0):
            if computes:
                torch.mm(factor, factor)
            if reduces:
                dist.all_reduce(values, group=groups[mine])  # type: ignore[index]
        synchronize(world.device)
        return (time.perf_counter() - began) / TURNS

    both, products, reduced = (turns(*which) for which in ((True, True), (True, False), (False, True)))
    return max(0.0, *world.all_gather_object(both - products - reduced))


def bus_bandwidths(world: World) -> dict[int, float]:
    """Bus bandwidth of the first 2, 4, 8, ... ranks, by the number of ranks. Collective."""
    return {size: all_reduce_bandwidth(world, size) for size in group_sizes(world.size)}


def all_reduce_bandwidth(world: World, size: int) -> float:
    """Bus bandwidth of fp32 all-reduces of the first `size` ranks, while the others wait. Collective."""
    group = dist.new_group(list(range(size))) if size < world.size else None
    values = torch.zeros(REDUCED[world.device.type] // 4, device=world.device)
    seconds = _all_reduce(world, values, group) if world.rank < size else 0.0
    return bus_bandwidth(size, 4 * values.numel(), world.broadcast_object(seconds))


def _all_reduce(world: World, values: torch.Tensor, group: dist.ProcessGroup | None) -> float:
    seconds = []
    for _ in range(LINK_REPEATS // 2 + 1):
        began = time.perf_counter()
        dist.all_reduce(values, group=group)
        synchronize(world.device)
        seconds.append(time.perf_counter() - began)
    return median(seconds[1:])
