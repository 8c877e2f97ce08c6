"""TensorRT-LLM as a `RolloutEngine`. Never run; see the package's docstring."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

from hpcrl.config.schema import Config
from hpcrl.model.shape import ModelShape
from hpcrl.reshard.tensorrt_llm_layout import tensorrt_llm_shards
from hpcrl.rollout.protocol import Completion, Request, RequestSource, SamplingParams, WeightFormat
from hpcrl.rollout.tensorrt_llm import signatures
from hpcrl.rollout.tensorrt_llm.arguments import check_architecture, engine_arguments, max_model_len, model_dir
from hpcrl.rollout.tensorrt_llm.generation import Generation, Server
from hpcrl.rollout.tensorrt_llm.weights import buffers
from hpcrl.runtime.exits import InputError

if TYPE_CHECKING:
    import torch

    from hpcrl.grid.groups import RoleGroups
    from hpcrl.model.params import Shard


class Worker(Server, Protocol):
    """worker.TrtllmWorker, as the engine sees it."""

    def parameters(self) -> Iterable[tuple[str, Tensor]]: ...
    def paused(self) -> AbstractContextManager[None]: ...
    def forget_prefixes(self) -> None: ...
    def release_cache(self) -> None: ...
    def take_cache(self) -> None: ...
    def close(self) -> None: ...


class TrtllmEngine:
    """One rank of a replica; a `RolloutEngine`.

    Weights stay on the GPU; the KV cache goes and comes when `can_sleep`. A pause ends in minutes: its hang detector
    goes on counting, so `updating_weights` is for the transfer alone.
    """

    weight_format: WeightFormat = "tensorrt_llm"

    def __init__(
        self,
        worker: Worker,
        expected: Sequence[Shard],
        *,
        tp_rank: int,
        share: Callable[[Any], Any],
        max_num_seqs: int,
        max_model_len: int,
        vocab_size: int,
        can_sleep: bool,
    ) -> None:
        """`share(x)`, collective over the replica, is the `x` of its first rank; see Generation."""
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
            self._worker.forget_prefixes()

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
            raise RuntimeError("the engine sleeps; call wake() before generate()")
        server = self._worker if self._is_first else None
        generation = Generation(server, self._share, sampling, seed=seed, step=step, **self._limits)
        return generation.run(
            requests, source=source, on_finished=on_finished, on_step=on_step, should_abort=should_abort
        )

    def sleep(self) -> None:
        if not self._can_sleep or self._asleep:
            return
        with self._worker.paused():
            self._worker.forget_prefixes()
            self._worker.release_cache()
        self._asleep = True

    def wake(self) -> None:
        if not self._asleep:
            return
        with self._worker.paused():
            self._worker.take_cache()
        self._asleep = False

    def close(self) -> None:
        """End its thread, which calls MPI. Collective over the replica; a second call does nothing."""
        if not self._closed:
            self._closed = True
            self._worker.close()


def make_engine(config: Config, shape: ModelShape, groups: RoleGroups, device: torch.device) -> TrtllmEngine:
    """This rank's engine. Collective over the ranks of each replica; tensorrt_llm is imported already, by all ranks of
    the job together (launch.trtllm), and training's memory should be as it will be while generating.

    Raises ConfigError or InputError for a configuration, version or machine that this engine cannot work with.
    """
    layout, coord = groups.layout, groups.coord
    for axis in ("pp", "cp", "ep", "etp", "vpp"):
        if getattr(layout, axis) != 1:
            raise InputError(
                f"placement.rollout.{axis}={getattr(layout, axis)} with rollout.engine=tensorrt_llm, which is used "
                f"with tensor parallelism alone; set {axis}: 1"
            )
    arguments = engine_arguments(config, shape, layout.tp)
    expected = tensorrt_llm_shards(shape, tp_rank=coord.tp, tp_size=layout.tp)
    check_architecture(model_dir(config), shape)
    if device.type != "cuda":
        raise InputError("rollout.engine=tensorrt_llm needs a GPU and none can be used here; use rollout.engine=native")
    signatures.self_test(importlib.import_module)

    from mpi4py import MPI

    from hpcrl.rollout.tensorrt_llm.worker import TrtllmWorker
    from hpcrl.runtime.mpi import broadcast_object, create_group, duplicate
    from hpcrl.runtime.world import before_mpi_finalize

    theirs = create_group(MPI.COMM_WORLD, layout.group_of(groups.rank, "tp"))
    ours = duplicate(theirs)  # TensorRT-LLM's thread uses the first one
    engine = TrtllmEngine(
        TrtllmWorker(arguments, theirs, groups.rank, device, public=config.rollout.trtllm.design == "single_process"),
        expected,
        tp_rank=coord.tp,
        share=lambda news: broadcast_object(ours, news),
        max_num_seqs=config.rollout.max_num_seqs,
        max_model_len=max_model_len(config),
        vocab_size=shape.vocab_size,
        can_sleep=config.rollout.free_cache_engine,
    )
    before_mpi_finalize(engine.close)
    return engine
