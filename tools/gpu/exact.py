"""Whether a row of a bf16 product has the same bits beside any number of rows, as an exact mode in bf16 would need.

tools/gpu/exact.sh runs `products` with settings of cuBLAS's workspace, which is read once in a process.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import grouped_mm, linear

from hpcrl.machine.measure_rank import median_seconds
from hpcrl.model.exact import check_exact
from hpcrl.runtime.exits import InputError
from hpcrl.runtime.world import World
from tools.gpu.agreement import trained
from tools.gpu.models import DENSE, MIXTURE, REHEARSAL, SHAPE, shape_of
from tools.gpu.outcome import Skip
from tools.gpu.rates import DTYPE, drawn, experts_of, graphed, products_of

ROWS = (1, 16, 64) if REHEARSAL else (1, 16, 64, 512, 16384)
EXPERT_ROWS = (1, 4, 8) if REHEARSAL else (1, 16, 64, 512, 2048)  # of each expert
SETTINGS = ("CUBLAS_WORKSPACE_CONFIG", "CUBLASLT_WORKSPACE_SIZE")


def products(world: World) -> str:
    """Of the dense model, and its first one with a bias, which is another function of cuBLAS."""
    print_head("product")
    whole = 0
    matrices = [matrix for each, _ in products_of(shape_of(DENSE), 1) for matrix in each.matrices]
    for number, (inner, outer) in enumerate([matrices[0], *matrices]):
        weight, x = drawn(world, outer, inner), drawn(world, ROWS[-1], inner)
        product = partial(linear, weight=weight, bias=drawn(world, outer) if number == 0 else None)
        name = f"{inner} x {outer}" + ", with a bias" * (number == 0)
        whole += compare(name, {rows: (product, x[:rows]) for rows in ROWS}, world)
    given = ", ".join(f"{name}={os.environ[name]}" for name in SETTINGS if name in os.environ)
    return f"{whole} of {len(matrices) + 1} products have the same bits at all rows, {given or 'default workspaces'}"


def grouped(world: World) -> str:
    """Of the mixture, all experts with equally many rows."""
    print_head("grouped product")
    (each, _, experts), whole = experts_of(shape_of(MIXTURE), EXPERT_ROWS[-1]), 0
    for inner, outer in each.matrices:
        weight, x = drawn(world, experts, outer, inner), drawn(world, experts, EXPERT_ROWS[-1], inner)

        def product(x: Tensor, weight: Tensor = weight) -> Tensor:
            """(experts, rows of each, inner) -> (experts, rows of each, outer)"""
            ends = torch.arange(1, len(weight) + 1, device=x.device, dtype=torch.int32) * x.size(1)
            return grouped_mm(x.flatten(0, 1), weight.transpose(1, 2), offs=ends).unflatten(0, x.shape[:2])

        runs = {rows: (product, x[:, :rows].contiguous()) for rows in EXPERT_ROWS}
        whole += compare(f"{inner} x {outer}", runs, world)
    return f"{whole} of {len(each.matrices)} grouped products have the same bits at all rows"


def compare(name: str, runs: Mapping[int, tuple[Callable[[Tensor], Tensor], Tensor]], world: World) -> bool:
    """Print a row for each number of rows; whether all of them agree, and do so where the rows are reversed."""
    outputs: dict[int, Tensor] = {}
    agree = True
    for rows, (product, x) in runs.items():
        outputs[rows] = product(x)
        same = list(agreeing(outputs, rows))
        is_reversible = torch.equal(product(x.flip(-2)).flip(-2), outputs[rows])
        seconds = median_seconds(graphed(partial(product, x), world.device), world.device)
        as_these = ", ".join(map(str, same)) or "-"
        place = "same" if is_reversible else "others"
        print(f"| {name} | {rows} | {as_these} | {place} | {seconds * 1e6:.1f} |", flush=True)
        agree = agree and is_reversible and len(same) == len(outputs) - 1
    return agree


def agreeing(found: Mapping[int, Tensor], rows: int) -> Iterator[int]:
    """The fewer rows whose bits are those of the first of `rows`."""
    yield from (fewer for fewer in found if fewer < rows and torch.equal(found[fewer], found[rows][..., :fewer, :]))


def print_head(title: str) -> None:
    print(
        f"| {title} | rows | same bits as at rows | bits in reversed order | us |\n|---|---:|---|---|---:|", flush=True
    )


def mode(world: World) -> str:
    """Training and rollout in exact mode: log-probs are equal, bit for bit."""
    try:
        check_exact(SHAPE, 1, DTYPE, world.device)
    except InputError as error:
        raise Skip(str(error)) from error
    return trained(world, DTYPE, exact=True)
