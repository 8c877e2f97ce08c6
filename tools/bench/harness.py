"""What benchmarks share: turns of what is compared, medians and spread, ranks, processes, lines of JSON, floors."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, TypeVar

import checkout

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from torch import Tensor

ROOT = checkout.ROOT
MEBI = 2**20
MPIEXEC = Path(sys.executable).with_name("mpiexec")
PRODUCTS = 10  # repetitions of matrix products
T = TypeVar("T")


def timed(run: Callable[[], object]) -> float:
    """Seconds of a call."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def in_turn(ways: Mapping[str, Callable[[], T]], rounds: int, warm_up: int = 0) -> dict[str, list[T]]:
    """What each of `ways` returns in `rounds` rounds, in which they take turns, after `warm_up` that do not count."""
    results: dict[str, list[T]] = {name: [] for name in ways}
    for number in range(warm_up + rounds):
        for name, run in ways.items():
            result = run()
            if number >= warm_up:
                results[name].append(result)
    return results


def spread(seconds: Sequence[float], width: int = 6) -> str:
    """The median, the least and the largest."""
    return f"{median(seconds):{width}.2f} s ({min(seconds):.2f} to {max(seconds):.2f})"


def on_ranks(ranks: int, *command: object) -> list[str]:
    """A command that runs this interpreter with these arguments on so many ranks."""
    return [str(MPIEXEC), "-n", str(ranks), sys.executable, *map(str, command)]


def with_threads(threads: int, **more: str) -> dict[str, str]:
    """The environment of a process of so many threads, which finds hpcrl in this checkout."""
    return {**os.environ, "OMP_NUM_THREADS": str(threads), "PYTHONPATH": str(ROOT), **more}


class Server:
    """A process that makes an object, and calls its methods in answer to messages."""

    def __init__(self, make: Callable[..., object], *arguments: object) -> None:
        context = get_context("spawn")
        self._pipe, theirs = context.Pipe()
        context.Process(target=_serve, args=(theirs, make, arguments), daemon=True).start()

    def send(self, method: str, *arguments: object) -> None:
        """Begin a call."""
        self._pipe.send((method, arguments))

    def receive(self) -> Any:
        """Wait for the result of a call."""
        return self._pipe.recv()

    def close(self) -> None:
        self._pipe.send(None)


def _serve(pipe: Connection, make: Callable[..., object], arguments: Sequence[object]) -> None:
    served = make(*arguments)
    while (message := pipe.recv()) is not None:
        method, arguments = message
        pipe.send(getattr(served, method)(*arguments))


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a file with one of JSON in each line, if it is there."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def write_lines(path: Path, rows: Iterable[object]) -> None:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def product_seconds(weights: Sequence[Tensor], rows: int) -> float:
    """Median seconds of a product of `rows` rows with each of the weights (out, in), in their order: the floor beside
    which a model's times are shown."""
    import torch
    from torch.nn.functional import linear

    inputs = {weight.size(1): torch.randn(rows, weight.size(1), dtype=weight.dtype) for weight in weights}

    def products() -> None:
        for weight in weights:
            linear(inputs[weight.size(1)], weight)

    with torch.no_grad():
        return median(timed(products) for _ in range(PRODUCTS))
