"""One call of `generate` in progress."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
import torch

from hpcrl.rollout.native.attention import DecodeAttention, PrefillAttention
from hpcrl.rollout.native.decoder import Decoder
from hpcrl.rollout.native.kv_cache import KVCache
from hpcrl.rollout.native.running_batch import RunningBatch
from hpcrl.rollout.native.scheduler import Scheduler
from hpcrl.rollout.native.sequence import Sequence
from hpcrl.rollout.protocol import Completion, SamplingParams
from hpcrl.rollout.sampling import Sampled, sample, uniforms


class Generation:
    """Steps until every sequence is complete; `completions` is by the index of the request."""

    def __init__(
        self,
        decoder: Decoder,
        cache: KVCache,
        scheduler: Scheduler,
        sampling: SamplingParams,
        trainer_step: int,
        on_finished: Callable[[int, Completion], None] | None = None,
    ) -> None:
        self.completions: dict[int, Completion] = {}
        self._decoder = decoder
        self._cache = cache
        self._scheduler = scheduler
        self._sampling = sampling
        self._trainer_step = trainer_step
        self._on_finished = on_finished
        self._batch = RunningBatch(cache.num_slots, sampling)

    def run(self, sequences: Iterable[Sequence], on_step: Callable[[], None] | None = None) -> None:
        self._scheduler.add(sequences)
        while self._scheduler.has_work:
            self.step()
            if on_step is not None:
                on_step()

    def step(self) -> None:
        """One token more of some rows: of the newly admitted sequences, or else of all running ones."""
        admitted = self._scheduler.schedule()
        rows, sampled = self._prefill(admitted) if admitted else self._decode()
        self._postprocess(rows, sampled)

    def _prefill(self, sequences: list[Sequence]) -> tuple[slice, Sampled]:
        rows = self._batch.add(sequences)
        lengths = self._batch.cached[rows]
        attention = PrefillAttention(self._cache, rows.start, lengths)
        token_ids = np.concatenate([sequence.prompt_ids for sequence in sequences])
        return rows, self._sample(rows, token_ids, attention, last=lengths.cumsum() - 1)

    def _decode(self) -> tuple[slice, Sampled]:
        rows = self._batch.rows
        attention = DecodeAttention(self._cache, self._batch.cached[rows])
        sampled = self._sample(rows, self._batch.last_tokens[rows], attention)
        self._batch.cached[rows] += 1
        return rows, sampled

    def _sample(
        self,
        rows: slice,
        token_ids: np.ndarray,
        attention: PrefillAttention | DecodeAttention,
        last: np.ndarray | None = None,
    ) -> Sampled:
        device = self._cache.device
        logits = self._decoder.forward(
            torch.from_numpy(token_ids).to(device),
            attention,
            None if last is None else torch.from_numpy(last).to(device),
        )
        batch = self._batch
        uniform = uniforms(batch.keys[rows], batch.num_new[rows], batch.sample_indices[rows], self._trainer_step)
        return sample(logits, uniform, self._decoder.vocab_size, self._sampling)

    def _postprocess(self, rows: slice, sampled: Sampled) -> None:
        self._batch.append(rows, sampled.token_ids.cpu().numpy(), sampled.log_probs.cpu().numpy())
        finished = self._batch.finished()
        if not len(finished):
            return
        completions = self._batch.completions(finished)
        self.completions.update(completions)
        if self._on_finished is not None:
            for index, completion in completions.items():
                self._on_finished(index, completion)
        self._scheduler.finish(len(finished))
        vacancy = self._batch.remove(finished)
        self._cache.move(torch.from_numpy(vacancy.sources), torch.from_numpy(vacancy.targets), vacancy.length)
