"""vLLM as a `RolloutEngine`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hpcrl.model.shape import ModelShape
from hpcrl.rollout.engines.vllm.core import EngineCore
from hpcrl.rollout.engines.vllm.sampler import Drawn, KeyedSampler
from hpcrl.rollout.protocol import Completion, Request, RequestSource, SamplingParams
from hpcrl.rollout.sampling import request_key


class VllmEngine:
    """One rank of a replica. Its ranks schedule alike, because they have the same requests and draw the same tokens.

    weights: vLLM's parameters, by the names of the refit's plan.
    """

    def __init__(
        self, core: EngineCore, shape: ModelShape, weights: Mapping[str, Tensor], *, max_model_len: int
    ) -> None:
        self._core, self._shape, self._max_model_len = core, shape, max_model_len
        self._weights = dict(weights)
        self._asleep = self._generating = False
        self._sizes: list[int] = []  # bytes of the caches while it sleeps

    def weights(self) -> dict[str, Tensor]:
        return self._weights

    def adopt(self, name: str, tensor: Tensor) -> None:
        own = self._weights[name]
        if (own.shape, own.dtype, own.device) != (tensor.shape, tensor.dtype, tensor.device):
            raise ValueError(f"weight {name} is {tuple(own.shape)} {own.dtype}; copy the tensor to adopt instead")
        self._core.replace(name, tensor.detach())
        self._weights[name] = tensor.detach()

    @contextmanager
    def updating_weights(self) -> Iterator[None]:
        if self._generating:
            raise RuntimeError("weights cannot be updated while a generation is in progress; abort it first")
        yield
        self._core.reset_prefix_cache()

    def sleep(self) -> None:
        """Free the KV cache in place: vLLM's layers keep their references."""
        if self._asleep:
            return
        self._asleep = True
        storages = [cache.untyped_storage() for cache in self._core.caches()]
        self._sizes = [storage.nbytes() for storage in storages]
        for storage in storages:
            storage.resize_(0)

    def wake(self) -> None:
        if not self._asleep:
            return
        self._asleep = False
        for cache, nbytes in zip(self._core.caches(), self._sizes, strict=True):
            cache.untyped_storage().resize_(nbytes)
        self._core.reset_prefix_cache()

    @torch.no_grad()
    def generate(
        self,
        requests: Sequence[Request],
        sampling: SamplingParams,
        *,
        seed: int,
        step: int,
        source: RequestSource | None = None,
        on_finished: Callable[[int, Completion], None] | None = None,
        on_step: Callable[[], None] | None = None,
        should_abort: Callable[[], bool] | None = None,
    ) -> list[Completion]:
        if self._asleep:
            raise RuntimeError("the engine is asleep; call wake() before generate()")
        self._core.begin(KeyedSampler(self._shape.softmax_size, sampling, step))
        open_: dict[str, tuple[int, Drawn]] = {}
        completions: dict[int, Completion] = {}

        def add(more: Sequence[Request]) -> None:
            for request in more:
                context = request.context_ids(sampling, self._max_model_len, self._shape.softmax_size)
                first, limit = len(request.prefix_ids), request.num_to_draw(sampling)
                drawn = Drawn(request_key(seed, request.uid), request.sample_index, first, limit)
                index = len(open_) + len(completions)
                name = self._core.add(
                    context.tolist(), drawn, ignore_eos=sampling.ignore_eos, stop=sampling.eos_token_ids
                )
                open_[name] = index, drawn

        self._generating = True
        try:
            add(requests)
            while should_abort is None or not should_abort():
                if source is not None:
                    more = source.take(idle=not open_)
                    if more is None:
                        source = None
                    else:
                        add(more)
                if open_:
                    for name, count, has_stopped in self._core.step():
                        index, drawn = open_.pop(name)
                        completions[index] = drawn.completion(count, "stop" if has_stopped else "length")
                        if on_finished is not None:
                            on_finished(index, completions[index])
                    if on_step is not None:
                        on_step()
                elif source is None:
                    break
            for index, drawn in open_.values():
                completions[index] = drawn.completion(drawn.count, "abort")
        finally:
            self._core.end(list(open_))
            self._generating = False
        return [completions[index] for index in range(len(completions))]
