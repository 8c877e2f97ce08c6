"""What the GPU does in a second: bandwidths, products of the models' shapes beside their floor and the forecast;
and the kernels of a profile, by name.

Products run one after the other over the weights of all layers, so that none are in a cache, and as one CUDA graph, so
that the host's time does not count. The floor is the larger of the times that bytes and operations take at the measured
ceilings; the forecast has the published figures of the chip.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd import DeviceType
from torch.nn.functional import grouped_mm, linear
from torch.profiler import ProfilerActivity, profile

from hpcrl.forecast.time.cost import Units
from hpcrl.machine.machine_file import Rate
from hpcrl.machine.measure_rank import median_seconds
from hpcrl.model.blocks.block import blocks_of
from hpcrl.model.blocks.micro_batch import Matrix, MicroBatch, Products
from hpcrl.model.shape import ModelShape
from hpcrl.runtime.layout import Layout
from hpcrl.runtime.world import World
from tools.gpu.models import DENSE, MIXTURE, REHEARSAL, machine, shape_of

READ_BYTES, SIDE = (2**20, 64) if REHEARSAL else (2**32, 8192)
ROWS = (1, 16) if REHEARSAL else (1, 64, 256, 512, 4096, 16384)
EXPERT_ROWS = (16, 64) if REHEARSAL else (512, 16384)  # tokens, of which each goes to several experts
DTYPE = torch.bfloat16


class Ceilings(NamedTuple):
    """copy: bytes per second, read and written; read: of a reduction, which only reads; flops: of a bf16 product."""

    copy: float
    read: float
    flops: float

    def units(self) -> Units:
        rate = Rate(flops=self.flops)
        sizes = DTYPE.itemsize, DTYPE.itemsize
        return Units(*sizes, self.flops, 0.0, rate, self.read, 0.0, replays=True, is_ahead=False)

    def __str__(self) -> str:
        copy, read, flops = self.copy / 1e9, self.read / 1e9, self.flops / 1e12
        bytes_ = f"a copy moves {copy:,.0f} GB/s, a reduction reads {read:,.0f} GB/s"
        return f"{bytes_}, bf16 products reach {flops:.0f} TFLOP/s"


def measure_ceilings(device: torch.device) -> Ceilings:
    source = torch.ones(READ_BYTES // 4, device=device)
    copy = 2 * READ_BYTES / median_seconds(partial(torch.empty_like(source).copy_, source), device)
    read = READ_BYTES / min(median_seconds(run, device) for run in (source.sum, source.amax))
    a, b = torch.randn(2, SIDE, SIDE, device=device, dtype=DTYPE).unbind()
    return Ceilings(copy, read, 2 * SIDE**3 / median_seconds(lambda: a @ b, device))


def ceilings(world: World) -> str:
    published = machine().device
    bandwidth, flops = published.memory_bandwidth / 1e9, published.matmul["bfloat16"].flops / 1e12
    found = f"{measure_ceilings(world.device)} at {SIDE} cubed"
    return f"{found}; forecasts of {machine().name} have {bandwidth:,.0f} GB/s and {flops:.0f} TFLOP/s"


def products_of(shape: ModelShape, rows: int) -> Iterator[tuple[Products, int]]:
    """Those of a forward pass, and of how many layers they are; the head's last."""
    batch = MicroBatch(Layout((0,)), rows, DTYPE.itemsize)
    for block, count in blocks_of(shape.layers).items():
        yield from ((products, count) for products in block.computation(batch).products)
    yield Products(rows, (Matrix(shape.hidden_size, shape.padded_vocab_size),)), 1


def experts_of(shape: ModelShape, tokens: int) -> tuple[Products, int, int]:
    """The grouped products of a mixture's layer, and how many layers and experts it has."""
    assert shape.routed is not None
    return next((*it, shape.routed.num_experts) for it in products_of(shape, tokens) if it[0].groups > 1)


def products(world: World) -> str:
    """Of the dense model, one weight for all rows."""
    top, shape = measure_ceilings(world.device), shape_of(DENSE)
    print_head("product")
    for rows in ROWS:
        for each, count in products_of(shape, rows):
            for inner, outer in each.matrices:
                weights = drawn(world, count, outer, inner)
                x = drawn(world, rows, inner)
                seconds = per_layer(partial(linear, x), weights, world.device)
                print_row(f"{inner} x {outer}", rows, Products(rows, ()), Matrix(inner, outer), seconds, top)
    return str(top)


