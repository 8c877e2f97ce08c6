"""CUDA graphs of the decode step."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from hpcrl.rollout.protocol import SamplingParams

SIZE_STEP = 16


def graph_size(rows: int) -> int:
    """Return the rows of the smallest graph for `rows` rows: 1, 2, 4, 8, 16, and from there steps of 16."""
    if rows < SIZE_STEP:
        return 1 << (rows - 1).bit_length()
    return -(-rows // SIZE_STEP) * SIZE_STEP


class _Key(NamedTuple):
    """What a graph depends on."""

    size: int
    temperature: float
    top_k: int
    top_p: float


class _Graph(NamedTuple):
    graph: torch.cuda.CUDAGraph
    results: Tensor


class DecodeGraphs:
    """CUDA graphs of `run`, the decode step of a number of rows, which replace hundreds of launches by one.

    A graph is captured on first use. All that changes from step to step is in `state`, the memory of a `DecodeState`,
    which never moves. Graphs do not depend on lengths: their attention has programs for the largest number of parts
    that rows of any lengths can be cut into, and programs without a part return at once. Graphs keep the addresses of
    weights and KV cache: call `clear` when one of these moves.
    """

    def __init__(self, run: Callable[[int, SamplingParams], Tensor], state: Tensor) -> None:
        self._run, self._state = run, state
        self._graphs: dict[_Key, _Graph] = {}
        self._pool = torch.cuda.graph_pool_handle()
        # Shared by all captures, because cuBLAS keeps a workspace of 32 MiB per stream.
        self._stream = torch.cuda.Stream()

    def clear(self) -> None:
        """Drop all graphs and start a new memory pool.

        cuBLAS's workspace may keep the old pool in use, and torch does not capture into a pool that is in use without a
        graph.
        """
        self._graphs.clear()
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, size: int, sampling: SamplingParams) -> Tensor:
        """Return what `run` returns; the next call overwrites it."""
        key = _Key(size, sampling.temperature, sampling.top_k, sampling.top_p)
        if key not in self._graphs:
            self._graphs[key] = self._capture(size, sampling)
        graph = self._graphs[key]
        graph.graph.replay()
        return graph.results

    def _capture(self, size: int, sampling: SamplingParams) -> _Graph:
        # A warm-up run outside the capture compiles kernels and creates communicators.
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            before = self._state.clone()
            self._run(size, sampling)
            self._state.copy_(before)
        torch.cuda.current_stream().wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        # Graphs run one at a time, so they can share memory. thread_local: other threads may call CUDA.
        with torch.cuda.graph(graph, self._pool, self._stream, capture_error_mode="thread_local"):
            results = self._run(size, sampling)
        return _Graph(graph, results)
