"""The decode step on a GPU: forward pass, sampling and the update of the state, without the host.

The running sequences are on the device, where a decode step updates them itself; CUDA graphs launch it whole.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from hpcrl.kernels.sampling import uniforms
from hpcrl.rollout.engines.native.attention import ExactPagedAttention, PagedAttention
from hpcrl.rollout.engines.native.decoder import Decoder
from hpcrl.rollout.engines.native.generate_call import GenerateCall
from hpcrl.rollout.engines.native.kv_cache import KVCache, Moves
from hpcrl.rollout.engines.native.scheduler import RunningBatch, Sequence
from hpcrl.rollout.protocol import SamplingParams
from hpcrl.rollout.sampling import check_finite, draw_sharded


class SlotColumns(NamedTuple):
    """Numbers of a sequence, int32. The step updates the first two: `last_token`, which is to be run next, and the
    number of `cached` tokens. Its response position and rotary position differ from `cached` by the next two. The last
    three select its random numbers and have the bits of uint32."""

    last_token: Tensor
    cached: Tensor
    response_shift: Tensor
    rope_shift: Tensor
    sample_index: Tensor
    key_0: Tensor
    key_1: Tensor


NUM_COLUMNS = len(SlotColumns._fields)


class DecodeState:
    """One int32 tensor `memory` on the device, of which all others are views, and the host's copy of it.

    A sequence has a slot from when it joins until it leaves, so that its numbers do not move when rows do: `slots`
    (capacity,) are those of the rows of the running batch, of which there are `num_rows` (1,). `columns` (columns,
    capacity + 1) are the sequences' numbers by slot; the last slot belongs to no sequence. `blocks` (capacity x width,)
    are their blocks in the KV cache, `width` places per slot. `trainer_step` is (1,).

    The host records its changes, and `push` copies all of it in one transfer. What a step updates is not copied back:
    there the host's copy is out of date.
    """

    def __init__(self, capacity: int, width: int, device: torch.device) -> None:
        self.capacity, self.width = capacity, width
        sizes = 1, 1, capacity, NUM_COLUMNS * (capacity + 1), capacity * width
        self.memory = torch.zeros(sum(sizes), dtype=torch.int32, device=device)
        self.num_rows, self.trainer_step, self.slots, columns, self.blocks = self.memory.split(sizes)
        self.columns = columns.view(NUM_COLUMNS, -1)
        self._host = np.zeros(sum(sizes), np.int32)
        self._first_column, self._first_block = sum(sizes[:3]), sum(sizes[:4])
        self._changed: list[np.ndarray] = []  # places in memory
        self.clear(0)

    def clear(self, trainer_step: int) -> None:
        """Clear all sequences."""
        self._slot_of = np.zeros(self.capacity, np.int64)  # by row
        self._free = list(range(self.capacity))
        self._change(np.array([1]), np.array([trainer_step], np.uint32).view(np.int32))

    def join(self, batch: RunningBatch, row: int) -> None:
        """Give row `row` of `batch`, which was just added, a slot."""
        self._slot_of[row] = slot = self._free.pop()
        cached, position = batch.cached[row], batch.first_positions[row] + batch.num_drawn[row]
        numbers = batch.last_tokens[row], cached, position - cached, batch.rope_shifts[row], batch.sample_indices[row]
        places = self._first_column + slot + np.arange(NUM_COLUMNS) * (self.capacity + 1)
        self._host[places] = np.concatenate([numbers, batch.keys[row].view(np.int32)])
        self._changed.append(places)

    def leave(self, rows: np.ndarray, moves: Moves) -> None:
        """Free the slots of `rows`; `moves` are those of rows that take their places."""
        self._free.extend(self._slot_of[rows].tolist())
        self._slot_of[moves.targets] = self._slot_of[moves.sources]

    def grow(self, rows: np.ndarray, orders: np.ndarray, blocks: np.ndarray) -> None:
        """Append `blocks` (n,) to `rows` (n,), where they are the blocks with numbers `orders` (n,)."""
        self._change(self._first_block + self._slot_of[rows] * self.width + orders, blocks)

    def push(self, num_rows: int) -> None:
        """Bring the device up to date for a step of rows 0..num_rows-1, in one transfer; in none if nothing has
        changed."""
        self._change(np.array([0]), np.array([num_rows]))
        self._change(2 + np.arange(num_rows), self._slot_of[:num_rows])
        places = np.unique(np.concatenate(self._changed))
        self._changed.clear()
        if not len(places):
            return
        changes = torch.from_numpy(np.stack([places.astype(np.int32), self._host[places]]))
        if self.memory.device.type != "cpu":
            changes = changes.pin_memory().to(self.memory.device, non_blocking=True)
        self.memory.index_put_((changes[0],), changes[1])

    def _change(self, places: np.ndarray, values: np.ndarray) -> None:
        """Set what no step updates."""
        differ = self._host[places] != values
        self._host[places] = values
        self._changed.append(places[differ])


GRAPH_SIZE_STEP = 16


def graph_size(rows: int) -> int:
    """Return the rows of the smallest graph for `rows` rows: 1, 2, 4, 8, 16, and from there steps of 16."""
    if rows < GRAPH_SIZE_STEP:
        return 1 << (rows - 1).bit_length()
    return -(-rows // GRAPH_SIZE_STEP) * GRAPH_SIZE_STEP


class DecodeGraphs:
    """CUDA graphs of `run`, the decode step of a number of rows, which replace hundreds of launches by one.

    A graph is captured on first use. All that changes from step to step is in `state`, the memory of a `DecodeState`,
    which never moves. Graphs do not depend on lengths: their attention has programs for the largest number of parts
    that rows of any lengths can be cut into, and programs without a part return at once. Graphs keep the addresses of
    weights and KV cache: call `clear` when one of these moves.
    """

    def __init__(self, run: Callable[[int, SamplingParams], Tensor], state: Tensor) -> None:
        self._run, self._state = run, state
        self._graphs: dict[tuple[float, ...], tuple[torch.cuda.CUDAGraph, Tensor]] = {}  # with its results
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
        key = size, sampling.temperature, sampling.top_k, sampling.top_p, sampling.routed_experts
        if key not in self._graphs:
            self._graphs[key] = self._capture(size, sampling)
        graph, results = self._graphs[key]
        graph.replay()
        return results

    def _capture(self, size: int, sampling: SamplingParams) -> tuple[torch.cuda.CUDAGraph, Tensor]:
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
        return graph, results


class StepInFlight:
    """A decode step that the device may not have finished. `results` int32 (columns, any) is on the host."""

    def __init__(self, results: Tensor, num_rows: int, device: torch.device) -> None:
        self._places = np.arange(num_rows)  # in the results, by row of the running batch
        self._ready = None
        if device.type == "cpu":
            self._results = results
            return
        self._results = results.to("cpu", non_blocking=True)
        self._ready = torch.Event(device=device)
        self._ready.record()

    def leave(self, moves: Moves, num_rows: int) -> None:
        """Drop the results of rows that have left; `moves` are those of rows that took their places."""
        self._places[moves.targets] = self._places[moves.sources]
        self._places = self._places[:num_rows]

    def wait(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the results when the step has ended, by row of the running batch: tokens int32 (rows,), their
        log-probs fp32 (rows,), and the experts of the tokens that were run int16 (rows, layers x topk), or (rows, 0) if
        they are not recorded."""
        if self._ready is not None:
            self._ready.synchronize()
        results = self._results.numpy()[:, self._places]
        return results[0], results[1].view(np.float32), results[2:].T.astype(np.int16)