def grouped(world: World) -> str:
    """Of the mixture's experts with random tokens: forward, and backward's gradients of inputs and of weights."""
    top, shape = measure_ceilings(world.device), shape_of(MIXTURE)
    print_head("grouped product")
    for tokens in EXPERT_ROWS:
        each, count, experts = experts_of(shape, tokens)
        rows = int(each.rows)
        ends = torch.randint(experts, (rows,), device=world.device).bincount(minlength=experts).cumsum(0).int()
        for inner, outer in each.matrices:
            weights = drawn(world, count, experts, outer, inner)
            x, dy = drawn(world, rows, inner), drawn(world, rows, outer)
            ways: dict[str, Callable[[Tensor], Tensor]] = {
                "forward": lambda weight, x=x, ends=ends: grouped_mm(x, weight.transpose(1, 2), offs=ends),
                "gradient of inputs": lambda weight, dy=dy, ends=ends: grouped_mm(dy, weight, offs=ends),
                "gradient of weights": lambda weight, x=x, dy=dy, ends=ends: grouped_mm(dy.t(), x, offs=ends),
            }
            for way, run in ways.items():
                seconds = per_layer(run, weights, world.device)
                print_row(f"{inner} x {outer}, {way}", rows, each, Matrix(inner, outer), seconds, top)
    return f"{experts} experts; {top}"


def drawn(world: World, *size: int) -> Tensor:
    return torch.randn(size, device=world.device, dtype=DTYPE) * 0.02


def per_layer(run: Callable[[Tensor], object], weights: Tensor, device: torch.device) -> float:
    """Seconds of one run, in the mean over the layers' weights."""

    def layers() -> None:
        for weight in weights:
            run(weight)

    return median_seconds(graphed(layers, device), device) / len(weights)


def graphed(run: Callable[[], object], device: torch.device) -> Callable[[], object]:
    """What replays it as a CUDA graph; itself on another device."""
    if device.type != "cuda":
        return run
    run()  # a graph may not load kernels
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def print_head(title: str) -> None:
    columns = (title, "rows", "us", "TFLOP/s", "GB/s", "floor, us", "floor / time", "forecast, us")
    print(f"| {' | '.join(columns)} |\n|---|{'---:|' * (len(columns) - 1)}", flush=True)


def print_row(name: str, rows: int, each: Products, matrix: Matrix, seconds: float, top: Ceilings) -> None:
    least = top.units().product(rows, *matrix, groups=each.groups).seconds
    expected = Units.of(machine().device, "bfloat16", DTYPE.itemsize, replays=True)
    forecast = expected.product(rows, *matrix, groups=each.groups).seconds
    inner, outer = matrix
    nbytes = (rows * (inner + outer) + each.groups * inner * outer) * DTYPE.itemsize
    cells = (name, rows, f"{seconds * 1e6:.1f}", f"{2 * rows * inner * outer / seconds / 1e12:.0f}")
    cells = (*cells, f"{nbytes / seconds / 1e9:.0f}", f"{least * 1e6:.1f}", f"{least / seconds:.0%}")
    print(f"| {' | '.join(map(str, (*cells, f'{forecast * 1e6:.1f}')))} |", flush=True)


SHOWN, WIDTH = 16, 72  # kernels of a table, and characters of a name


class Kernel(NamedTuple):
    name: str
    calls: float
    seconds: float


def profiler() -> profile:
    """Of the device's work only."""
    return profile(activities=[ProfilerActivity.CUDA])


def kernels_of(ended: profile, name: str, repeats: int) -> list[Kernel]:
    """Those of one of `repeats` equal pieces of work, the longest first. The folder LOGS of the environment keeps the
    profile as `name`."""
    if folder := os.environ.get("LOGS"):
        ended.export_chrome_trace(f"{folder}/{name}.json.gz")
    found: dict[str, Kernel] = {}
    for event in ended.events():
        if event.device_type == DeviceType.CUDA and not event.is_user_annotation:
            _, calls, seconds = found.get(event.name, Kernel(event.name, 0.0, 0.0))
            took = event.time_range.elapsed_us() / 1e6
            found[event.name] = Kernel(event.name, calls + 1 / repeats, seconds + took / repeats)
    return sorted(found.values(), key=lambda kernel: -kernel.seconds)


def print_kernels(kernels: Sequence[Kernel]) -> None:
    total = sum(kernel.seconds for kernel in kernels)
    print("| kernel | calls | ms | share |\n|---|---:|---:|---:|")
    for kernel in kernels[:SHOWN]:
        name = kernel.name.replace("|", " ")[:WIDTH]
        print(f"| `{name}` | {kernel.calls:,.0f} | {kernel.seconds * 1e3:.2f} | {kernel.seconds / total:.0%} |")
    rest = kernels[SHOWN:]
    calls, seconds = (sum(values) for values in zip((0.0, 0.0), *(kernel[1:] for kernel in rest), strict=True))
    print(f"| {len(rest)} others | {calls:,.0f} | {seconds * 1e3:.2f} | {seconds / (total or 1.0):.0%} |", flush=True)
