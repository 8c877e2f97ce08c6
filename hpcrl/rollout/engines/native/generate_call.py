"""One call of the native engine's generate()."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from hashlib import blake2b

import numpy as np
import torch

from hpcrl.model.blocks.attention_modules import CachedAttention
from hpcrl.model.vision import Vision
from hpcrl.rollout.engines.native.attention import (
    ContinuedAttention,
    DecodeAttention,
    ExactAttention,
    ExactBlockAttention,
    NewTokens,
    PrefillAttention,
    padded_tokens,
)
from hpcrl.rollout.engines.native.decoder import Decoder, TokenFeatures
from hpcrl.rollout.engines.native.kept_prefixes import KeptPrefixes
from hpcrl.rollout.engines.native.kv_cache import KVCache, Moves
from hpcrl.rollout.engines.native.row_cache import RowCache
from hpcrl.rollout.engines.native.scheduler import Admission, RunningBatch, Scheduler, Sequence
from hpcrl.rollout.protocol import Completion, OnFinished, Prefill, Request, SamplingParams
from hpcrl.rollout.sampling import request_key, sample_sharded
from hpcrl.runtime.accelerator import annotated


@dataclass(frozen=True, eq=False)
class PrefillTokens:
    """Tokens to prefill. ids: int32 (n,). rope_positions: int64 (3, n), if any sequence has pictures. rows: int64 (F,),
    their placeholder tokens, ascending; features: fp32 (F, width)."""

    ids: np.ndarray
    rope_positions: np.ndarray | None = None
    rows: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    features: torch.Tensor | None = None
    hidden_size: int = 0

    @classmethod
    def of(cls, sequences: list[Sequence], starts: np.ndarray, vision: Vision | None) -> PrefillTokens:
        """The tokens of each sequence from its start on, int64 (sequences,), but the last."""
        pairs = list(zip(sequences, starts.tolist(), strict=True))
        ids = np.concatenate([sequence.token_ids()[start:-1] for sequence, start in pairs])
        if vision is None or not any(sequence.pictures for sequence in sequences):
            return cls(ids)
        positions = [sequence.rope_positions(vision)[:, start:-1] for sequence, start in pairs]
        rows, features, first = [], [], 0
        for sequence, start in pairs:
            for picture in sequence.pictures:
                places = picture.place.start - start + np.arange(len(picture.features))
                rows.append(first + places[places >= 0])
                features.append(picture.features[len(places) - len(rows[-1]) :])
            first += sequence.num_to_cache - start
        all_rows = np.concatenate(rows)
        return cls(ids, np.concatenate(positions, axis=1), all_rows, torch.cat(features), vision.hidden_size)

    def part(self, start: int, num: int) -> PrefillTokens:
        """The tokens [start, start + num)."""
        ids = self.ids[start : start + num]
        if self.rope_positions is None or self.features is None:
            return PrefillTokens(ids)
        first, last = np.searchsorted(self.rows, (start, start + num))
        positions, rows = self.rope_positions[:, start : start + num], self.rows[first:last] - start
        return PrefillTokens(ids, positions, rows, self.features[first:last], self.hidden_size)

    def token_features(self, dtype: torch.dtype, device: torch.device) -> TokenFeatures | None:
        """The features by layer, on `device`."""
        if self.features is None or not len(self.rows):
            return None
        values = self.features.to(device, dtype).split(self.hidden_size, dim=1)
        return TokenFeatures(torch.from_numpy(self.rows).to(device), values)


# Rows are sorted when their padded tokens exceed those of sorted rows by this factor.
MAX_PADDING = 1.25


@dataclass(eq=False)
class GenerateCall:
    """Runs steps until every sequence is complete; `completions` is by the index of the request.

    The subclasses decode: `RowCall` on the CPU, a step at a time, and `PagedCall` on a device.
    """

    decoder: Decoder
    cache: KVCache | RowCache
    sampling: SamplingParams
    seed: int
    trainer_step: int
    on_finished: OnFinished
    has_source: bool  # requests may come that continue those that have finished
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    enable_prefix_caching: bool
    completions: dict[int, Completion] = field(default_factory=dict, init=False)
    _num_requests: int = field(default=0, init=False)
    # Of contexts that further sequences wait for: what the layers with windows and states have after it, by group.
    _snapshots: dict[int, list[torch.Tensor]] = field(default_factory=dict, init=False)
    _groups: dict[bytes, int] = field(default_factory=dict, init=False)  # hash of a context -> its first request

    def __post_init__(self) -> None:
        self._scheduler = Scheduler(self.max_num_seqs, self.max_num_batched_tokens, self.cache.block_size)
        self._records = self.sampling.routed_experts
        width = self.decoder.routing_width if self._records else 0
        self._batch = RunningBatch(self.max_num_seqs, self.sampling, width)
        self._kept, self._keeps = KeptPrefixes(self.cache), self.enable_prefix_caching and self.has_source
        self.cache.clear()

    @property
    def has_work(self) -> bool:
        return self._batch.num_rows > 0 or bool(self._scheduler.waiting)

    def add(self, requests: Iterable[Request]) -> None:
        """Queue requests, numbered in their order; those with equal contexts are a group."""
        sequences = []
        for request in requests:
            context = request.context_ids(self.sampling, self.max_model_len, self.decoder.vocab_size)
            key, first = request_key(self.seed, request.uid), request.position
            index = group = self._num_requests
            if self.enable_prefix_caching:
                keys = np.array([picture.key for picture in request.pictures], np.int64)
                whole = blake2b(context.tobytes() + keys.tobytes(), digest_size=16).digest()
                group = self._groups.setdefault(whole, index)
            limit, sample = request.num_to_draw(self.sampling), request.sample_index
            pictures, uid = request.pictures, request.uid
            sequences.append(Sequence(index, context, key, sample, first, limit, group, pictures, uid))
            self._kept.reserve(sequences[-1])
            self._num_requests += 1
        self._scheduler.put_back(sequence for sequence in sequences if sequence.num_kept)
        self._scheduler.waiting.extend(sequence for sequence in sequences if not sequence.num_kept)

    def step(self) -> None:
        """Prefill the sequences that can be admitted; if there are none, decode one token of all running sequences."""
        if self._scheduler.can_admit(self._batch.num_rows, self._num_available):
            with annotated("prefill"):
                self._read()
                groups = set(self._batch.groups[self._batch.rows].tolist())
                self._prefill(self._scheduler.schedule(groups, self._batch.num_rows, self._num_available))
        else:
            with annotated("decode"):
                self._decode()

    @property
    def _num_available(self) -> int:
        """The blocks that no running sequence has: free ones, and those of kept prefixes."""
        pool = self.cache.pool
        return pool.num_blocks - int(pool.count_of[self._batch.rows].sum())

    def _decode(self) -> None:
        """Decode one token of all running sequences, and finish those that are complete."""
        raise NotImplementedError

    def _read(self) -> None:
        """Complete the step that has been launched, before rows join or sequences end."""

    def abort(self) -> None:
        """End all sequences."""
        self._read()
        running, _ = self._batch.remove(np.arange(self._batch.num_rows))
        for sequence in [*running, *self._scheduler.waiting]:
            self.completions[sequence.index] = sequence.completion("abort")

    def _prefill(self, admission: Admission) -> None:
        """Cache all tokens but the last of each sequence, which decoding starts from."""
        continued = [sequence for sequence in admission.prefilled if sequence.num_kept]
        others = [sequence for sequence in admission.prefilled if not sequence.num_kept]
        for sequences in (continued, others):  # in this order, because the others may evict kept prefixes
            if sequences:
                rows = self._prefill_together(sequences)
                if self.cache.layout.has_fixed:
                    self._save_snapshots(rows, sequences, admission.joined)
        for sequence in admission.joined:
            source = self._batch.row_of_group(sequence.group)
            row = self._add(sequence)
            if sequence.num_to_cache:
                assert source is not None
                self._grow(np.array([row]), self._batch.cached[[row]])
                self.cache.copy_row(source, row, sequence.num_to_cache)
                sequence.prefill = sequence.prefill.plus(Prefill(reused=sequence.num_to_cache))
                if self.cache.layout.has_fixed:
                    self.cache.restore(row, self._snapshots[sequence.group])
                if self._records:
                    sequence.routed = self._batch.sequences[source].routed[:1]

    def _prefill_together(self, sequences: list[Sequence]) -> np.ndarray:
        """Prefill sequences that all have kept prefixes, or none. Return their rows."""
        starts = np.array([sequence.num_kept for sequence in sequences])
        rows = np.array([self._add(sequence) for sequence in sequences])
        lengths = self._batch.cached[rows] - starts
        self._grow(rows, self._batch.cached[rows])
        tokens = PrefillTokens.of(sequences, starts, self.decoder.vision)
        if len(rows) > 1:
            experts = self._fill(tokens, rows, starts, lengths)
        else:
            limit = self.max_num_batched_tokens
            experts_of = [
                self._fill(chunk := tokens.part(first, limit), rows, starts + first, np.array([len(chunk.ids)]))
                for first in range(0, len(tokens.ids), limit)
            ]
            experts = np.concatenate(experts_of)
        parts = np.split(experts, lengths.cumsum()[:-1]) if self._records else [None] * len(rows)
        for sequence, start, length, part in zip(sequences, starts.tolist(), lengths.tolist(), parts, strict=True):
            sequence.prefill = sequence.prefill.plus(Prefill(length, start))
            if part is not None and (start or not sequence.routed):  # a preempted sequence keeps its first record
                sequence.routed = [np.concatenate([*sequence.routed, part])]
        return rows

    def _save_snapshots(self, rows: np.ndarray, sequences: list[Sequence], joined: list[Sequence]) -> None:
        """Save what further sequences of the groups in `rows` start from: it is overwritten by the next tokens."""
        wanted = {sequence.group for sequence in (*self._scheduler.waiting, *joined)}
        self._snapshots = {group: saved for group, saved in self._snapshots.items() if group in wanted}
        for row, sequence in zip(rows, sequences, strict=True):
            if sequence.group in wanted and not sequence.drawn:
                self._snapshots[sequence.group] = self.cache.snapshot(int(row))

    def _add(self, sequence: Sequence) -> int:
        """Add a row for `sequence` to the running batch, which has what is kept of its prefix."""
        if sequence.num_kept:
            self._kept.take(sequence, self._batch.num_rows)
        else:
            self._kept.leave(self._batch.num_rows)
        shift = 0
        if sequence.pictures:
            assert self.decoder.vision is not None
            shift = int(sequence.rope_positions(self.decoder.vision)[0, -1]) - sequence.num_to_cache
        return self._batch.add(sequence, shift)

    def _grow(self, rows: np.ndarray, num_tokens: np.ndarray) -> np.ndarray:
        """As the pool's `grow`; kept prefixes make room."""
        pool = self.cache.pool
        self._kept.evict(int(pool.missing(rows, num_tokens).sum()))
        return pool.grow(rows, num_tokens)

    def _fill(self, tokens: PrefillTokens, rows: np.ndarray, starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """Return the experts of the tokens, if they are recorded."""
        exact = ExactAttention if isinstance(self.cache, RowCache) else ExactBlockAttention
        kind = exact if self.decoder.tp.exact else ContinuedAttention if starts.any() else PrefillAttention
        attention: CachedAttention = kind(NewTokens(self.cache, rows, starts, lengths, tokens.rope_positions))
        chosen: list[torch.Tensor] | None = [] if self._records else None
        device = self.cache.device
        features = tokens.token_features(self.cache.dtype, device)
        token_ids = torch.from_numpy(tokens.ids).to(device)
        self.decoder.run(token_ids, attention, chosen, features, cache_only=True)
        return _experts(chosen)

    def _preempt(self) -> None:
        """Evict kept prefixes and preempt the sequences that joined last, until the next tokens of the others fit."""
        batch, pool = self._batch, self.cache.pool
        latest = batch.latest_first()
        missing = pool.missing(latest, batch.cached[latest] + 1)
        self._kept.evict(int(missing.sum()))
        # by number of preempted sequences: blocks that the others lack, and blocks that are free
        lacking = missing.sum() - np.concatenate([[0], missing.cumsum()])
        free = pool.num_free + np.concatenate([[0], pool.count_of[latest].cumsum()])
        count = int((lacking <= free).argmax())
        if count:
            # Of these the one that joined first continues first.
            self._scheduler.put_back(self._remove(latest[:count][::-1]))

    def _finish(self) -> None:
        stopped, at_limit = self._batch.stopped(), self._batch.at_limit()
        rows = np.flatnonzero(stopped | at_limit)
        for sequence, has_stopped in zip(self._remove(rows, keeps=self._keeps), stopped[rows], strict=True):
            completion = sequence.completion("stop" if has_stopped else "length")
            self.completions[sequence.index] = completion
            if self.on_finished is not None:
                self.on_finished(sequence.index, completion)

    def _remove(self, rows: np.ndarray, *, keeps: bool = False) -> list[Sequence]:
        """Remove `rows`, ascending if they are kept, from the batch."""
        if not len(rows):
            return []
        counts = self._num_run(rows).tolist()
        sequences, moves = self._batch.remove(rows)
        if not keeps:
            self.cache.free(rows)
        self.cache.exchange(moves)
        self._left(rows, moves)
        if keeps:
            places = [*moves.sources, *rows[len(moves.targets) :]]  # the first ones have been exchanged
            for sequence, row, count in zip(sequences, places, counts, strict=True):
                self._kept.keep(sequence, int(row), count)
        return sequences

    def _num_run(self, rows: np.ndarray) -> np.ndarray:
        """Return the tokens that the cache of `rows` contains, int64 (n,)."""
        return self._batch.cached[rows]

    def _left(self, rows: np.ndarray, moves: Moves) -> None:
        """Follow the removal of `rows` from the batch; `moves` are those of rows that take their places."""


@dataclass(eq=False)
class RowCall(GenerateCall):
    """Decodes on the CPU, where the cache has rows."""

    cache: RowCache
    _rows_changed: bool = field(default=False, init=False)  # since they were sorted

    def _add(self, sequence: Sequence) -> int:
        self._rows_changed = True
        return super()._add(sequence)

    def _left(self, rows: np.ndarray, moves: Moves) -> None:
        self._rows_changed = True

    def _sort(self) -> None:
        """Sort the rows by length, if `DecodeAttention` would pad them much otherwise."""
        if not self._rows_changed or self.decoder.tp.exact:
            return
        self._rows_changed = False
        lengths = self._batch.cached[self._batch.rows]
        order = np.argsort(-lengths, kind="stable")
        if padded_tokens(lengths) > MAX_PADDING * padded_tokens(lengths[order]):
            self._batch.reorder(order)
            self.cache.reorder(order)

    def _decode(self) -> None:
        self._preempt()
        self._sort()
        batch = self._batch
        rows = np.arange(batch.num_rows)
        self._grow(rows, batch.cached[rows] + 1)
        places = batch.cached[rows]
        shifted = None if self.decoder.vision is None else places + batch.rope_shifts[rows]
        new = NewTokens(self.cache, rows, places, np.ones_like(rows), shifted)
        token_ids = torch.from_numpy(batch.last_tokens[rows]).to(self.cache.device)
        chosen: list[torch.Tensor] | None = [] if self._records else None
        attention: CachedAttention = ExactAttention(new) if self.decoder.tp.exact else DecodeAttention(new)
        logits = self.decoder.forward(token_ids, attention, chosen)
        uniform = batch.uniforms(self.trainer_step)
        tp, vocab_size = self.decoder.tp, self.decoder.vocab_size
        token_ids, log_probs = sample_sharded(logits, uniform, vocab_size, self.sampling, tp)
        batch.append(token_ids.cpu().numpy(), log_probs.cpu().numpy(), _experts(chosen))
        self._finish()


def _experts(chosen: list[torch.Tensor] | None) -> np.ndarray:
    """Return a decoder's choices in each layer, int16 (n, layers x topk); (1, 0) if they are not recorded."""
    return torch.cat(chosen, dim=1).to("cpu", torch.int16).numpy() if chosen else np.zeros((1, 0), np.int16)