class PagedDecode:
    """Launches decode steps of the sequences in `state`."""

    def __init__(self, decoder: Decoder, cache: KVCache, max_num_seqs: int, width: int, *, is_graphed: bool) -> None:
        self.state = DecodeState(max_num_seqs, width, cache.device)
        self._decoder, self._cache = decoder, cache
        self._graphs = DecodeGraphs(self._run, self.state.memory) if is_graphed else None

    def clear_graphs(self) -> None:
        """Drop all graphs, because weights or the KV cache move."""
        if self._graphs is not None:
            self._graphs.clear()

    def launch(self, num_rows: int, sampling: SamplingParams) -> StepInFlight:
        """Launch a step of rows 0..num_rows-1. Their sequences must have room in the cache for one more token."""
        self.state.push(num_rows)
        if self._graphs is not None and not self._decoder.needs_host:
            results = self._graphs(graph_size(num_rows), sampling)
        else:
            results = self._run(num_rows, sampling)
        return StepInFlight(results, num_rows, self._cache.device)

    def _run(self, size: int, sampling: SamplingParams) -> Tensor:
        """Run a step on the device only. Return int32 (columns, size): tokens, the bits of their log-probs, experts.

        Rows from the state's `num_rows` on repeat the first one, and update the slot that belongs to no sequence.
        """
        state = self.state
        rows = torch.arange(size, device=self._cache.device)
        is_extra = rows >= state.num_rows
        batch_rows = rows.masked_fill(is_extra, 0)
        slots = state.slots.index_select(0, batch_rows)
        of_row = SlotColumns(*state.columns.index_select(1, slots))
        rope_positions = None if self._decoder.vision is None else of_row.cached + of_row.rope_shift
        kind = ExactPagedAttention if self._decoder.tp.exact else PagedAttention
        attention = kind(
            self._cache,
            state.blocks,
            slots * state.width,
            state.width,
            of_row.cached,
            state.num_rows,
            batch_rows,
            rope_positions,
        )
        chosen: list[Tensor] | None = [] if sampling.routed_experts else None
        logits = self._decoder.forward(of_row.last_token, attention, chosen)
        positions = of_row.cached + of_row.response_shift
        keys = torch.stack([of_row.key_0, of_row.key_1])
        numbers = uniforms(keys, positions, of_row.sample_index, state.trainer_step, logits)
        token_ids, log_probs = draw_sharded(logits, numbers, self._decoder.vocab_size, sampling, self._decoder.tp)
        token_ids = token_ids.int()
        updated = torch.stack([token_ids, of_row.cached + 1])
        state.columns[: len(updated)].index_copy_(1, slots.masked_fill(is_extra, state.capacity).long(), updated)
        return torch.cat([token_ids[None], log_probs[None].view(torch.int32), *(ids.T.int() for ids in chosen or ())])


