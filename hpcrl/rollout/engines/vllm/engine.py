"""vLLM as a `RolloutEngine`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hpcrl.model.build import DTYPES
from hpcrl.model.families.config_json import hf_config
from hpcrl.rollout.engines.engine import BLOCK_SIZE, CacheLayout
from hpcrl.rollout.engines.native.engine import cache_bytes
from hpcrl.rollout.engines.vllm.core import EngineCore, Place
from hpcrl.rollout.protocol import (
    Completion,
    EngineOfCalls,
    FinishReason,
    OnFinished,
    Request,
    SamplingParams,
)
from hpcrl.rollout.sampling import Drawn, KeyedSampler
from hpcrl.runtime import platform

if TYPE_CHECKING:
    from hpcrl.config.schema import Config
    from hpcrl.model.params import Shard
    from hpcrl.model.shape import ModelShape
    from hpcrl.runtime.groups import RoleGroups


@dataclass(eq=False)
class VllmCall:
    """One call of `generate`."""

    core: EngineCore
    sampling: SamplingParams
    seed: int
    max_model_len: int
    vocab_size: int
    on_finished: OnFinished
    completions: dict[int, Completion] = field(default_factory=dict, init=False)
    _open: dict[str, tuple[int, Drawn]] = field(default_factory=dict, init=False)  # by vLLM's name of the request

    @property
    def has_work(self) -> bool:
        return bool(self._open)

    def add(self, requests: Sequence[Request]) -> None:
        for request in requests:
            context = request.context_ids(self.sampling, self.max_model_len, self.vocab_size)
            drawn = Drawn.of(request, self.sampling, self.seed)
            stop = () if self.sampling.ignore_eos else self.sampling.eos_token_ids
            name = self.core.add(context.tolist(), drawn, stop)
            self._open[name] = len(self._open) + len(self.completions), drawn

    def step(self) -> None:
        for name, count, has_stopped in self.core.step():
            index = self._complete(name, count, "stop" if has_stopped else "length")
            if self.on_finished is not None:
                self.on_finished(index, self.completions[index])

    def abort(self) -> None:
        counts = {name: self.core.count(name) for name in self._open}
        self.core.cancel(list(counts))
        for name, count in counts.items():
            self._complete(name, count, "abort")

    def _complete(self, name: str, count: int, reason: FinishReason) -> int:
        index, drawn = self._open.pop(name)
        self.completions[index] = drawn.completion(count, reason)
        return index


class VllmEngine(EngineOfCalls):
    """One rank of a replica. The ranks schedule alike, because they have the same requests and draw the same tokens.

    Args:
        weights: vLLM's parameters, by their names in the refit's plan.
        vocab_size: ids that have a probability.
    """

    def __init__(self, core: EngineCore, weights: Mapping[str, Tensor], *, max_model_len: int, vocab_size: int) -> None:
        self._core, self._max_model_len, self._vocab_size = core, max_model_len, vocab_size
        self._weights = dict(weights)
        self._asleep: list[tuple[torch.UntypedStorage, int]] | None = None  # of the KV cache, with its bytes

    def weights(self) -> dict[str, Tensor]:
        return self._weights

    def adopt(self, name: str, tensor: Tensor) -> None:
        raise NotImplementedError(f"{name}: vLLM keeps its own weights; set rollout.checkpoint_engine.alias=false")

    @property
    def is_asleep(self) -> bool:
        return self._asleep is not None

    @contextmanager
    def updating_weights(self) -> Iterator[None]:
        with super().updating_weights():
            yield
        self._core.reset_prefix_cache()

    def _begin(self, sampling: SamplingParams, seed: int, step: int, on_finished: OnFinished, _: bool) -> VllmCall:
        self._core.sampler = KeyedSampler(self._vocab_size, sampling, step)
        return VllmCall(self._core, sampling, seed, self._max_model_len, self._vocab_size, on_finished)

    def sleep(self) -> None:
        """Free the KV cache. vLLM's layers keep their tensors, whose memory comes back in `wake`."""
        if self._asleep is None:
            self._asleep = [(storage, storage.nbytes()) for storage in self._core.cache_storages()]
            for storage, _ in self._asleep:
                storage.resize_(0)

    def wake(self) -> None:
        if self._asleep is not None:
            for storage, nbytes in self._asleep:
                storage.resize_(nbytes)
                # Attention multiplies what it masks by 0, and memory may have NaN
                storage.fill_(0)  # type: ignore[attr-defined]
            self._asleep = None
            self._core.reset_prefix_cache()


def make_engine(
    groups: RoleGroups, shape: ModelShape, config: Config, shards: Sequence[Shard], *, ranks_on_node: int
) -> VllmEngine:
    """Make this rank's engine, whose weights are `shards`. Collective over the ranks of each replica."""
    layout, device, rollout = groups.layout, platform.device(), config.rollout
    longest = config.data.max_prompt_length + config.data.max_response_length
    dtype = DTYPES[rollout.dtype or config.model.dtype]
    # vLLM leaves its first block empty
    block = CacheLayout.of(shape, layout.tp, longest).block_bytes(dtype.itemsize)
    core = EngineCore(
        hf_config(shape),
        Place(groups.rank, layout.group_of(groups.rank, "tp"), groups.tp, groups.pp),
        device,
        dtype=str(dtype).removeprefix("torch."),
        enforce_eager=rollout.enforce_eager or device.type == "cpu",
        max_model_len=longest,
        max_num_seqs=rollout.max_num_seqs,
        max_num_batched_tokens=max(rollout.max_num_batched_tokens, rollout.max_num_seqs),
        kv_cache_memory_bytes=cache_bytes(rollout, shape, layout.tp, dtype, longest, ranks_on_node) + block,
        block_size=BLOCK_SIZE,
        enable_prefix_caching=rollout.enable_prefix_caching,
    )
    weights = own_weights(core.parameters(), shards)
    return VllmEngine(core, weights, max_model_len=longest, vocab_size=shape.softmax_size)


def own_weights(parameters: Iterable[tuple[str, Tensor]], shards: Sequence[Shard]) -> dict[str, Tensor]:
    """Return vLLM's parameters by name, zeros, in the order of the refit's plan. Raises RuntimeError if they are not
    those of the plan."""
    found = dict(parameters)
    expected = {shard.local_name: shard.local_shape for shard in shards}
    sizes = {name: tuple(tensor.shape) for name, tensor in found.items()}
    if sizes != expected:
        different = sorted({name for name, _ in sizes.items() ^ expected.items()})
        raise RuntimeError(f"vLLM's parameters differ from the refit plan: {', '.join(different[:4])}")
    for tensor in found.values():
        tensor.zero_()  # refit does not write the rows that only pad the vocabulary
    return {name: found[name] for name in expected}
