"""The native generation engine: continuous batching over a KV cache, in plain torch, with tensor parallelism."""

from __future__ import annotations

import collections.abc
from collections.abc import Callable

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from hpcrl.model.shape import ModelShape
from hpcrl.rollout.native.decoder import Decoder
from hpcrl.rollout.native.generation import Generation
from hpcrl.rollout.native.kv_cache import KVCache
from hpcrl.rollout.native.scheduler import Scheduler
from hpcrl.rollout.native.sequence import Sequence
from hpcrl.rollout.native.tensor_parallel import TensorParallel
from hpcrl.rollout.protocol import Completion, Request, SamplingParams

CPU = torch.device("cpu")


class NativeEngine:
    """One rank of a replica; a `RolloutEngine`.

    `max_num_seqs` sequences run at once, `max_num_batched_tokens` prompt tokens are prefilled in one call, and
    `max_model_len` is the longest prompt plus the longest response: the KV cache has their product, for its lifetime.
    """

    def __init__(
        self,
        shape: ModelShape,
        tp_group: dist.ProcessGroup | None,
        tp_rank: int,
        tp_size: int,
        dtype: torch.dtype,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        device: torch.device = CPU,
    ) -> None:
        self._max_num_seqs = max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens
        self._decoder = Decoder(shape, TensorParallel(tp_group, tp_rank, tp_size), dtype, max_model_len, device)
        self._cache = KVCache(
            shape.num_layers,
            max_num_seqs,
            shape.num_query_groups // tp_size,
            max_model_len,
            shape.head_dim,
            dtype,
            device,
        )

    def weights(self) -> dict[str, Tensor]:
        return self._decoder.weights

    def sleep(self) -> None:
        self._cache.release()

    def wake(self) -> None:
        if not self._cache.is_allocated:
            self._cache.allocate()

    @torch.no_grad()
    def generate(
        self,
        requests: collections.abc.Sequence[Request],
        sampling: SamplingParams,
        *,
        seed: int,
        step: int,
        on_finished: Callable[[int, Completion], None] | None = None,
        on_step: Callable[[], None] | None = None,
    ) -> list[Completion]:
        if not self._cache.is_allocated:
            raise RuntimeError("the engine sleeps; call wake() before generate()")
        sequences = [
            Sequence.from_request(index, request, seed, sampling.max_new_tokens)
            for index, request in enumerate(requests)
        ]
        for request, sequence in zip(requests, sequences, strict=True):
            self._check(request.uid, sequence)
        scheduler = Scheduler(self._max_num_seqs, self._max_num_batched_tokens)
        generation = Generation(self._decoder, self._cache, scheduler, sampling, step, on_finished)
        generation.run(sequences, on_step)
        return [generation.completions[index] for index in range(len(requests))]

    def _check(self, uid: str, sequence: Sequence) -> None:
        """A token that is no row of the embedding would read as zeros under tensor parallelism, and go unseen."""
        prompt, longest = sequence.prompt_ids, self._cache.max_len
        if not len(prompt):
            raise ValueError(f"prompt {uid} has no tokens; give it at least one, such as a beginning-of-sequence token")
        if len(prompt) + sequence.max_new_tokens > longest:
            raise ValueError(
                f"prompt {uid} has {len(prompt)} tokens, with max_new_tokens={sequence.max_new_tokens} that is more "
                f"than max_model_len={longest}; shorten one of them or make the engine with a larger limit"
            )
        low, high, last = np.min(prompt), np.max(prompt), self._decoder.vocab_size - 1
        if low < 0 or high > last:
            raise ValueError(f"prompt {uid} has token ids {low} to {high}; expected 0 to {last}")
