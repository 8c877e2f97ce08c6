"""TensorRT-LLM as a `RolloutEngine`. Never run; see the package's docstring.

The engine batches requests itself; this module limits what is in flight, sends results to all ranks, and cancels what
is to be aborted.
"""

from __future__ import annotations

import contextlib
import importlib
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from hpcrl.config.schema import Config
from hpcrl.model.shape import ModelShape
from hpcrl.rollout.engines.tensorrt_llm import signatures
from hpcrl.rollout.engines.tensorrt_llm.arguments import (
    check_architecture,
    completion,
    engine_arguments,
    max_model_len,
    model_dir,
    sampling_arguments,
)
from hpcrl.rollout.engines.tensorrt_llm.declaration import TensorRTLLM
from hpcrl.rollout.engines.tensorrt_llm.worker import TrtllmWorker, buffers
from hpcrl.rollout.protocol import Completion, EngineOfCalls, OnFinished, Request, SamplingParams
from hpcrl.runtime.exits import InputError

if TYPE_CHECKING:
    import torch

    from hpcrl.model.params import Shard
    from hpcrl.runtime.groups import RoleGroups

POLL_SECONDS = 0.02  # longest time between two broadcasts of results
CANCEL_SECONDS = 60.0  # then a cancelled request without a result counts as not started


@dataclass(eq=False)
class GenerateCall:
    """One call of generate(). `server` is None on all ranks but the first; `share` broadcasts the first rank's
    argument.

    At most `max_in_flight` requests are submitted, because the engine does not answer a request that is cancelled while
    it is queued.
    """

    server: TrtllmWorker | None
    share: Callable[[Any], Any]
    sampling: SamplingParams
    seed: int
    trainer_step: int
    max_in_flight: int
    max_model_len: int
    vocab_size: int
    on_finished: OnFinished = None
    completions: dict[int, Completion] = field(default_factory=dict, init=False)
    _requests: list[Request] = field(default_factory=list, init=False)
    _inputs: list[list[int]] = field(default_factory=list, init=False)
    _waiting: deque[int] = field(default_factory=deque, init=False)
    _in_flight: dict[int, Any] = field(default_factory=dict, init=False)  # on the first rank only

    @property
    def has_work(self) -> bool:
        return len(self.completions) < len(self._requests)

    def add(self, requests: Sequence[Request]) -> None:
        """Check requests, on every rank alike, before one of them is submitted."""
        for request in requests:
            ids = request.context_ids(self.sampling, self.max_model_len, self.vocab_size)
            self._waiting.append(len(self._requests))
            self._requests.append(request)
            self._inputs.append(ids.tolist())

    def step(self) -> None:
        """Collective over the replica."""
        self._store(self.share(self._advance()))

    def _advance(self) -> list[tuple[int, Completion]]:
        """On the first rank: submit requests up to the limit, and return those that ended within POLL_SECONDS."""
        if self.server is None:
            return []
        while self._waiting and len(self._in_flight) < self.max_in_flight:
            index = self._waiting.popleft()
            request = self._requests[index]
            arguments = sampling_arguments(request, self.sampling, seed=self.seed, step=self.trainer_step)
            self._in_flight[index] = self.server.submit(self._inputs[index], arguments)
        return self._wait(POLL_SECONDS)

    def _wait(self, seconds: float) -> list[tuple[int, Completion]]:
        """Return ended requests; polls until there is one, or for `seconds`."""
        assert self.server is not None
        deadline = time.monotonic() + seconds
        while True:
            ended = []
            for index, handle in list(self._in_flight.items()):
                output = self.server.poll(handle)
                if output is not None:
                    del self._in_flight[index]
                    ended.append((index, completion(output, self._requests[index].uid)))
            if ended or not self._in_flight or time.monotonic() >= deadline:
                return ended
            time.sleep(1e-3)

    def _store(self, ended: list[tuple[int, Completion]]) -> None:
        for index, done in ended:
            self.completions[index] = done
            if self.on_finished is not None and done.finish_reason != "abort":
                self.on_finished(index, done)

    def abort(self) -> None:
        """Cancel all open requests; those that end by themselves meanwhile keep their reason and are reported."""
        ended: list[tuple[int, Completion]] = []
        if self.server is not None:
            for handle in self._in_flight.values():
                self.server.cancel(handle)
            deadline = time.monotonic() + CANCEL_SECONDS
            while self._in_flight and time.monotonic() < deadline:
                ended += self._wait(POLL_SECONDS)
        self._store(self.share(ended))
        not_started = Completion(np.zeros(0, np.int32), np.zeros(0, np.float32), "abort")
        for index in range(len(self._requests)):
            self.completions.setdefault(index, not_started)


