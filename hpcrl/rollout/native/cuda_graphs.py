"""CUDA graphs of the decode step: one launch in place of hundreds. Not yet run on a GPU."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from hpcrl.rollout.native.attention import NewTokens, PagedAttention, fill
from hpcrl.rollout.native.decoder import Decoder


class _Graph(NamedTuple):
    graph: torch.cuda.CUDAGraph
    token_ids: Tensor
    attention: PagedAttention
    logits: Tensor


class DecodeGraphs:
    """A graph for each number of rows that is a power of 2, captured when it is first needed.

    A step with fewer rows repeats its first row, which computes and stores the same numbers once more. Lengths are not
    part of a graph: its attention has programs for as many parts as rows of any lengths can be cut into, and those
    without a part leave at once. Graphs keep the addresses of weights and KV cache: `clear` them when one of these
    moves.
    """

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self._graphs: dict[int, _Graph] = {}
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()  # one for all captures: cuBLAS keeps a workspace of 32 MiB for each

    def clear(self) -> None:
        """The memory pool is a new one afterwards: cuBLAS's workspace may hold the old one in use, and torch does not
        capture in a pool that is in use without a graph."""
        self._graphs.clear()
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, token_ids: Tensor, new: NewTokens) -> Tensor:
        """Logits as `Decoder.forward` gives them, of one more token of each of rows 0..n-1."""
        attention = PagedAttention(new)
        rows = 1 << (len(token_ids) - 1).bit_length()
        if rows not in self._graphs:
            self._graphs[rows] = self._capture(rows, token_ids, attention)
        graph = self._graphs[rows]
        _load(graph, token_ids, attention)
        graph.graph.replay()
        return graph.logits[: len(token_ids)]

    def _capture(self, rows: int, token_ids: Tensor, attention: PagedAttention) -> _Graph:
        graph = _Graph(torch.cuda.CUDAGraph(), token_ids.new_zeros(rows), attention.with_room(rows), token_ids)
        _load(graph, token_ids, attention)
        # Once outside, as kernels are compiled and communicators made by the first call.
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            self._decoder.forward(graph.token_ids, graph.attention)
        torch.cuda.current_stream().wait_stream(self._stream)
        # Graphs run one at a time, so they can have their memory in common; other threads go on.
        with torch.cuda.graph(graph.graph, self._pool, self._stream, capture_error_mode="thread_local"):
            logits = self._decoder.forward(graph.token_ids, graph.attention)
        return graph._replace(logits=logits)


def _load(graph: _Graph, token_ids: Tensor, attention: PagedAttention) -> None:
    fill(graph.token_ids, token_ids)
    graph.attention.load(attention)