@dataclass(eq=False)
class PagedCall(GenerateCall):
    """Decodes on a device, where the cache has blocks."""

    cache: KVCache
    paged: PagedDecode = field(kw_only=True)
    # The step whose tokens have not been read. It has all rows of the batch: it is read before rows join.
    _in_flight: StepInFlight | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.paged.state.clear(self.trainer_step)
        if self._records and self.cache.layout.has_fixed:
            self._keeps = False  # states have a turn's last token, whose experts are not read

    def _add(self, sequence: Sequence) -> int:
        row = super()._add(sequence)
        self.paged.state.join(self._batch, row)
        self._push(self.cache.pool.blocks_of(row))  # of a kept prefix
        return row

    def _grow(self, rows: np.ndarray, num_tokens: np.ndarray) -> np.ndarray:
        blocks = super()._grow(rows, num_tokens)
        self._push(blocks)
        return blocks

    def _push(self, blocks: np.ndarray) -> None:
        """Push the assignment of `blocks` to the device."""
        pool = self.cache.pool
        self.paged.state.grow(pool.row_of[blocks], pool.order_of[blocks], blocks)

    def _left(self, rows: np.ndarray, moves: Moves) -> None:
        if self._in_flight is not None:
            self._in_flight.leave(moves, self._batch.num_rows)
        self.paged.state.leave(rows, moves)

    def _decode(self) -> None:
        """Launch a step, and only then read the tokens of the step before: the device does not wait for the host.

        A sequence that has stopped draws one more token, which is dropped. One that reaches its limit does not, because
        its last step is read at once.
        """
        batch, pool = self._batch, self.cache.pool
        missing = int(pool.missing(batch.rows, self._next_lengths()).sum())
        self._kept.evict(missing)
        if missing > pool.num_free:
            self._read()  # what stopped frees its blocks, and a preempted sequence continues from its last token
            self._preempt()
        if not batch.num_rows:
            return
        self._grow(np.arange(batch.num_rows), self._next_lengths())
        launched = self.paged.launch(batch.num_rows, self.sampling)
        earlier, self._in_flight = self._in_flight, launched
        if earlier is not None:
            self._append(earlier)
        if batch.at_limit(num_ahead=1).any():
            self._read()

    def _num_run(self, rows: np.ndarray) -> np.ndarray:
        # A step in flight has run the last token, too, and states cannot be taken back.
        cached = super()._num_run(rows)
        return cached + 1 if self._in_flight is not None and self.cache.layout.has_fixed else cached

    def _next_lengths(self) -> np.ndarray:
        """Return the cached tokens of each row after the next step, int64 (rows,)."""
        return self._batch.cached[self._batch.rows] + (1 if self._in_flight is None else 2)

    def _read(self) -> None:
        """Wait for the tokens of the step in flight, if there is one."""
        if self._in_flight is not None:
            step, self._in_flight = self._in_flight, None
            self._append(step)

    def _append(self, step: StepInFlight) -> None:
        """Append the tokens of `step` to its rows, and finish sequences."""
        if not self._batch.num_rows:
            return
        token_ids, log_probs, experts = step.wait()
        check_finite(bool(np.isfinite(log_probs).all()))
        self._batch.append(token_ids, log_probs, experts)
        self._finish()