class TrtllmEngine(EngineOfCalls):
    """One rank of a replica; a `RolloutEngine`.

    Weights stay on the GPU; sleep frees the KV cache if `can_sleep`. A pause must be shorter than some minutes, because
    the engine's hang detector keeps counting: `updating_weights` is for the transfer only.
    """

    def __init__(
        self,
        worker: TrtllmWorker,
        expected: Sequence[Shard],
        *,
        tp_rank: int,
        share: Callable[[Any], Any],
        max_num_seqs: int,
        max_model_len: int,
        vocab_size: int,
        can_sleep: bool,
    ) -> None:
        """`share(x)`, collective over the replica, returns the `x` of its first rank; see GenerateCall."""
        self._worker = worker
        self._is_first = tp_rank == 0
        self._share = share
        self._limits = {"max_in_flight": max_num_seqs, "max_model_len": max_model_len, "vocab_size": vocab_size}
        self._can_sleep = can_sleep
        self._asleep = self._closed = False
        self._weights = buffers(worker.parameters(), expected, tp_rank)
        for weight in self._weights.values():
            weight.zero_()  # refit does not write the rows that only pad the vocabulary

    def weights(self) -> dict[str, Tensor]:
        return self._weights

    def adopt(self, name: str, tensor: Tensor) -> None:
        raise NotImplementedError(
            f"{name}: TensorRT-LLM's CUDA graphs hold the addresses of its own weights; "
            "set rollout.checkpoint_engine.alias=false"
        )

    @contextlib.contextmanager
    def updating_weights(self) -> Iterator[None]:
        with self._worker.paused():
            yield
            self._worker.reset_prefix_cache()

    @property
    def is_asleep(self) -> bool:
        return self._asleep

    def _begin(self, sampling: SamplingParams, seed: int, step: int, on_finished: OnFinished, _: bool) -> GenerateCall:
        server = self._worker if self._is_first else None
        return GenerateCall(server, self._share, sampling, seed, step, on_finished=on_finished, **self._limits)

    def sleep(self) -> None:
        if not self._can_sleep or self._asleep:
            return
        with self._worker.paused():
            self._worker.reset_prefix_cache()
            self._worker.release_cache()
        self._asleep = True

    def wake(self) -> None:
        if not self._asleep:
            return
        with self._worker.paused():
            self._worker.allocate_cache()
        self._asleep = False

    def close(self) -> None:
        """End the engine's thread, which calls MPI. Collective over the replica; a second call does nothing."""
        if not self._closed:
            self._closed = True
            self._worker.close()


def make_engine(config: Config, shape: ModelShape, groups: RoleGroups, device: torch.device) -> TrtllmEngine:
    """Make this rank's engine. Collective over the ranks of each replica.

    All ranks of the job must have imported tensorrt_llm together (runtime.trtllm), and training's memory should be as
    it will be during generation. Raises ConfigError or InputError for a configuration, version or machine that this
    engine does not support.
    """
    layout, coord = groups.layout, groups.coord
    for axis in ("pp", "cp", "ep", "etp", "vpp"):
        if getattr(layout, axis) != 1:
            raise InputError(
                f"placement.rollout.{axis}={getattr(layout, axis)}: rollout.engine=tensorrt_llm supports "
                f"tensor parallelism only; set {axis}: 1"
            )
    arguments = engine_arguments(config, shape, layout.tp)
    expected = TensorRTLLM().shards(shape, coord.tp, layout.tp)
    check_architecture(model_dir(config), shape)
    if device.type != "cuda":
        raise InputError("rollout.engine=tensorrt_llm needs a GPU, and no GPU is usable; use rollout.engine=native")
    signatures.self_test(importlib.import_module)

    from mpi4py import MPI

    from hpcrl.runtime.mpi import broadcast_object, create_group, duplicate
    from hpcrl.runtime.world import before_mpi_finalize

    engine_comm = create_group(MPI.COMM_WORLD, layout.group_of(groups.rank, "tp"))
    comm = duplicate(engine_comm)  # TensorRT-LLM's thread uses the first one
    engine = TrtllmEngine(
        TrtllmWorker(
            arguments, engine_comm, groups.rank, device, public=config.rollout.trtllm.design == "single_process"
        ),
        expected,
        tp_rank=coord.tp,
        share=lambda value: broadcast_object(comm, value),
        max_num_seqs=config.rollout.max_num_seqs,
        max_model_len=max_model_len(config),
        vocab_size=shape.vocab_size,
        can_sleep=config.rollout.free_cache_engine,
    )
    before_mpi_finalize(engine.close)
    return engine
