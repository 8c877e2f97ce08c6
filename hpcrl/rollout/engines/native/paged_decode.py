"""The decode step on a GPU: forward pass, sampling and the update of the state, without the host."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from hpcrl.kernels.philox import uniforms
from hpcrl.rollout.engines.native.attention import PagedAttention
from hpcrl.rollout.engines.native.decode_graphs import DecodeGraphs, graph_size
from hpcrl.rollout.engines.native.decode_state import DecodeState, SlotColumns
from hpcrl.rollout.engines.native.decoder import Decoder
from hpcrl.rollout.engines.native.kv_cache import KVCache, Moves
from hpcrl.rollout.protocol import SamplingParams
from hpcrl.rollout.sampling import draw_sharded


class Drawn(NamedTuple):
    """By row of the running batch: tokens int32 (rows,), their log-probs fp32 (rows,), and the experts of the tokens
    that were run int16 (rows, layers x topk), or (rows, 0) if they are not recorded."""

    token_ids: np.ndarray
    log_probs: np.ndarray
    experts: np.ndarray


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

    def wait(self) -> Drawn:
        """Return the results when the step has ended."""
        if self._ready is not None:
            self._ready.synchronize()
        results = self._results.numpy()[:, self._places]
        return Drawn(results[0], results[1].view(np.float32), results[2:].T.astype(np.int16))


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
        if self._graphs is not None:
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
        slots = state.slots.index_select(0, rows.masked_fill(is_extra, 0))
        of_row = SlotColumns(*state.columns.index_select(1, slots))
        rope_positions = None if self._decoder.vision is None else of_row.cached + of_row.rope_shift
        attention = PagedAttention(
            self._cache, state.blocks, slots * state.width, state.width, of_row.cached, state.num_rows, rope_positions
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
